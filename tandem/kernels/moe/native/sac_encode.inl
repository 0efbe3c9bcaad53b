// Compiled once an instruction set: 16 nibble values side by side, in however many registers that set needs.
#include <cstring>

#include "sac_encode.h"

namespace tandem {
namespace {

typedef std::int32_t Ints __attribute__((vector_size(4 * kSacNibbles)));

constexpr std::int32_t kFar = 1 << 29;
constexpr int kLead = 8;  // blocks before and after the window from which the first pass knows its neighbours

// State = own nibble + 16 * the one before.
struct Trellis {
  std::int32_t cost[kSacStates];  // a multiple of 16
  std::uint8_t from[kSacBlocks + 2 * kLead][kSacStates];  // the nibble that fell out of the state
};

inline Ints of(const std::int32_t* values) {
  Ints vector;
  std::memcpy(&vector, values, sizeof vector);
  return vector;
}

// One block. With y = x - last, the squared error is |y|^2 - 2 y older - 2 y own + (|older|^2 + 2 older own) + |own|^2: the
// older nibble is chosen by an addition and a minimum for each own nibble.
void advance(const SacTaps& taps, std::int32_t x0, std::int32_t x1, Trellis& t, std::uint8_t* from) {
  std::int32_t next[kSacStates];
  const Ints own0 = of(taps.own[0]), own1 = of(taps.own[1]), energy = of(taps.energy);
  for (int p = 0; p < kSacNibbles; p++) {  // the last nibble
    const std::int32_t y0 = x0 - taps.last[p][0], y1 = x1 - taps.last[p][1], square = y0 * y0 + y1 * y1;
    Ints best = {};
    for (int q = 0; q < kSacNibbles; q++) {  // the older one, which falls out
      const std::int32_t cost =
          t.cost[p + kSacNibbles * q] + 16 * (square - 2 * (y0 * taps.older[q][0] + y1 * taps.older[q][1]));
      const Ints e = of(taps.cross[q]) + cost;
      best = q == 0 ? e : e < best ? e : best;
    }
    const Ints cost = (best & ~15) + 16 * (energy - 2 * (y0 * own0 + y1 * own1));
    std::memcpy(next + kSacNibbles * p, &cost, sizeof cost);
    for (int a = 0; a < kSacNibbles; a++) from[a + kSacNibbles * p] = static_cast<std::uint8_t>(best[a] & 15);
  }
  std::memcpy(t.cost, next, sizeof next);
}

int best_state(const Trellis& t) {
  int best = 0;
  for (int s = 1; s < kSacStates; s++)
    if (t.cost[s] < t.cost[best]) best = s;
  return best;
}

int previous(int state, std::uint8_t dropped) { return state / kSacNibbles + kSacNibbles * dropped; }

std::int32_t encode(const SacTaps& taps, const std::int32_t* x, bool rough, std::uint8_t* nibbles) {
  Trellis t;
  std::memset(t.cost, 0, sizeof t.cost);
  const int lead = rough ? 0 : kLead;
  for (int step = 0; step < kSacBlocks + 2 * lead; step++) {
    const int block = (step - lead + kSacBlocks) % kSacBlocks;
    advance(taps, x[2 * block], x[2 * block + 1], t, t.from[step]);
  }
  int state = best_state(t);
  if (rough) return t.cost[state] / 16;
  for (int step = kSacBlocks + 2 * lead - 1; step >= kSacBlocks + lead; step--)
    state = previous(state, t.from[step][state]);
  const int seam = state;  // after block 31, and so before block 0
  for (std::int32_t& cost : t.cost) cost = kFar;
  t.cost[seam] = 0;
  for (int block = 0; block < kSacBlocks; block++) advance(taps, x[2 * block], x[2 * block + 1], t, t.from[block]);
  state = seam;
  for (int block = kSacBlocks - 1; block >= 0; block--) {
    nibbles[block] = static_cast<std::uint8_t>(state % kSacNibbles);
    state = previous(state, t.from[block][state]);
  }
  return t.cost[seam] / 16;
}

}  // namespace
}  // namespace tandem
