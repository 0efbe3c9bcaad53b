// The trellis' 1MAD code by arithmetic: a state is 12 bits of the window's circular 128-bit stream, 2 bits further for each
// weight, the last weight first; its weight is the sum of the four bytes of state * MULTIPLY + ADD, less a constant.
// Each activation is there twice, as the byte sums come in pairs.
#include "rate.h"

static inline void window(const Problem& p, const std::uint8_t* codes, int w, float factor, Row& row, float& rest) {
  const std::int16_t* x = static_cast<const std::int16_t*>(p.x) + 128 * w;
  const float offset = *static_cast<const float*>(p.table);
  const __m128i stream = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const std::uint8_t* picks = static_cast<const std::uint8_t*>(p.more);  // [8][32]: the 4 bytes from byte 2 j on, circular
  Sums sums = zero_sums();
#if defined(__AVX512F__)
  const __m512i bytes = _mm512_broadcast_i32x4(stream);
  const __m512i shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
  for (int j = 0; j < 8; j += 2) {
    const __m512i words = _mm512_shuffle_epi8(bytes, _mm512_loadu_si512(picks + 32 * j));
    const __m512i state = _mm512_and_si512(_mm512_srlv_epi32(words, shifts), _mm512_set1_epi32(0xfff));
    const __m512i mixed = _mm512_add_epi32(_mm512_mullo_epi32(state, _mm512_set1_epi32(34038481)),
                                           _mm512_set1_epi32(76625530));
    sums = add_products(sums, _mm512_maddubs_epi16(mixed, _mm512_set1_epi8(1)), x + 16 * j);
  }
#else
  const __m256i bytes = _mm256_broadcastsi128_si256(stream);
  const __m256i shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
  for (int j = 0; j < 8; j++) {
    const __m256i pick = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(picks + 32 * j));
    const __m256i words = _mm256_shuffle_epi8(bytes, pick);
    const __m256i state = _mm256_and_si256(_mm256_srlv_epi32(words, shifts), _mm256_set1_epi32(0xfff));
    const __m256i mixed = _mm256_add_epi32(_mm256_mullo_epi32(state, _mm256_set1_epi32(34038481)),
                                           _mm256_set1_epi32(76625530));
    sums = add_products(sums, _mm256_maddubs_epi16(mixed, _mm256_set1_epi8(1)), x + 16 * j);
  }
#endif
  row = add_window(row, sums, factor);
  rest -= factor * offset * p.x_sums[w];
}

TANDEM_RATE(16, window)
