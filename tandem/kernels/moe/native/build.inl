// Builds lookup tables with AVX2. Included once by each kernel's source, so that each has a copy for its own
// instruction set. Both codes are symmetric, so only entries 0 to 7 are computed: 15 - k (sac: all bits turned) or 8 + k (fp4)
// is minus entry k.

inline void sums_sac(const Taps& taps, const float* x, __m256 (&sums)[kPositions]) {
  __m256 tap[kTaps][2];
  for (int s = 0; s < kTaps; s++)
    for (int d = 0; d < 2; d++) tap[s][d] = _mm256_loadu_ps(taps[s][d]);
  float wrapped[2 * (kPositions + kTaps - 1)];
  std::memcpy(wrapped, x, sizeof(float) * 2 * kPositions);
  std::memcpy(wrapped + 2 * kPositions, x, sizeof(float) * 2 * (kTaps - 1));
  for (int j = 0; j < kPositions; j++) {
    __m256 sum = _mm256_setzero_ps();
    for (int s = 0; s < kTaps; s++)
      for (int d = 0; d < 2; d++)
        sum = _mm256_fmadd_ps(_mm256_set1_ps(wrapped[2 * (j + s) + d]), tap[s][d], sum);
    sums[j] = sum;
  }
}

inline void sums_fp4(const float* x, __m256 (&sums)[kPositions]) {
  const __m256 values = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  for (int j = 0; j < kPositions; j++) sums[j] = _mm256_mul_ps(_mm256_set1_ps(x[j]), values);
}

// The largest magnitude, by its bits: a NaN is larger than all numbers and so is never lost.
inline float largest(const __m256 (&sums)[kPositions]) {
  __m256i most = _mm256_setzero_si256();
  for (const __m256& sum : sums)
    most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(sum), _mm256_set1_epi32(0x7fffffff)));
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(four));
}

// kHighBits: bits of the high part; kHighBias: added to it, so that it has no sign.
template <int kHighBits, int kHighBias>
inline void build_tables(Code code, const Taps& taps, const float* x, int windows, std::uint8_t* tables, float* units) {
  for (int w = 0; w < windows; w++) {
    __m256 sums[kPositions];
    if (code == Code::kSac) {
      sums_sac(taps, x + 64 * w, sums);
    } else {
      sums_fp4(x + 32 * w, sums);
    }
    const Quantum quantum = quantum_of(largest(sums), kHighBits);
    units[w] = quantum.unit;
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i same = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), reversed = _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    const __m256i mirror = code == Code::kSac ? reversed : same;
    std::uint8_t* out = tables + static_cast<std::ptrdiff_t>(w) * kTableBytes;
    for (int j = 0; j < kPositions; j++) {
      const __m256i steps = _mm256_cvtps_epi32(_mm256_mul_ps(sums[j], _mm256_set1_ps(quantum.inverse)));
      // 16-bit words: entries 0-3, 8-11 | 4-7, 12-15
      const __m256i others = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_permutevar8x32_epi32(steps, mirror));
      const __m256i words = _mm256_packs_epi32(steps, others);
      const __m256i low = _mm256_and_si256(words, _mm256_set1_epi16(127));
      const __m256i high = _mm256_and_si256(
          _mm256_add_epi16(_mm256_srai_epi16(words, 7), _mm256_set1_epi16(kHighBias)), _mm256_set1_epi16(255));
      const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
      std::uint8_t* entry = out + table_offset(j);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(entry), _mm256_castsi256_si128(bytes));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(entry + 64), _mm256_extracti128_si256(bytes, 1));
    }
  }
}
