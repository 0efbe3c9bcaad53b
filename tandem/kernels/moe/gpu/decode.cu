// Coded matrices back to floats, for batches so large that reading decoded weights costs little beside multiplying them.

constexpr int kTileRows = 64, kCodeBytes = 1024;

struct Matrix {
  const unsigned char* tiles;
  long long tile_stride, window_stride;
  void* out;          // [rows][inputs]
  const float* base;  // null: 1
  int rows, inputs, windows, pad;
};

struct Params {
  Matrix matrix[3];
  const float* levels;  // [256], of the 2-bit code's scales
  int kind, dtype;
  float taps[3][16][2];
};

namespace {

__device__ __forceinline__ unsigned short brain_bits(float value) {
  const unsigned bits = __float_as_uint(value);
  if (value != value) return 0x7fc0;
  return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

__device__ __forceinline__ void write(void* out, int dtype, long long at, float value) {
  if (dtype == 0) {
    static_cast<float*>(out)[at] = value;
  } else if (dtype == 1) {
    static_cast<unsigned short*>(out)[at] = brain_bits(value);
  } else {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    static_cast<unsigned short*>(out)[at] = bits;
  }
}

}  // namespace

// A block: a tile's window of one of the matrices. Lane l of a warp makes nibble l of one row after another, so that a row's
// weights lie together.
extern "C" __global__ void __launch_bounds__(256) tandem_decode(const __grid_constant__ Params p) {
  constexpr int kByteStride = kTileRows + 4;  // in shared memory: the 16 bytes of a row lie in different banks
  __shared__ __align__(16) unsigned char codes[kCodeBytes / kTileRows * kByteStride];
  __shared__ unsigned char scales[kTileRows];
  __shared__ float2 taps[3][16];
  const Matrix& matrix = p.matrix[blockIdx.z];
  if (static_cast<int>(blockIdx.x) >= matrix.windows || static_cast<int>(blockIdx.y) * kTileRows >= matrix.rows) return;
  const unsigned char* from = matrix.tiles + blockIdx.y * matrix.tile_stride + blockIdx.x * matrix.window_stride;
  const int thread = threadIdx.x, lane = thread & 31;
  *reinterpret_cast<unsigned*>(codes + (thread >> 4) * kByteStride + 4 * (thread & 15)) =
      reinterpret_cast<const unsigned*>(from)[thread];
  if (thread < kTileRows) scales[thread] = from[kCodeBytes + thread];
  if (thread < 48) {
    const float(&pair)[2] = p.taps[thread >> 4][thread & 15];
    taps[thread >> 4][thread & 15] = make_float2(pair[0], pair[1]);
  }
  __syncthreads();
  const float base = matrix.base == nullptr ? 1.0f : *matrix.base;
  for (int r = thread >> 5; r < kTileRows; r += 8) {
    const int row = blockIdx.y * kTileRows + r;
    if (row >= matrix.rows) break;
    const int nibble = codes[(lane >> 1) * kByteStride + r] >> 4 * (lane & 1) & 15;
    const unsigned byte = scales[r];
    if (p.kind == 0) {
      float2 sum = taps[0][nibble];
      for (int s = 1; s < 3; s++) {
        const float2 tap = taps[s][__shfl_sync(0xffffffffu, nibble, (lane - s) & 31)];
        sum.x += tap.x, sum.y += tap.y;  // exact
      }
      const float scale = p.levels[byte] * base;
      const int input = blockIdx.x * 64 + 2 * lane;
      const long long at = static_cast<long long>(row) * matrix.inputs + input;
      if (p.dtype == 1 && input + 1 < matrix.inputs && (matrix.inputs & 1) == 0) {
        static_cast<unsigned*>(matrix.out)[at / 2] = brain_bits(sum.x * scale) | brain_bits(sum.y * scale) << 16;
        continue;
      }
      if (input < matrix.inputs) write(matrix.out, p.dtype, at, sum.x * scale);
      if (input + 1 < matrix.inputs) write(matrix.out, p.dtype, at + 1, sum.y * scale);
    } else {
      const float magnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
      const float value = nibble & 8 ? -magnitude[nibble & 7] : magnitude[nibble & 7];
      const int input = blockIdx.x * 32 + lane;
      const long long at = static_cast<long long>(row) * matrix.inputs + input;
      if (input < matrix.inputs) write(matrix.out, p.dtype, at, value * __uint_as_float(byte << 23));
    }
  }
}
