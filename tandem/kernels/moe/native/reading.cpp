#include "reading.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

namespace tandem {
namespace {

constexpr std::int64_t kLine = 64;

struct Sum {
  std::uint64_t words[8] = {};
  void add(const std::uint8_t* line) {
    std::uint64_t values[8];
    std::memcpy(values, line, sizeof values);
    for (int i = 0; i < 8; i++) words[i] += values[i];
  }
  std::uint64_t total() const {
    std::uint64_t sum = 0;
    for (const std::uint64_t word : words) sum += word;
    return sum;
  }
};

std::uint64_t read_part(const std::uint8_t* data, std::int64_t bytes, int way) {
  constexpr std::int64_t kAhead = 4096;
  Sum sum;
  if (way == 2) {
    const std::int64_t quarter = bytes / 4 / kLine * kLine;
    for (std::int64_t i = 0; i < quarter; i += kLine)
      for (int stream = 0; stream < 4; stream++) sum.add(data + stream * quarter + i);
    data += 4 * quarter;
    bytes -= 4 * quarter;
  }
  for (std::int64_t i = 0; i + kLine <= bytes; i += kLine) {
    if (way == 1) __builtin_prefetch(data + i + kAhead, 0, 3);
    sum.add(data + i);
  }
  return sum.total();
}

}  // namespace

double read_seconds(Pool& pool, const std::uint8_t* data, std::int64_t bytes, int way) {
  std::atomic<std::uint64_t> total{0};  // keeps the reads from being left out
  const auto start = std::chrono::steady_clock::now();
  pool.run([&](Pool::Member& member) {
    const std::int64_t lines = bytes / kLine;
    const std::int64_t first = lines * member.index() / member.threads();
    const std::int64_t last = lines * (member.index() + 1) / member.threads();
    total.fetch_add(read_part(data + first * kLine, (last - first) * kLine, way));
  });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double core_ghz() {
  // Multiplications, not additions: Intel's cores since Golden Cove fold a chain of constant additions while renaming.
  constexpr int kRuns = 20, kProducts = 100000;
  constexpr double kLatency = 3.0;  // cycles of a 64-bit multiply on Zen, on Intel since Nehalem, and on Neoverse
  double most = 0.0;
  for (int run = 0; run < kRuns; run++) {
    const auto start = std::chrono::steady_clock::now();
    std::uint64_t value = 1;
    for (int i = 0; i < kProducts; i += 4)
      for (int k = 0; k < 4; k++) {
        value *= 0x9E3779B97F4A7C15u;
        __asm__ volatile("" : "+r"(value));  // each product waits for the one before
      }
    const double ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
    most = std::max(most, kLatency * kProducts / ns);
  }
  return most;
}

}  // namespace tandem
