// The encoder of the sliding additive code: a search over all nibble sequences of a window, one window a call.
#pragma once

#include <cstdint>

namespace tandem {

constexpr int kSacBlocks = 32, kSacNibbles = 16, kSacStates = 256, kSacTaps = 3;

struct SacTaps {
  float first[2][kSacNibbles];   // what a block's own nibble adds to its two weights
  float before[kSacStates][2];   // what the two nibbles before it add; state = nibble j-1 + 16 * nibble j-2
};

// x: 64 weights in units of the window's scale. nibbles[32] gets the circular sequence of least squared error that two
// passes of the Viterbi algorithm find; returns that error. With `rough` only the error of an open window, no nibbles.
using SacEncode = float (*)(const SacTaps& taps, const float* x, bool rough, std::uint8_t* nibbles);

float sac_encode_scalar(const SacTaps& taps, const float* x, bool rough, std::uint8_t* nibbles);
float sac_encode_avx2(const SacTaps& taps, const float* x, bool rough, std::uint8_t* nibbles);
float sac_encode_avx512(const SacTaps& taps, const float* x, bool rough, std::uint8_t* nibbles);

// The fastest of this CPU. All give the same bits: the same operations in the same order, no contraction.
SacEncode sac_encoder();

}  // namespace tandem
