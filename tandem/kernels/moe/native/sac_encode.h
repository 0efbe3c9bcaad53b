// The encoder of the sliding additive code: a search over all nibble sequences of a window, one window a call.
#pragma once

#include <cstdint>

namespace tandem {

constexpr int kSacBlocks = 32, kSacNibbles = 16, kSacStates = 256, kSacTaps = 3;

// Everything is an integer, so that CPUs and GPUs (gpu/encode.cu) find the same nibbles: weights and taps in 1/64 of a scale,
// squared errors in 1/4096, times 16 where the low four bits hold a nibble. 48 blocks of at most 478 fit 31 bits.
constexpr int kSacOne = 64, kSacLimit = 12 * kSacOne;  // weights beyond 12 scales count as 12

struct SacTaps {
  std::int32_t own[2][kSacNibbles];    // what a block's own nibble adds to its two weights
  std::int32_t last[kSacNibbles][2];   // what the nibble before it adds
  std::int32_t older[kSacNibbles][2];  // what the one before that adds
  // Of the squared error, what depends on the own nibble and the older one only, and the older one: [older][own].
  std::int32_t cross[kSacNibbles][kSacNibbles];
  std::int32_t energy[kSacNibbles];  // of the own nibble alone
};

// x: 64 weights in 1/64 of the window's scale. nibbles[32] gets the circular sequence of least squared error that two passes
// of the Viterbi algorithm find; returns that error. With `rough` only the error of an open window, no nibbles.
using SacEncode = std::int32_t (*)(const SacTaps& taps, const std::int32_t* x, bool rough, std::uint8_t* nibbles);

std::int32_t sac_encode_scalar(const SacTaps& taps, const std::int32_t* x, bool rough, std::uint8_t* nibbles);
std::int32_t sac_encode_avx2(const SacTaps& taps, const std::int32_t* x, bool rough, std::uint8_t* nibbles);
std::int32_t sac_encode_avx512(const SacTaps& taps, const std::int32_t* x, bool rough, std::uint8_t* nibbles);

// The fastest of this CPU. All give the same nibbles.
SacEncode sac_encoder();

}  // namespace tandem
