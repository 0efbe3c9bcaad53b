// Coded matrices back to floats, for batches so large that reading decoded weights costs little beside multiplying them.

constexpr int kTileRows = 64, kCodeBytes = 1024, kTileBytes = 1088;

struct Params {
  const unsigned char* tiles;  // of the matrix
  long long tile_stride, window_stride;
  void* out;            // [rows][inputs]
  const float* levels;  // [256], of the 2-bit code's scales
  const float* base;    // one f32; null: 1
  int kind, rows, inputs, dtype;
  float taps[3][16][2];
};

namespace {

__device__ __forceinline__ unsigned short brain_bits(float value) {
  const unsigned bits = __float_as_uint(value);
  if (value != value) return 0x7fc0;
  return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

__device__ __forceinline__ void write(const Params& p, long long at, float value) {
  if (p.dtype == 0) {
    static_cast<float*>(p.out)[at] = value;
  } else if (p.dtype == 1) {
    static_cast<unsigned short*>(p.out)[at] = brain_bits(value);
  } else {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    static_cast<unsigned short*>(p.out)[at] = bits;
  }
}

}  // namespace

// A block: a tile's window. Lane l of a warp makes nibble l of one row after another, so that a row's weights lie together.
extern "C" __global__ void __launch_bounds__(256) tandem_decode(const __grid_constant__ Params p) {
  __shared__ unsigned char tile[kTileBytes];
  __shared__ float2 taps[3][16];
  const unsigned char* from = p.tiles + blockIdx.y * p.tile_stride + blockIdx.x * p.window_stride;
  for (int i = threadIdx.x; i < kTileBytes; i += blockDim.x) tile[i] = from[i];
  if (threadIdx.x < 48) taps[threadIdx.x >> 4][threadIdx.x & 15] =
      make_float2(p.taps[threadIdx.x >> 4][threadIdx.x & 15][0], p.taps[threadIdx.x >> 4][threadIdx.x & 15][1]);
  __syncthreads();
  const float base = p.base == nullptr ? 1.0f : *p.base;
  const int lane = threadIdx.x & 31;
  for (int r = threadIdx.x >> 5; r < kTileRows; r += blockDim.x >> 5) {
    const int row = blockIdx.y * kTileRows + r;
    if (row >= p.rows) break;
    const int nibble = tile[(lane >> 1) * kTileRows + r] >> 4 * (lane & 1) & 15;
    const unsigned byte = tile[kCodeBytes + r];
    if (p.kind == 0) {
      float2 sum = taps[0][nibble];
      for (int s = 1; s < 3; s++) {
        const float2 tap = taps[s][__shfl_sync(0xffffffffu, nibble, (lane - s) & 31)];
        sum.x += tap.x, sum.y += tap.y;  // exact
      }
      const float scale = p.levels[byte] * base;
      const int input = blockIdx.x * 64 + 2 * lane;
      const long long at = static_cast<long long>(row) * p.inputs + input;
      if (input < p.inputs) write(p, at, sum.x * scale);
      if (input + 1 < p.inputs) write(p, at + 1, sum.y * scale);
    } else {
      const float magnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
      const float value = nibble & 8 ? -magnitude[nibble & 7] : magnitude[nibble & 7];
      const int input = blockIdx.x * 32 + lane;
      if (input < p.inputs) write(p, static_cast<long long>(row) * p.inputs + input, value * __uint_as_float(byte << 23));
    }
  }
}
