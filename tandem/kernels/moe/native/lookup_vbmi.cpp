// AVX-512 with VBMI and VNNI: one 64-entry permute looks four positions up at once, one dot-product instruction adds
// them. Tables have 15 bits: the low part is unsigned, the high part signed.
#include "vector512.inl"

namespace tandem {
namespace {

// In 16-byte lane L of accumulator i lie rows 16 L + 4 i + 0..3.
constexpr std::uint8_t kPlace[64] = {
    0,  1,  2,  3,  16, 17, 18, 19, 32, 33, 34, 35, 48, 49, 50, 51, 4,  5,  6,  7,  20, 21,
    22, 23, 36, 37, 38, 39, 52, 53, 54, 55, 8,  9,  10, 11, 24, 25, 26, 27, 40, 41, 42, 43,
    56, 57, 58, 59, 12, 13, 14, 15, 28, 29, 30, 31, 44, 45, 46, 47, 60, 61, 62, 63};

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
    constexpr int kChains = kTokens == 1 ? 2 : 1;  // a single token needs two chains to hide the latency of an addition
    const __m512i low_nibble = _mm512_set1_epi32(0x0f0f0f0f), quarter = _mm512_set1_epi32(0x30201000);
    const __m512i ones = _mm512_set1_epi8(1), high_unit = _mm512_set1_epi8(static_cast<char>(128));
    for (int w = 0; w < step.windows; w++) {
      const std::uint8_t* tile = step.tile + w * step.window_stride;
      prefetch_tile(step.ahead + w * step.window_stride);
      __m512i sum[kTokens][kChains][4];
      for (int t = 0; t < kTokens; t++)
        for (int c = 0; c < kChains; c++)
          for (int i = 0; i < 4; i++) sum[t][c][i] = _mm512_setzero_si512();
#pragma GCC unroll 4
      for (int g = 0; g < 4; g++) {
        const __m512i a = load(tile + g * 256), b = load(tile + g * 256 + 64), c = load(tile + g * 256 + 128),
                      d = load(tile + g * 256 + 192);
        const __m512i ab_low = _mm512_unpacklo_epi8(a, b), ab_high = _mm512_unpackhi_epi8(a, b);
        const __m512i cd_low = _mm512_unpacklo_epi8(c, d), cd_high = _mm512_unpackhi_epi8(c, d);
        const __m512i code[4] = {_mm512_unpacklo_epi16(ab_low, cd_low), _mm512_unpackhi_epi16(ab_low, cd_low),
                                 _mm512_unpacklo_epi16(ab_high, cd_high), _mm512_unpackhi_epi16(ab_high, cd_high)};
#pragma GCC unroll 2
        for (int nibble = 0; nibble < 2; nibble++) {
          __m512i index[4];
          for (int i = 0; i < 4; i++)  // (code & 15) | quarter
            index[i] = _mm512_ternarylogic_epi32(nibble ? _mm512_srli_epi16(code[i], 4) : code[i], low_nibble, quarter,
                                                 0xea);
          for (int t = 0; t < kTokens; t++) {
            const std::uint8_t* table = tables.bytes[t] + (step.window + w) * kTableBytes + g * 256 + nibble * 128;
            const __m512i low = load(table), high = load(table + 64);
            for (int i = 0; i < 4; i++) {
              __m512i& low_sum = sum[t][0][i];
              __m512i& high_sum = sum[t][kChains - 1][i];
              low_sum = _mm512_dpbusd_epi32(low_sum, _mm512_permutexvar_epi8(index[i], low), ones);
              high_sum = _mm512_dpbusd_epi32(high_sum, high_unit, _mm512_permutexvar_epi8(index[i], high));
            }
          }
        }
      }
      const __m512i scale_bytes = load(tile + kCodeBytes);
      for (int i = 0; i < 4; i++) {
        // bytes 4 i + 0..3 of each 16-byte lane, as 32-bit integers
        const __m512i pick = _mm512_broadcast_i32x4(
            _mm_add_epi32(_mm_setr_epi32(0, 1, 2, 3), _mm_set1_epi32(static_cast<int>(0x80808000) + 4 * i)));
        const __m512 scale = scale_of_bytes<kCode>(_mm512_shuffle_epi8(scale_bytes, pick));
        for (int t = 0; t < kTokens; t++) {
          __m512i total = sum[t][0][i];
          if (kChains == 2) total = _mm512_add_epi32(total, sum[t][kChains - 1][i]);
          add_scaled(y + t * token_floats + 16 * i, total, scale, tables.units[t][step.window + w]);
        }
      }
    }
  }
};

void build(Code code, const Taps& taps, const float* x, int windows, std::uint8_t* tables, float* units) {
  build_tables<8, 0>(code, taps, x, windows, tables, units);
}

void multiply(Code code, const Tiles& tiles, const Tables& tables, int tokens, float* y, std::ptrdiff_t token_floats) {
  multiply_tiles<Rows>(code, tiles, tables, tokens, y, token_floats);
}

}  // namespace

const Kernel kVbmi = {"avx512vbmi", build, multiply, kPlace};

}  // namespace tandem
