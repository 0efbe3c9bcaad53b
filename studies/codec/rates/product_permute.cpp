// Product VQ by byte permutes (AVX-512 VBMI, VNNI): 64 codes, the four windows of 256 weights, are looked up at once for
// each of the four dimensions in the 128 positive vectors (two registers); bit 7 negates. Table bytes are 128 too large,
// so that they are unsigned, as vpdpbusd wants; sums begin with what that adds. Activations are two bytes, of 8 and 7 bits.
#include "rate.h"

extern "C" void rate(const Problem* problem, std::int32_t repeat, float* y) {
  const Problem p = *problem;
  const std::int8_t* table = static_cast<const std::int8_t*>(p.table);  // [4][128]
  const std::int32_t* begin = static_cast<const std::int32_t*>(p.more);  // [windows / 4][16]
  const std::int8_t* x = static_cast<const std::int8_t*>(p.x);
  __m512i low[4], high[4];
  for (int d = 0; d < 4; d++) {
    low[d] = _mm512_loadu_si512(table + 128 * d);
    high[d] = _mm512_loadu_si512(table + 128 * d + 64);
  }
  const __m512i zero = _mm512_setzero_si512();
  const __m512i spread = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  for (std::int32_t again = 0; again < repeat; again++)
    for (std::int32_t r = 0; r < p.rows; r++) {
      const std::uint8_t* codes = p.codes + static_cast<std::int64_t>(r) * p.windows * 16;
      const std::uint8_t* scales = p.scales + static_cast<std::int64_t>(r) * p.windows;
      __m512 row = _mm512_setzero_ps();
      for (std::int32_t w = 0; w < p.windows; w += 4) {
        const __m512i c = _mm512_loadu_si512(codes + 16 * w);
        const __mmask64 minus = _mm512_movepi8_mask(c);
        __m512i coarse = zero, fine = _mm512_loadu_si512(begin + 4 * w);
        for (int d = 0; d < 4; d++) {
          const __m512i found = _mm512_permutex2var_epi8(low[d], c, high[d]);
          const __m512i weights = _mm512_mask_sub_epi8(found, minus, zero, found);
          const std::int8_t* part = x + 128 * w + 128 * d;  // [windows / 4][dims][high, low][64 codes]
          coarse = _mm512_dpbusd_epi32(coarse, weights, _mm512_loadu_si512(part));
          fine = _mm512_dpbusd_epi32(fine, weights, _mm512_loadu_si512(part + 64));
        }
        const __m512i sums = _mm512_add_epi32(_mm512_slli_epi32(coarse, 7), fine);
        const __m128 levels = _mm_setr_ps(p.levels[scales[w]], p.levels[scales[w + 1]], p.levels[scales[w + 2]],
                                          p.levels[scales[w + 3]]);
        const __m512 factor = _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(levels));
        row = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), factor, row);
      }
      y[r] = _mm512_reduce_add_ps(row) * p.x_step;
    }
}
