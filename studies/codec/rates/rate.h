// What the decode loops share: 64-weight windows of a row with a scale byte, 15-bit activations, int32 sums of a window.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

struct Problem {
  const std::uint8_t* codes;     // [rows][windows][code bytes of a window]
  const std::uint8_t* scales;    // [rows][windows]
  const float* levels;           // [256]: a scale byte's factor
  const void* table;             // the code's own
  const void* more;              // a second table, or null
  const void* x;                 // 15-bit activations in units of x_step, in the order and width that the loop reads
  const std::int32_t* x_eights;  // [windows][8]: sums of eight neighbouring ones
  const float* x_sums;           // [windows]
  float x_step;
  std::int32_t rows, windows;
};

inline std::uint64_t load64(const std::uint8_t* p) {
  std::uint64_t v;
  std::memcpy(&v, p, 8);
  return v;
}

#if defined(__AVX512F__)
typedef __m512i Sums;  // int32 lanes of one window
typedef __m512 Row;
inline Sums zero_sums() { return _mm512_setzero_si512(); }
inline Row zero_row() { return _mm512_setzero_ps(); }
inline Row add_window(Row row, Sums sums, float factor) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(factor), row);
}
inline float total(Row row) { return _mm512_reduce_add_ps(row); }
inline Sums add_products(Sums sums, __m512i w, const std::int16_t* x) {
  const __m512i values = _mm512_loadu_si512(x);
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sums, w, values);
#else
  return _mm512_add_epi32(sums, _mm512_madd_epi16(w, values));
#endif
}
#else
typedef __m256i Sums;
typedef __m256 Row;
inline Sums zero_sums() { return _mm256_setzero_si256(); }
inline Row zero_row() { return _mm256_setzero_ps(); }
inline Row add_window(Row row, Sums sums, float factor) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), _mm256_set1_ps(factor), row);
}
inline float total(Row row) {
  float lanes[8], sum = 0.0f;
  std::memcpy(lanes, &row, sizeof lanes);
  for (float lane : lanes) sum += lane;
  return sum;
}
inline Sums add_products(Sums sums, __m256i w, const std::int16_t* x) {
  const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm256_add_epi32(sums, _mm256_madd_epi16(w, values));
}
#endif

// y[row] = sum over windows of level(scale) * x_step * window(codes of the window, its x), `repeat` times over.
#define TANDEM_RATE(window_bytes, window)                                                                  \
  extern "C" void rate(const Problem* problem, std::int32_t repeat, float* y) {                            \
    const Problem p = *problem;                                                                            \
    for (std::int32_t again = 0; again < repeat; again++)                                                  \
      for (std::int32_t r = 0; r < p.rows; r++) {                                                          \
        const std::uint8_t* codes = p.codes + static_cast<std::int64_t>(r) * p.windows * (window_bytes);   \
        const std::uint8_t* scales = p.scales + static_cast<std::int64_t>(r) * p.windows;                  \
        Row row = zero_row();                                                                              \
        float rest = 0.0f;                                                                                 \
        for (std::int32_t w = 0; w < p.windows; w++)                                                       \
          window(p, codes + w * (window_bytes), w, p.levels[scales[w]] * p.x_step, row, rest);             \
        y[r] = total(row) + rest;                                                                          \
      }                                                                                                    \
  }
