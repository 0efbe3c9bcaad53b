// The Viterbi search of a bitshift trellis: 2 bits a weight, state' = (4 * state + bits) mod 2^state_bits.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef std::uint8_t Bytes __attribute__((vector_size(kLanes)));

constexpr float kFar = 1e30f;
constexpr int kLead = 16;  // weights before and after the window from which the first pass knows its neighbours

struct Search {
  const float* values;  // [states]
  int states, length;
  std::vector<float> cost, best;
  std::vector<std::uint8_t> from;  // [steps][states / 4]: the two bits that fall out

  Search(const float* v, int states_, int length_)
      : values(v), states(states_), length(length_), cost(states_), best(states_ / 4),
        from(static_cast<std::size_t>(length_ + 2 * kLead) * (states_ / 4)) {}

  void advance(float x, std::uint8_t* into) {
    const int groups = states / 4;
    const float* from_costs = cost.data();
    for (int g = 0; g < groups; g += kLanes) {
      Floats a[4];
      for (int t = 0; t < 4; t++) std::memcpy(&a[t], from_costs + t * groups + g, sizeof a[t]);
      const Ints ab = a[1] < a[0], cd = a[3] < a[2];  // 0 or -1
      const Floats low = ab ? a[1] : a[0], high = cd ? a[3] : a[2];
      const Ints upper = high < low;
      const Floats least = upper ? high : low;
      const Bytes which = __builtin_convertvector(upper ? 2 - cd : -ab, Bytes);
      std::memcpy(best.data() + g, &least, sizeof least);
      std::memcpy(into + g, &which, sizeof which);
    }
    float* next = cost.data();
    for (int g = 0; g < groups; g += kLanes) {
      Floats b;
      std::memcpy(&b, best.data() + g, sizeof b);
      const Floats each[4] = {  // every group's cost four times, for its four next states
          __builtin_shufflevector(b, b, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
          __builtin_shufflevector(b, b, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7),
          __builtin_shufflevector(b, b, 8, 8, 8, 8, 9, 9, 9, 9, 10, 10, 10, 10, 11, 11, 11, 11),
          __builtin_shufflevector(b, b, 12, 12, 12, 12, 13, 13, 13, 13, 14, 14, 14, 14, 15, 15, 15, 15)};
      for (int k = 0; k < 4; k++) {
        Floats value;
        std::memcpy(&value, values + 4 * g + k * kLanes, sizeof value);
        const Floats e = x - value, sum = each[k] + e * e;
        std::memcpy(next + 4 * g + k * kLanes, &sum, sizeof sum);
      }
    }
  }

  int back(int state, const std::uint8_t* into) const { return state / 4 + into[state / 4] * (states / 4); }
  int cheapest() const { return static_cast<int>(std::min_element(cost.begin(), cost.end()) - cost.begin()); }

  float open(const float* x) {
    std::fill(cost.begin(), cost.end(), 0.0f);
    for (int i = 0; i < length; i++) advance(x[i], from.data());
    return cost[cheapest()];
  }

  // Tail-biting: the state before the first weight is the state after the last. Its guess is what an open search over
  // the circular window, begun and ended kLead weights outside, has at the seam.
  float circular(const float* x, std::uint8_t* symbols) {
    const int groups = states / 4, steps = length + 2 * kLead;
    std::fill(cost.begin(), cost.end(), 0.0f);
    for (int i = 0; i < steps; i++) advance(x[(i + length - kLead) % length], &from[static_cast<std::size_t>(i) * groups]);
    int state = cheapest();
    for (int i = steps - 1; i >= kLead + length; i--) state = back(state, &from[static_cast<std::size_t>(i) * groups]);
    const int seam = state;
    std::fill(cost.begin(), cost.end(), kFar);
    cost[seam] = 0.0f;
    for (int i = 0; i < length; i++) advance(x[i], &from[static_cast<std::size_t>(i) * groups]);
    const float error = cost[seam];
    for (int i = length - 1; i >= 0; i--) {
      symbols[i] = static_cast<std::uint8_t>(state % 4);
      state = back(state, &from[static_cast<std::size_t>(i) * groups]);
    }
    return error;
  }
};

}  // namespace

// x: [windows][length] in units. symbols: [windows][length], or null: only the errors of open windows.
extern "C" void trellis_encode(const float* values, std::int32_t state_bits, const float* x, std::int64_t windows,
                               std::int32_t length, std::uint8_t* symbols, float* errors) {
  Search search(values, 1 << state_bits, length);
  for (std::int64_t w = 0; w < windows; w++)
    errors[w] = symbols ? search.circular(x + w * length, symbols + w * length) : search.open(x + w * length);
}
