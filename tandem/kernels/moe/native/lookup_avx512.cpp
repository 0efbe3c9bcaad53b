// AVX-512 BW: byte shuffles over 64 rows.
#include "vector512.inl"

namespace tandem {
namespace {

struct Vector {
  using Int = __m512i;
  using Float = __m512;
  static constexpr int kRows = 64;
  static Int zero() { return _mm512_setzero_si512(); }
  static Int bytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
  static Int words(int value) { return _mm512_set1_epi16(static_cast<short>(value)); }
  static Int load(const std::uint8_t* at) { return _mm512_loadu_si512(at); }
  static Int table(const std::uint8_t* at) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  }
  static Int both(Int a, Int b) { return _mm512_and_si512(a, b); }
  static Int shift_right(Int a, int bits) { return _mm512_srli_epi16(a, static_cast<unsigned>(bits)); }
  static Int shift_left(Int a, int bits) { return _mm512_slli_epi16(a, static_cast<unsigned>(bits)); }
  static Int odd_bytes(Int a) { return _mm512_maddubs_epi16(a, _mm512_set1_epi16(0x0100)); }
  static Int look_up(Int table, Int index) { return _mm512_shuffle_epi8(table, index); }
  static Int add_bytes(Int a, Int b) { return _mm512_add_epi8(a, b); }
  static Int add_words(Int a, Int b) { return _mm512_add_epi16(a, b); }
  static Int subtract_words(Int a, Int b) { return _mm512_sub_epi16(a, b); }
  static Int low_words(Int a, Int b) { return _mm512_unpacklo_epi16(a, b); }
  static Int high_words(Int a, Int b) { return _mm512_unpackhi_epi16(a, b); }
  // pairs (low part, high part) -> low + 128 * high
  static Int join(Int pairs) { return _mm512_madd_epi16(pairs, _mm512_set1_epi32(128 << 16 | 1)); }
  // bytes first, first + 2, first + 4 and first + 6 of each 16-byte lane, as 32-bit integers
  static Int every_other(Int a, int first) {
    const __m128i pick =
        _mm_add_epi32(_mm_setr_epi32(0, 2, 4, 6), _mm_set1_epi32(static_cast<int>(0x80808000) + first));
    return _mm512_shuffle_epi8(a, _mm512_broadcast_i32x4(pick));
  }
  template <Code kCode>
  static Float scale_of(Int byte) {
    return scale_of_bytes<kCode>(byte);
  }
  static void multiply_add(float* y, Int sum, Float scale, float unit) { add_scaled(y, sum, scale, unit); }
};

#include "bytesum.inl"

// In 16-byte lane L of the four results lie the even rows 16 L + 0..6, 8..14, then the odd ones.
constexpr std::uint8_t kPlace[64] = {
    0,  2,  4,  6,  16, 18, 20, 22, 32, 34, 36, 38, 48, 50, 52, 54, 8,  10, 12, 14, 24, 26,
    28, 30, 40, 42, 44, 46, 56, 58, 60, 62, 1,  3,  5,  7,  17, 19, 21, 23, 33, 35, 37, 39,
    49, 51, 53, 55, 9,  11, 13, 15, 25, 27, 29, 31, 41, 43, 45, 47, 57, 59, 61, 63};

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
      prefetch_tile(step.ahead + w * step.window_stride);
      shuffle_rows<kCode, kTokens, 1>(step.tile + w * step.window_stride, 0, tables, step.window + w, y, token_floats);
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

const Kernel kAvx512 = {"avx512", build, multiply, kPlace};

}  // namespace tandem
