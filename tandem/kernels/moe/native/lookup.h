// The table-lookup product that every code of the package uses, and what an instruction set must bring for it.
//
// A tile holds 64 rows of one window of inputs: 32 nibbles a row, then one scale byte a row. Byte p of row r lies at
// p * 64 + r and holds nibbles 2p (low) and 2p + 1 (high); the scale of row r lies at 1024 + r. A window is 64 inputs
// of the sliding additive code ("sac") or 32 of FP4. A token's tables hold, for each nibble position, what each of the
// 16 nibble values contributes to a dot product, so that
//     y[row] += scale[row] * sum over positions of table[position][nibble of the row].
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem {

constexpr int kTileRows = 64;
constexpr int kCodeBytes = 1024;  // of a tile
constexpr int kTileBytes = kCodeBytes + kTileRows;
constexpr int kPositions = 32;     // nibbles of a row in a window
constexpr int kTableBytes = 1024;  // of a window: 32 positions x 16 entries x (low byte, high byte)

enum class Code { kSac = 0, kFp4 = 1 };

// static: each instruction set's file has its own copy
static constexpr int window_inputs(Code code) { return code == Code::kSac ? 64 : 32; }

// taps[s][d][k]: what nibble value k of block j - s adds to input 2j + d, as the package's format fixes it.
constexpr int kTaps = 3;
using Taps = float[kTaps][2][16];

// Entry e of a table is low + 128 * high. The tables of byte positions 4g..4g+3 lie together: for the low nibble, 4 x 16
// low bytes and 4 x 16 high bytes; then the same for the high nibble.
struct Tables {
  const std::uint8_t* const* bytes;  // [tokens] -> [windows][1024]
  const float* const* units;         // [tokens] -> [windows]: the value of one step of a table
};

// Tiles [tiles][windows] of one matrix, at any strides.
struct Tiles {
  const std::uint8_t* first;
  std::ptrdiff_t tile_stride;    // bytes to the next 64 rows
  std::ptrdiff_t window_stride;  // bytes to the next window of the same rows
  int tiles;
  int windows;
};

struct Kernel {
  const char* name;
  // x: [windows * window_inputs] f32 -> tables [windows][1024] and units [windows].
  void (*build)(Code code, const Taps& taps, const float* x, int windows, std::uint8_t* tables, float* units);
  // y: [tokens][tiles * 64] f32 with `token_floats` between tokens; row r of a tile is y[place[r]] of its 64. Overwrites.
  void (*multiply)(Code code, const Tiles& tiles, const Tables& tables, int tokens, float* y,
                   std::ptrdiff_t token_floats);
  const std::uint8_t* place;  // [64]
};

extern const Kernel kScalar;
extern const Kernel kAvx2;
extern const Kernel kAvx512;
extern const Kernel kVbmi;

}  // namespace tandem
