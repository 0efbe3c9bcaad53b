// What the sanitizers watch: engines that come and go, every kernel, callers that take turns, a thread that dies.
// Buffers have their exact size, so that a read past a record is seen.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "c_api.h"

namespace {

constexpr int kHidden = 200, kInner = 136, kExperts = 3, kPicked = 2, kTileBytes = 1088;
char error[256];

void check(bool good, const std::string& what) {
  if (good) return;
  std::fprintf(stderr, "%s: %s\n", what.c_str(), error);
  std::exit(1);
}

int tiles(int rows) { return (rows + 63) / 64; }

struct Model {
  std::vector<std::unique_ptr<std::uint8_t[]>> records;
  std::vector<const std::uint8_t*> pointers;
  std::int32_t code_of[kExperts];
  tandem_code code{};
  tandem_layer layer{};

  Model(int kind, std::mt19937& random) {
    const int window = kind == 0 ? 64 : 32;
    const int windows = (kHidden + window - 1) / window, inner_windows = (kInner + window - 1) / window;
    const std::int64_t gate = std::int64_t{tiles(kInner)} * windows * kTileBytes;
    const std::int64_t down = std::int64_t{tiles(kHidden)} * inner_windows * kTileBytes;
    const std::int64_t bases = 2 * gate + down, bytes = bases + (kind == 0 ? 12 : 0);
    code.kind = kind;
    code.gate = {0, windows * kTileBytes, kTileBytes, kind == 0 ? bases : -1};
    code.up = {gate, windows * kTileBytes, kTileBytes, kind == 0 ? bases + 4 : -1};
    code.down = {2 * gate, kTileBytes, tiles(kHidden) * kTileBytes, kind == 0 ? bases + 8 : -1};
    for (int e = 0; e < kExperts; e++) {
      records.emplace_back(new std::uint8_t[static_cast<std::size_t>(bytes)]);
      std::uint8_t* record = records.back().get();
      for (std::int64_t i = 0; i < bytes; i++) record[i] = static_cast<std::uint8_t>(random());
      for (std::int64_t tile = 0; tile < bases / kTileBytes; tile++)
        for (int row = 0; row < 64; row++)
          record[tile * kTileBytes + 1024 + row] = static_cast<std::uint8_t>((kind == 0 ? 200 : 118) + random() % 4);
      const float base[3] = {0.03f, 0.04f, 0.05f};
      if (kind == 0) std::memcpy(record + bases, base, sizeof base);
      pointers.push_back(record);
      code_of[e] = 0;
    }
    layer = {kHidden, kInner, kExperts, 0, INFINITY, 1.0f, 0.0f, 1, &code, code_of, pointers.data()};
  }
};

struct Work {
  std::vector<float> x, weights, y;
  std::vector<std::int32_t> ids;
  tandem_batch batch{};

  Work(int tokens, std::mt19937& random) {
    for (int i = 0; i < tokens * kHidden; i++) x.push_back(static_cast<float>(random() % 1000) / 500.0f - 1.0f);
    for (int i = 0; i < tokens * kPicked; i++) {
      weights.push_back(0.5f);
      ids.push_back(static_cast<int>(random() % (kExperts + 1)) - 1);
    }
    y.resize(x.size());
    batch = {tokens, kPicked, 0, 1, x.data(), weights.data(), ids.data(), y.data()};
  }
};

tandem_engine* engine_of(int threads, const std::string& kernel, int spin_us) {
  static const std::vector<float> taps = [] {
    std::vector<float> all;
    for (int tap = 0; tap < 6; tap++)
      for (int k = 0; k < 16; k++) {
        const int half = k < 8 ? k : 15 - k;
        all.push_back((k < 8 ? 1.0f : -1.0f) * static_cast<float>((tap * 5 + half) % 7 - 3));
      }
    return all;
  }();
  const std::vector<std::int32_t> counts(static_cast<std::size_t>(threads), 0);
  tandem_engine* engine =
      tandem_engine_new(nullptr, counts.data(), threads, spin_us, kernel.c_str(), taps.data(), error, sizeof error);
  check(engine != nullptr, "engine");
  return engine;
}

}  // namespace

int main() {
  std::mt19937 random(1);
  std::string names = std::string(tandem_cpu_kernels()) + ",";
  for (std::size_t end; (end = names.find(',')) != std::string::npos; names.erase(0, end + 1)) {
    const std::string kernel = names.substr(0, end);
    for (int kind = 0; kind < 2; kind++) {
      Model model(kind, random);
      for (const int tokens : {1, 3, 65}) {
        Work work(tokens, random);
        std::vector<float> first;
        for (const int threads : {1, 2, 5}) {
          tandem_engine* engine = engine_of(threads, kernel, threads);
          for (int turn = 0; turn < 2; turn++) {
            check(tandem_moe(engine, &model.layer, &work.batch, error, sizeof error) == 0, kernel);
            for (const float y : work.y) check(std::isfinite(y), kernel + " leaves poison");
            if (first.empty()) first = work.y;
            check(first == work.y, kernel + " depends on the threads");
          }
          tandem_engine_free(engine);
        }
      }
    }
  }
  Model model(0, random);
  tandem_engine* shared = engine_of(3, "", 20);
  std::vector<std::thread> callers;
  for (unsigned caller = 0; caller < 3; caller++)
    callers.emplace_back([&model, shared, caller] {
      std::mt19937 own(caller);
      Work work(2, own);
      for (int turn = 0; turn < 20; turn++)
        if (tandem_moe(shared, &model.layer, &work.batch, nullptr, 0) != 0) std::exit(1);
    });
  for (std::thread& caller : callers) caller.join();
  tandem_engine_free(shared);
  for (int turn = 0; turn < 50; turn++) tandem_engine_free(engine_of(1 + turn % 4, "", turn % 2));
  tandem_engine* wounded = engine_of(3, "", 20);
  tandem_engine_kill(wounded, 1);
  Work work(2, random);
  check(tandem_moe(wounded, &model.layer, &work.batch, error, sizeof error) == 2, "a dead thread was not noticed");
  tandem_engine_free(wounded);
  std::puts("done");
}
