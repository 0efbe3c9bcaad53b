// Two codebooks by table load: the 8 weights of a code are the sum of 16 bytes (int16) of each table. A window's codes are
// 8 indices of the first, then 8 of the second.
#include "rate.h"

static inline void window(const Problem& p, const std::uint8_t* codes, int w, float factor, Row& row, float&) {
  const __m128i* one = static_cast<const __m128i*>(p.table);
  const __m128i* two = static_cast<const __m128i*>(p.more);
  const std::int16_t* x = static_cast<const std::int16_t*>(p.x) + 64 * w;
  Sums sums = zero_sums();
  std::uint64_t first = load64(codes), second = load64(codes + 8);
  const auto next = [&] {
    const __m128i vector = _mm_add_epi16(one[first & 255], two[second & 255]);
    first >>= 8, second >>= 8;
    return vector;
  };
#if defined(__AVX512F__)
  for (int half = 0; half < 2; half++) {
    const __m128i a = next(), b = next(), c = next(), d = next();
    const __m256i ab = _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
    const __m256i cd = _mm256_inserti128_si256(_mm256_castsi128_si256(c), d, 1);
    sums = add_products(sums, _mm512_inserti64x4(_mm512_castsi256_si512(ab), cd, 1), x + 32 * half);
  }
#else
  for (int quarter = 0; quarter < 4; quarter++) {
    const __m128i a = next(), b = next();
    sums = add_products(sums, _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1), x + 16 * quarter);
  }
#endif
  row = add_window(row, sums, factor);
}

TANDEM_RATE(16, window)
