// What every kernel shares: constants, the step of a table, and the order in which tiles are read. Included once by each
// kernel's source, so that each has a copy for its own instruction set.

// 2^((i + 1) / 16 - 16): the factor of scale byte i for i < 16; each further 16 double it.
constexpr float kScaleRoots[16] = {
    1.0442737824274138f / 65536, 1.0905077326652577f / 65536, 1.1387886347566916f / 65536, 1.189207115002721f / 65536,
    1.241857812073484f / 65536,  1.2968395546510096f / 65536, 1.3542555469368927f / 65536, 1.4142135623730951f / 65536,
    1.4768261459394993f / 65536, 1.5422108254079407f / 65536, 1.6104903319492543f / 65536, 1.681792830507429f / 65536,
    1.7562521603732995f / 65536, 1.8340080864093424f / 65536, 1.915206561397147f / 65536,  2.0f / 65536};

// Where in a window's tables the low bytes of nibble position j lie; the high bytes lie 64 further.
constexpr int table_offset(int j) { return j / 8 * 256 + j % 2 * 128 + j / 2 % 4 * 16; }

struct Quantum {
  float unit;     // the value of one step
  float inverse;  // steps a unit of value
};

// For entries of magnitude up to `most`. Infinity or NaN: all of the token's outputs become NaN.
inline Quantum quantum_of(float most, int high_bits) {
  constexpr float kSmallest = 7.8886090522101181e-31f;  // 2^-100: below it a window counts as zero
  const float steps = static_cast<float>((1 << (high_bits + 6)) - 1);
  if (!(most <= 3.4028234663852886e38f)) return {__builtin_nanf(""), 0.0f};
  const float range = most > kSmallest ? most : kSmallest;
  return {range / steps, steps / range};
}

constexpr int kAheadTiles = 8;     // tiles that a prefetch runs ahead
constexpr int kPanelWindows = 4;   // windows of a tile that are read together where tiles lie window by window
constexpr int kBlockWindows = 8;   // windows whose codes and tables stay in the caches while many tokens use them

// Consecutive windows of one tile.
struct Step {
  const std::uint8_t* tile;
  const std::uint8_t* ahead;  // what to prefetch
  std::ptrdiff_t window_stride;
  int window;  // first
  int windows;
};

inline void prefetch_tile(const std::uint8_t* tile) {
  for (int line = 0; line < kTileBytes; line += 64) __builtin_prefetch(tile + line, 0, 2);
}

template <template <int> class Rows>
inline void run_rows(Code code, const Step& step, const Tables& tables, int tokens, float* y,
                     std::ptrdiff_t token_floats) {
  int t = 0;
  const auto run = [&](auto rows, int count) {
    rows.run(code, step, Tables{tables.bytes + t, tables.units + t}, y + t * token_floats, token_floats);
    t += count;
  };
  while (t + 4 <= tokens) run(Rows<4>(), 4);
  if (t + 2 <= tokens) run(Rows<2>(), 2);
  if (t < tokens) run(Rows<1>(), 1);
}

template <template <int> class Rows>
inline void multiply_tiles(Code code, const Tiles& tiles, const Tables& tables, int tokens, float* y,
                           std::ptrdiff_t token_floats) {
  for (int t = 0; t < tokens; t++) std::memset(y + t * token_floats, 0, sizeof(float) * kTileRows * tiles.tiles);
  const bool by_window = tiles.tile_stride < tiles.window_stride;
  const int block = by_window ? kPanelWindows : (tokens > 4 ? kBlockWindows : tiles.windows);
  const int steps = tiles.tiles * ((tiles.windows + block - 1) / block);
  for (int n = 0; n < steps; n++) {
    const int tile = n % tiles.tiles, window = n / tiles.tiles * block;
    const int windows = tiles.windows - window < block ? tiles.windows - window : block;
    const std::uint8_t* here = tiles.first + tile * tiles.tile_stride + window * tiles.window_stride;
    const std::uint8_t* ahead = here + kAheadTiles * tiles.window_stride;
    if (by_window) {
      const int later = n + kAheadTiles / kPanelWindows, next = later < steps ? later : n;
      ahead = tiles.first + next % tiles.tiles * tiles.tile_stride + next / tiles.tiles * block * tiles.window_stride;
    }
    run_rows<Rows>(code, Step{here, ahead, tiles.window_stride, window, windows}, tables, tokens, y + tile * kTileRows,
                   token_floats);
  }
}
