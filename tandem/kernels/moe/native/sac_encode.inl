// Compiled once an instruction set: 16 nibble values side by side, in however many registers that set needs.
#include <cstring>

#include "sac_encode.h"

namespace tandem {
namespace {

typedef float Floats __attribute__((vector_size(4 * kSacNibbles)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kSacNibbles)));

constexpr float kFar = 1e30f;
constexpr int kLead = 8;  // blocks before and after the window from which the first pass knows its neighbours

struct Trellis {
  float cost[kSacStates];
  std::uint8_t from[kSacBlocks + 2 * kLead][kSacStates];  // the nibble that fell out of the state
};

// One block: every state (own nibble, previous) from its best predecessor.
void advance(const SacTaps& taps, float x0, float x1, Trellis& t, std::uint8_t* from) {
  float slope0[kSacStates], slope1[kSacStates], rest[kSacStates];
  for (int s = 0; s < kSacStates; s++) {
    const float r0 = x0 - taps.before[s][0], r1 = x1 - taps.before[s][1];
    rest[s] = t.cost[s] + r0 * r0 + r1 * r1;
    slope0[s] = -2.0f * r0;
    slope1[s] = -2.0f * r1;
  }
  Floats first0, first1;
  std::memcpy(&first0, taps.first[0], sizeof first0);
  std::memcpy(&first1, taps.first[1], sizeof first1);
  const Floats own = first0 * first0 + first1 * first1;
  for (int p = 0; p < kSacNibbles; p++) {  // the previous nibble
    Floats best = rest[p] + slope0[p] * first0 + slope1[p] * first1;
    Ints which = {};
    for (int q = 1; q < kSacNibbles; q++) {  // the one before it, which falls out
      const int s = p + kSacNibbles * q;
      const Floats e = rest[s] + slope0[s] * first0 + slope1[s] * first1;
      const Ints less = e < best;
      best = less ? e : best;
      which = less ? Ints{} + q : which;
    }
    best += own;
    std::memcpy(t.cost + kSacNibbles * p, &best, sizeof best);
    for (int a = 0; a < kSacNibbles; a++) from[a + kSacNibbles * p] = static_cast<std::uint8_t>(which[a]);
  }
}

int best_state(const Trellis& t) {
  int best = 0;
  for (int s = 1; s < kSacStates; s++)
    if (t.cost[s] < t.cost[best]) best = s;
  return best;
}

int previous(int state, std::uint8_t dropped) { return state / kSacNibbles + kSacNibbles * dropped; }

float encode(const SacTaps& taps, const float* x, bool rough, std::uint8_t* nibbles) {
  Trellis t;
  std::memset(t.cost, 0, sizeof t.cost);
  const int lead = rough ? 0 : kLead;
  for (int step = 0; step < kSacBlocks + 2 * lead; step++) {
    const int block = (step - lead + kSacBlocks) % kSacBlocks;
    advance(taps, x[2 * block], x[2 * block + 1], t, t.from[step]);
  }
  int state = best_state(t);
  if (rough) return t.cost[state];
  for (int step = kSacBlocks + 2 * lead - 1; step >= kSacBlocks + lead; step--)
    state = previous(state, t.from[step][state]);
  const int seam = state;  // after block 31, and so before block 0
  for (float& cost : t.cost) cost = kFar;
  t.cost[seam] = 0.0f;
  for (int block = 0; block < kSacBlocks; block++) advance(taps, x[2 * block], x[2 * block + 1], t, t.from[block]);
  state = seam;
  for (int block = kSacBlocks - 1; block >= 0; block--) {
    nibbles[block] = static_cast<std::uint8_t>(state % kSacNibbles);
    state = previous(state, t.from[block][state]);
  }
  return t.cost[seam];
}

}  // namespace
}  // namespace tandem
