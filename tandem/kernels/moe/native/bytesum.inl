// One window by byte shuffles, for any register width: a 16-entry shuffle serves one position of all rows in a register.
// Tables have 14 bits, so that the bytes of two positions can be added before they are widened. Expects `Vector` with
// the register's operations; a register holds Vector::kRows rows.

constexpr int kShuffleBias = 64;

// kParts registers of rows of `tile`, from `first_row` on, for kTokens tokens, added to y.
template <Code kCode, int kTokens, int kParts>
inline __attribute__((always_inline)) void shuffle_rows(const std::uint8_t* tile, int first_row, const Tables& tables,
                                                        int window, float* y, std::ptrdiff_t token_floats) {
  using V = Vector;
  // sums mod 2^16 of 16-bit words, and of their high bytes, for the low and the high parts of the entries
  typename V::Int all[kTokens][kParts][2], odd[kTokens][kParts][2];
  for (int t = 0; t < kTokens; t++)
    for (int r = 0; r < kParts; r++) {
      all[t][r][0] = odd[t][r][0] = V::zero();
      all[t][r][1] = odd[t][r][1] = V::words(-kPositions * kShuffleBias);
    }
  const auto mask = V::bytes(15);
  const std::uint8_t* codes = tile + first_row;
  const std::uint8_t* group[kTokens];
  for (int t = 0; t < kTokens; t++) group[t] = tables.bytes[t] + window * kTableBytes;
  for (int g = 0; g < 4; g++) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++, codes += kTileRows) {
      typename V::Int low[kParts], high[kParts];
#pragma GCC unroll 2
      for (int r = 0; r < kParts; r++) {
        const auto code = V::load(codes + r * V::kRows);
        low[r] = V::both(code, mask);
        high[r] = V::both(V::shift_right(code, 4), mask);
      }
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; t++) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
          const std::uint8_t* table = group[t] + i * 16 + half * 64;
          const auto first = V::table(table), second = V::table(table + 128);
#pragma GCC unroll 2
          for (int r = 0; r < kParts; r++) {
            const auto sum = V::add_bytes(V::look_up(first, low[r]), V::look_up(second, high[r]));
            all[t][r][half] = V::add_words(all[t][r][half], sum);
            odd[t][r][half] = V::add_words(odd[t][r][half], V::odd_bytes(sum));
          }
        }
      }
    }
    for (int t = 0; t < kTokens; t++) group[t] += 256;
  }
#pragma GCC unroll 2
  for (int r = 0; r < kParts; r++) {
    const auto scale_bytes = V::load(tile + kCodeBytes + first_row + r * V::kRows);
    typename V::Float scales[4];
    for (int q = 0; q < 4; q++) scales[q] = V::template scale_of<kCode>(V::every_other(scale_bytes, q / 2 + q % 2 * 8));
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; t++) {
      const auto even_low = V::subtract_words(all[t][r][0], V::shift_left(odd[t][r][0], 8));
      const auto even_high = V::subtract_words(all[t][r][1], V::shift_left(odd[t][r][1], 8));
      const typename V::Int sums[4] = {
          V::join(V::low_words(even_low, even_high)), V::join(V::high_words(even_low, even_high)),
          V::join(V::low_words(odd[t][r][0], odd[t][r][1])), V::join(V::high_words(odd[t][r][0], odd[t][r][1]))};
      const float unit = tables.units[t][window];
      for (int q = 0; q < 4; q++)
        V::multiply_add(y + t * token_floats + r * V::kRows + q * (V::kRows / 4), sums[q], scales[q], unit);
    }
  }
}
