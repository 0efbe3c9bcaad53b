// What the two AVX-512 kernels share. Included once by each, after nothing else.
#include <immintrin.h>

#include <cstring>

#include "lookup.h"

namespace tandem {
namespace {

#include "walk.inl"

#include "build.inl"

inline __m512i load(const std::uint8_t* bytes) { return _mm512_loadu_si512(bytes); }

// byte: 16 scale bytes as 32-bit integers -> their factors
template <Code kCode>
inline __m512 scale_of_bytes(__m512i byte) {
  if (kCode == Code::kFp4)  // 2^(byte - 127); 0 gives 0 instead of 2^-127; no package holds 255
    return _mm512_castsi512_ps(_mm512_slli_epi32(byte, 23));
  // 2^((byte - 255) / 16), and 0 for byte 0
  const __m512i root = _mm512_castps_si512(_mm512_permutexvar_ps(byte, _mm512_loadu_ps(kScaleRoots)));
  const __m512i exponent = _mm512_slli_epi32(_mm512_srli_epi32(byte, 4), 23);
  return _mm512_castsi512_ps(_mm512_maskz_add_epi32(_mm512_test_epi32_mask(byte, byte), root, exponent));
}

inline void add_scaled(float* y, __m512i sum, __m512 scale, float unit) {
  const __m512 value = _mm512_mul_ps(scale, _mm512_set1_ps(unit));
  _mm512_storeu_ps(y, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), value, _mm512_loadu_ps(y)));
}

}  // namespace
}  // namespace tandem
