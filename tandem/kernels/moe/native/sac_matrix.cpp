// Whole matrices for the encoder: the scale of each window, and threads over rows.
#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

#include "c_api.h"
#include "sac_encode.h"

namespace tandem {

SacEncode sac_encoder() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return sac_encode_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return sac_encode_avx2;
#endif
  return sac_encode_scalar;
}

namespace {

constexpr int kInputs = 2 * kSacBlocks, kTop = 255;

SacTaps make_taps(const float* taps) {  // [3][2][16]
  SacTaps made;
  for (int d = 0; d < 2; d++)
    for (int k = 0; k < kSacNibbles; k++) {
      const auto whole = [&](int tap) {
        return static_cast<std::int32_t>(std::lrint(taps[(2 * tap + d) * kSacNibbles + k] * kSacOne));
      };
      made.own[d][k] = whole(0), made.last[k][d] = whole(1), made.older[k][d] = whole(2);
    }
  for (int a = 0; a < kSacNibbles; a++) {
    const std::int32_t own0 = made.own[0][a], own1 = made.own[1][a];
    made.energy[a] = own0 * own0 + own1 * own1;
    for (int q = 0; q < kSacNibbles; q++) {
      const std::int32_t old0 = made.older[q][0], old1 = made.older[q][1];
      made.cross[q][a] = 16 * (old0 * old0 + old1 * old1 + 2 * (old0 * own0 + old1 * own1)) + q;
    }
  }
  return made;
}

struct Job {
  const SacTaps& taps;
  SacEncode encode;
  const float* levels;    // [256]: the factor of each scale byte
  const std::int32_t* tries;  // steps around the first scale
  int count;
  float base;
};

// The scale byte whose level is nearest to `scale` from below or equal, at least 1.
int byte_of(const Job& job, float scale) {
  const float* end = job.levels + kTop + 1;
  const auto at = std::upper_bound(job.levels + 1, end, scale / job.base) - job.levels - 1;
  return static_cast<int>(std::clamp<std::ptrdiff_t>(at, 1, kTop));
}

void encode_window(const Job& job, const float* w, std::uint8_t* nibbles, std::uint8_t* scale) {
  double energy = 0.0;
  for (int i = 0; i < kInputs; i++) energy += static_cast<double>(w[i]) * w[i];
  if (energy == 0.0) {
    *scale = 0;
    std::fill(nibbles, nibbles + kSacBlocks, std::uint8_t{0});
    return;
  }
  const int first = byte_of(job, static_cast<float>(std::sqrt(energy / kInputs)));
  std::int32_t x[kInputs];
  const auto units = [&](int byte) {
    const float step = job.levels[byte] * job.base;
    for (int i = 0; i < kInputs; i++) {
      const float limit = kSacLimit;
      x[i] = static_cast<std::int32_t>(std::lrint(std::clamp(w[i] / step * kSacOne, -limit, limit)));
    }
    return step;
  };
  int chosen = first;
  float least = 0.0f;
  for (int i = 0; i < job.count; i++) {
    const int byte = std::clamp(first + job.tries[i], 1, kTop);
    const float step = units(byte);
    const float error = static_cast<float>(job.encode(job.taps, x, true, nullptr)) * step * step;
    if (i == 0 || error < least) least = error, chosen = byte;
  }
  units(chosen);
  job.encode(job.taps, x, false, nibbles);
  *scale = static_cast<std::uint8_t>(chosen);
}

}  // namespace
}  // namespace tandem

void tandem_sac_encode(const float* taps, const float* levels, const float* weights, int64_t windows, float base,
                       const int32_t* tries, int32_t count, int32_t threads, uint8_t* nibbles, uint8_t* scales) {
  using namespace tandem;
  const SacTaps made = make_taps(taps);
  const Job job{made, sac_encoder(), levels, tries, count, base};
  const auto part = [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; i++)
      encode_window(job, weights + i * kInputs, nibbles + i * kSacBlocks, scales + i);
  };
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; i++) helpers.emplace_back(part, windows * i / threads, windows * (i + 1) / threads);
  part(0, windows / threads);
  for (std::thread& helper : helpers) helper.join();
}
