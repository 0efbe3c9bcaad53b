// AVX2 with FMA: byte shuffles over 32 rows.
#include <immintrin.h>

#include <cstring>

#include "lookup.h"

namespace tandem {
namespace {

#include "walk.inl"

#include "build.inl"

struct Vector {
  using Int = __m256i;
  using Float = __m256;
  static constexpr int kRows = 32;
  static Int zero() { return _mm256_setzero_si256(); }
  static Int bytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
  static Int words(int value) { return _mm256_set1_epi16(static_cast<short>(value)); }
  static Int load(const std::uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
  static Int table(const std::uint8_t* at) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  }
  static Int both(Int a, Int b) { return _mm256_and_si256(a, b); }
  static Int shift_right(Int a, int bits) { return _mm256_srli_epi16(a, bits); }
  static Int shift_left(Int a, int bits) { return _mm256_slli_epi16(a, bits); }
  static Int odd_bytes(Int a) { return _mm256_maddubs_epi16(a, _mm256_set1_epi16(0x0100)); }
  static Int look_up(Int table, Int index) { return _mm256_shuffle_epi8(table, index); }
  static Int add_bytes(Int a, Int b) { return _mm256_add_epi8(a, b); }
  static Int add_words(Int a, Int b) { return _mm256_add_epi16(a, b); }
  static Int subtract_words(Int a, Int b) { return _mm256_sub_epi16(a, b); }
  static Int low_words(Int a, Int b) { return _mm256_unpacklo_epi16(a, b); }
  static Int high_words(Int a, Int b) { return _mm256_unpackhi_epi16(a, b); }
  // pairs (low part, high part) -> low + 128 * high
  static Int join(Int pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi32(128 << 16 | 1)); }
  // bytes first, first + 2, first + 4 and first + 6 of each 16-byte lane, as 32-bit integers
  static Int every_other(Int a, int first) {
    const __m128i pick =
        _mm_add_epi32(_mm_setr_epi32(0, 2, 4, 6), _mm_set1_epi32(static_cast<int>(0x80808000) + first));
    return _mm256_shuffle_epi8(a, _mm256_broadcastsi128_si256(pick));
  }
  // byte: 8 scale bytes as 32-bit integers -> their factors
  template <Code kCode>
  static Float scale_of(Int byte) {
    if (kCode == Code::kFp4)  // 2^(byte - 127); 0 gives 0 instead of 2^-127; no package holds 255
      return _mm256_castsi256_ps(_mm256_slli_epi32(byte, 23));
    // 2^((byte - 255) / 16), and 0 for byte 0
    const Float below = _mm256_permutevar8x32_ps(_mm256_loadu_ps(kScaleRoots), byte);
    const Float above = _mm256_permutevar8x32_ps(_mm256_loadu_ps(kScaleRoots + 8), byte);
    const Float root = _mm256_blendv_ps(below, above, _mm256_castsi256_ps(_mm256_slli_epi32(byte, 28)));
    const Int exponent = _mm256_slli_epi32(_mm256_srli_epi32(byte, 4), 23);
    const Int value = _mm256_add_epi32(_mm256_castps_si256(root), exponent);
    return _mm256_castsi256_ps(_mm256_and_si256(value, _mm256_cmpgt_epi32(byte, zero())));
  }
  static void multiply_add(float* y, Int sum, Float scale, float unit) {
    const Float value = _mm256_mul_ps(scale, _mm256_set1_ps(unit));
    _mm256_storeu_ps(y, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), value, _mm256_loadu_ps(y)));
  }
};

#include "bytesum.inl"

// The halves of 32 rows; in 16-byte lane L of a half's four results lie the even rows 16 L + 0..6, 8..14, then the odd.
constexpr std::uint8_t kPlace[64] = {
    0,  2,  4,  6,  16, 18, 20, 22, 8,  10, 12, 14, 24, 26, 28, 30, 1,  3,  5,  7,  17, 19,
    21, 23, 9,  11, 13, 15, 25, 27, 29, 31, 32, 34, 36, 38, 48, 50, 52, 54, 40, 42, 44, 46,
    56, 58, 60, 62, 33, 35, 37, 39, 49, 51, 53, 55, 41, 43, 45, 47, 57, 59, 61, 63};

template <int kTokens>
struct Rows {
  static void run(Code code, const Step& step, const Tables& tables, float* y, std::ptrdiff_t token_floats) {
    if (code == Code::kSac) {
      rows<Code::kSac>(step, tables, y, token_floats);
    } else {
      rows<Code::kFp4>(step, tables, y, token_floats);
    }
  }

  template <Code kCode>
  static void rows(const Step& step, const Tables& tables, float* y, std::ptrdiff_t token_floats) {
    for (int w = 0; w < step.windows; w++) {
      const std::uint8_t* tile = step.tile + w * step.window_stride;
      prefetch_tile(step.ahead + w * step.window_stride);
      // the 16 registers hold the sums of 64 rows of one token or of 32 rows of two
      if (kTokens == 1) {
        shuffle_rows<kCode, 1, 2>(tile, 0, tables, step.window + w, y, token_floats);
        continue;
      }
      for (int t = 0; t < kTokens; t += 2)
        for (int row = 0; row < kTileRows; row += Vector::kRows)
          shuffle_rows<kCode, 2, 1>(tile, row, Tables{tables.bytes + t, tables.units + t}, step.window + w,
                                    y + t * token_floats + row, token_floats);
    }
  }
};

void build(Code code, const Taps& taps, const float* x, int windows, std::uint8_t* tables, float* units) {
  build_tables<7, kShuffleBias>(code, taps, x, windows, tables, units);
}

void multiply(Code code, const Tiles& tiles, const Tables& tables, int tokens, float* y, std::ptrdiff_t token_floats) {
  multiply_tiles<Rows>(code, tiles, tables, tokens, y, token_floats);
}

}  // namespace

const Kernel kAvx2 = {"avx2", build, multiply, kPlace};

}  // namespace tandem
