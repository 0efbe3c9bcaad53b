// Product VQ by table load: a code is one 8-byte load of four int16 weights (256 x 8 bytes).
#include "rate.h"

static inline void window(const Problem& p, const std::uint8_t* codes, int w, float factor, Row& row, float&) {
  const std::int64_t* table = static_cast<const std::int64_t*>(p.table);
  const std::int16_t* x = static_cast<const std::int16_t*>(p.x) + 64 * w;
  Sums sums = zero_sums();
  for (int half = 0; half < 2; half++) {
    std::uint64_t c = load64(codes + 8 * half);
    const auto pair = [&] {
      const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(table + (c & 255)));
      const double* high = reinterpret_cast<const double*>(table + (c >> 8 & 255));
      c >>= 16;
      return _mm_castpd_si128(_mm_loadh_pd(_mm_castsi128_pd(low), high));
    };
#if defined(__AVX512F__)
    const __m128i a = pair(), b = pair(), d = pair(), e = pair();
    const __m256i ab = _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
    const __m256i de = _mm256_inserti128_si256(_mm256_castsi128_si256(d), e, 1);
    sums = add_products(sums, _mm512_inserti64x4(_mm512_castsi256_si512(ab), de, 1), x + 32 * half);
#else
    for (int quarter = 0; quarter < 2; quarter++) {
      const __m128i a = pair(), b = pair();
      sums = add_products(sums, _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1), x + 32 * half + 16 * quarter);
    }
#endif
  }
  row = add_window(row, sums, factor);
}

TANDEM_RATE(16, window)
