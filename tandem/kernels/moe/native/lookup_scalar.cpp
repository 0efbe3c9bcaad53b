// Plain C++: runs anywhere, and is the plain statement of what the others compute. Tables have 15 bits.
#include <cmath>
#include <cstring>

#include "lookup.h"

namespace tandem {
namespace {

#include "walk.inl"

constexpr std::uint8_t kPlace[64] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

float scale_of(Code code, std::uint8_t byte) {
  if (byte == 0) return 0.0f;  // of FP4 too, where it is 2^-127: no subnormals, which some CPUs take long over
  if (code == Code::kFp4) return std::ldexp(1.0f, byte - 127);  // no package holds 255
  return std::ldexp(kScaleRoots[byte % 16], byte / 16);
}

template <int kTokens>
struct Rows {
  static void run(Code code, const Step& step, const Tables& tables, float* y, std::ptrdiff_t token_floats) {
    for (int t = 0; t < kTokens; t++)
      for (int w = 0; w < step.windows; w++) {
        const std::uint8_t* tile = step.tile + w * step.window_stride;
        const std::uint8_t* table = tables.bytes[t] + (step.window + w) * kTableBytes;
        std::int32_t sum[kTileRows] = {};
        for (int p = 0; p < kPositions / 2; p++)
          for (int row = 0; row < kTileRows; row++) {
            const std::uint8_t* entry = table + p / 4 * 256 + p % 4 * 16;
            const int low = tile[p * kTileRows + row] & 15, high = tile[p * kTileRows + row] >> 4;
            sum[row] += entry[low] + 128 * static_cast<std::int8_t>(entry[64 + low]);
            sum[row] += entry[128 + high] + 128 * static_cast<std::int8_t>(entry[192 + high]);
          }
        const float unit = tables.units[t][step.window + w];
        for (int row = 0; row < kTileRows; row++)
          y[t * token_floats + row] += static_cast<float>(sum[row]) * (scale_of(code, tile[kCodeBytes + row]) * unit);
      }
  }
};

void build(Code code, const Taps& taps, const float* x, int windows, std::uint8_t* tables, float* units) {
  static const float e2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  for (int w = 0; w < windows; w++, x += window_inputs(code), tables += kTableBytes) {
    float sums[kPositions][16];
    float most = 0.0f;
    for (int j = 0; j < kPositions; j++)
      for (int k = 0; k < 16; k++) {
        float sum = 0.0f;
        if (code == Code::kFp4) sum = x[j] * e2m1[k];
        for (int i = 0; code == Code::kSac && i < 2 * kTaps; i++)
          sum += x[(2 * j + i) % (2 * kPositions)] * taps[i / 2][i % 2][k];
        sums[j][k] = sum;
        if (!(std::fabs(sum) <= most)) most = std::isnan(most) ? most : std::fabs(sum);
      }
    const Quantum quantum = quantum_of(most, 8);
    units[w] = quantum.unit;
    for (int j = 0; j < kPositions; j++)
      for (int k = 0; k < 16; k++) {
        const float scaled = quantum.inverse == 0.0f ? 0.0f : sums[j][k] * quantum.inverse;
        const int steps = static_cast<int>(std::nearbyint(scaled));
        tables[table_offset(j) + k] = static_cast<std::uint8_t>(steps & 127);
        tables[table_offset(j) + 64 + k] = static_cast<std::uint8_t>(steps >> 7);
      }
  }
}

void multiply(Code code, const Tiles& tiles, const Tables& tables, int tokens, float* y, std::ptrdiff_t token_floats) {
  multiply_tiles<Rows>(code, tiles, tables, tokens, y, token_floats);
}

}  // namespace

const Kernel kScalar = {"scalar", build, multiply, kPlace};

}  // namespace tandem
