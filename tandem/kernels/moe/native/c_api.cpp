#include "c_api.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.h"
#include "ffn.h"
#include "pool.h"
#include "reading.h"

struct tandem_engine {
  tandem_engine(const std::vector<std::vector<int>>& cpus, std::int64_t spin_ns, const tandem::Kernel& chosen,
                const tandem::Taps& taps)
      : kernel(chosen), pool(cpus, spin_ns), ffn(pool, chosen, taps) {}
  const tandem::Kernel& kernel;
  tandem::Pool pool;
  tandem::Ffn ffn;
  std::mutex turn;
};

namespace {

constexpr int kDoesNotFit = 1, kThreadDead = 2;

void put(const std::string& line, char* out, int32_t bytes) {
  if (out != nullptr && bytes > 0) std::snprintf(out, static_cast<std::size_t>(bytes), "%s", line.c_str());
}

const tandem::Kernel& kernel_or_throw(const char* name) {
  const tandem::Kernel* kernel = tandem::kernel_named(name);
  if (kernel == nullptr)
    throw std::invalid_argument("kernel '" + std::string(name) + "' is unknown or needs another CPU; this one runs " +
                                tandem_cpu_kernels());
  return *kernel;
}

void check_taps(const float* taps, tandem::Taps& out) {
  std::memcpy(out, taps, sizeof out);
  for (const auto& tap : out)
    for (const auto& input : tap)
      for (int k = 0; k < 8; k++)
        if (!(input[k] == -input[15 - k])) throw std::invalid_argument("taps k and 15 - k must be opposite");
}

template <class Call>
int32_t guarded(Call call, char* error, int32_t error_bytes) {
  try {
    call();
    return 0;
  } catch (const std::invalid_argument& problem) {
    put(problem.what(), error, error_bytes);
    return kDoesNotFit;
  } catch (const std::exception& problem) {
    put(problem.what(), error, error_bytes);
    return kThreadDead;
  }
}

}  // namespace

int32_t tandem_cpu_abi(void) { return TANDEM_CPU_ABI; }

const char* tandem_cpu_kernels(void) {
  static const std::string names = [] {
    std::string all;
    for (const tandem::Kernel* kernel : tandem::usable_kernels()) all += (all.empty() ? "" : ",") + std::string(kernel->name);
    return all;
  }();
  return names.c_str();
}

tandem_engine* tandem_engine_new(const int32_t* cpus, const int32_t* counts, int32_t threads, int64_t spin_us,
                                 const char* kernel, const float* taps, char* error, int32_t error_bytes) {
  tandem_engine* engine = nullptr;
  guarded(
      [&] {
        std::vector<std::vector<int>> lists;
        for (int32_t i = 0; i < threads; i++) {
          lists.emplace_back(cpus, cpus + counts[i]);
          cpus += counts[i];
        }
        tandem::Taps checked;
        check_taps(taps, checked);
        engine = new tandem_engine(lists, spin_us * 1000, kernel_or_throw(kernel), checked);
      },
      error, error_bytes);
  return engine;
}

void tandem_engine_free(tandem_engine* engine) { delete engine; }

const char* tandem_engine_kernel(const tandem_engine* engine) { return engine->kernel.name; }

int32_t tandem_engine_pin_failures(const tandem_engine* engine, char* reasons, int32_t reason_bytes) {
  std::string lines;
  int32_t failures = 0;
  for (const std::string& reason : engine->pool.pin_errors())
    if (!reason.empty()) {
      failures++;
      lines += (lines.empty() ? "" : "\n") + reason;
    }
  put(lines, reasons, reason_bytes);
  return failures;
}

int32_t tandem_moe(tandem_engine* engine, const tandem_layer* layer, const tandem_batch* batch, char* error,
                   int32_t error_bytes) {
  return guarded(
      [&] {
        const std::lock_guard<std::mutex> turn(engine->turn);
        engine->ffn.run(*layer, *batch);
      },
      error, error_bytes);
}

int32_t tandem_multiply(const char* kernel, const float* taps, int32_t kind, const uint8_t* tiles, int64_t tile_stride,
                        int64_t window_stride, int32_t tile_count, int32_t windows, const float* x, int32_t tokens,
                        int32_t repeat, float* y, double* best_seconds, char* error, int32_t error_bytes) {
  using tandem::kTableBytes, tandem::kTileRows;
  return guarded(
      [&] {
        const tandem::Kernel& chosen = kernel_or_throw(kernel);
        const auto code = static_cast<tandem::Code>(kind);
        tandem::Taps checked;
        check_taps(taps, checked);
        const std::ptrdiff_t row = std::ptrdiff_t{windows} * kTableBytes;
        std::vector<std::uint8_t> bytes(static_cast<std::size_t>(tokens * row));
        std::vector<float> units(static_cast<std::size_t>(tokens * windows));
        std::vector<const std::uint8_t*> byte_rows;
        std::vector<const float*> unit_rows;
        for (int t = 0; t < tokens; t++) {
          byte_rows.push_back(bytes.data() + t * row);
          unit_rows.push_back(units.data() + t * windows);
          chosen.build(code, checked, x + std::ptrdiff_t{t} * windows * tandem::window_inputs(code), windows,
                       bytes.data() + t * row, units.data() + t * windows);
        }
        const std::ptrdiff_t row_floats = std::ptrdiff_t{tile_count} * kTileRows;
        std::vector<float> native(static_cast<std::size_t>(tokens * row_floats), std::nanf(""));
        double best = INFINITY;
        for (int32_t i = 0; i < repeat; i++) {
          const auto start = std::chrono::steady_clock::now();
          chosen.multiply(code, {tiles, tile_stride, window_stride, tile_count, windows},
                          {byte_rows.data(), unit_rows.data()}, tokens, native.data(), row_floats);
          best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        }
        for (std::ptrdiff_t i = 0; i < tokens * row_floats; i++)
          y[i / kTileRows * kTileRows + chosen.place[i % kTileRows]] = native[static_cast<std::size_t>(i)];
        *best_seconds = best;
      },
      error, error_bytes);
}

double tandem_read(tandem_engine* engine, const uint8_t* data, int64_t bytes, int32_t way) {
  double seconds = -1.0;
  char error[256];
  guarded(
      [&] {
        const std::lock_guard<std::mutex> turn(engine->turn);
        seconds = tandem::read_seconds(engine->pool, data, bytes, way);
      },
      error, sizeof error);
  return seconds;
}

double tandem_core_ghz(void) { return tandem::core_ghz(); }

void tandem_engine_kill(tandem_engine* engine, int32_t index) { engine->pool.kill(index); }
