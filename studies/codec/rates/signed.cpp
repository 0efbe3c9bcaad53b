// Signs and magnitudes by table load: 16 bytes of the 8 magnitudes in int16 (256 x 16 bytes); a window's codes are 8
// indices, then 8 bytes of signs. With SHIFTED the E8P code: 7 signs, the eighth is their parity (its entry of the table is
// negative where the pattern wants an odd number), and bit 7 shifts all 8 weights by one unit.
#include "rate.h"

static inline void window(const Problem& p, const std::uint8_t* codes, int w, float factor, Row& row, float&) {
  const __m128i* table = static_cast<const __m128i*>(p.table);
  const std::int16_t* x = static_cast<const std::int16_t*>(p.x) + 64 * w;
  Sums sums = zero_sums();
  std::uint64_t index = load64(codes);
  const std::uint64_t signs = load64(codes + 8);
#if defined(__AVX512F__)
#if defined(SHIFTED)
  const std::uint64_t seven = signs & 0x7f7f7f7f7f7f7f7fu;
  std::uint64_t parity = seven ^ seven >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  const std::uint64_t minus = seven | (parity & 0x0101010101010101u) << 7;
#else
  const std::uint64_t minus = signs;
#endif
  for (int half = 0; half < 2; half++) {
    const __m128i a = table[index & 255], b = table[index >> 8 & 255], c = table[index >> 16 & 255],
                  d = table[index >> 24 & 255];
    index >>= 32;
    const __m256i ab = _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
    const __m256i cd = _mm256_inserti128_si256(_mm256_castsi128_si256(c), d, 1);
    const __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512(ab), cd, 1);
    const __mmask32 mask = static_cast<__mmask32>(minus >> 32 * half);
    sums = add_products(sums, _mm512_mask_sub_epi16(all, mask, _mm512_setzero_si512(), all), x + 32 * half);
  }
#else
  const __m128i* sign_table = static_cast<const __m128i*>(p.more);
  std::uint64_t sign = signs;
  for (int quarter = 0; quarter < 4; quarter++) {
    const __m128i a = table[index & 255], b = table[index >> 8 & 255];
    const __m128i s = sign_table[sign & 255], t = sign_table[sign >> 8 & 255];
    index >>= 16, sign >>= 16;
    const __m256i all = _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
    const __m256i flip = _mm256_inserti128_si256(_mm256_castsi128_si256(s), t, 1);
    sums = add_products(sums, _mm256_sign_epi16(all, flip), x + 16 * quarter);
  }
#endif
#if defined(SHIFTED)
  // bit 7 of a sign byte: minus one unit times the sum of its eight activations, else plus
  const __m256i shift = _mm256_or_si256(
      _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(static_cast<long long>(signs))), _mm256_set1_epi32(1));
  const __m256i eights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p.x_eights + 8 * w));
  const __m256i shifted = _mm256_sign_epi32(eights, shift);
#if defined(__AVX512F__)
  sums = _mm512_add_epi32(sums, _mm512_zextsi256_si512(shifted));
#else
  sums = _mm256_add_epi32(sums, shifted);
#endif
#endif
  row = add_window(row, sums, factor);
}

TANDEM_RATE(16, window)
