// The routed experts of one layer on a GPU: from activation and routing to the weighted sum, in five launches.
//
// Bits are never turned into weights. A weight of the 2-bit code is a sum of twelve constants, each with the sign of a bit,
// so the activation is filtered instead (`features`), and a bit's share of a dot product is plus or minus one feature.
// Tensor cores multiply, in one of two ways:
//   few rows   codes as they are, one bit an operand, times the 16 bit planes of features in 16 bits (popcount of AND)
//   many rows  bits spread to bytes times features in 15 bits, which are two columns of 8 bits
// FP4 values, doubled, are 8-bit integers, and go the second way.
//
//   prepare   activation -> features of each window; routing -> items (an expert and up to kItemRows of its rows)
//   gate_up   a warp multiplies 64 rows of one item's gate or up by some of the windows: a part
//   activate  parts added up, SwiGLU, features of the result
//   down      as gate_up, for the down projection
//   combine   parts and experts added up in a fixed order
//
// Results repeat bit for bit: no sum depends on who comes first. Where the GPU can (compute capability 9.0), a step is
// launched before the one before it has ended, and waits for it.
// gpu.py compiles this at run time and fills Params (types.cuh).
#include "types.cuh"

namespace {

constexpr unsigned kFull = 0xffffffffu;
constexpr int kTileRows = 64, kCodeBytes = 1024, kTileBytes = 1088;
constexpr int kStages = 3;  // tiles of a warp in shared memory
constexpr int kSac = 0, kFp4 = 1;                             // kinds
constexpr int kSacBytes = 0, kFp4Bytes = 1, kSacPlanes = 2;   // ways
constexpr int kFp4Bias = 16;  // added to twice an e2m1 value, so that it has no sign

// Byte i of the result is the byte of b:a that nibble i of `select` names; with the nibble's top bit, eight copies of its sign.
__device__ __forceinline__ unsigned permute(unsigned a, unsigned b, unsigned select) {
  unsigned d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(select));
  return d;
}

// ---------------------------------------------------------------------------------------------------------------------
// Features. A warp makes those of 64 inputs; lane l holds inputs 2 l and 2 l + 1.

struct Quantised {
  int high, low;
};

// value / unit in 15 bits: 128 * high + low.
__device__ __forceinline__ Quantised quantise(float value, float per_unit) {
  const int q = __float2int_rn(value * per_unit);
  const int high = (q + 64) >> 7;
  return {high, q - (high << 7)};
}

__device__ __forceinline__ float largest(float value, int lanes) {
  for (int step = lanes / 2; step; step >>= 1) value = fmaxf(value, __shfl_xor_sync(kFull, value, step));
  return value;
}

constexpr float kTop = 16256.0f;      // 127 * 128: the high part stays in 8 bits
constexpr float kTopPlanes = 32640.0f;
constexpr float kLeast = 0x1p-100f;   // a window whose largest feature is below counts as zero

__device__ __forceinline__ float per_unit_of(float top, float most) { return top > kLeast ? most / top : 0.0f; }
__device__ __forceinline__ float unit_of(float top, float most) { return top > kLeast ? top / most : top * 0.0f; }  // keeps NaN

// The four features of block `lane`, one for each bit of its nibble. `largest` of them all, NaN if any is.
__device__ __forceinline__ float filtered(const Params& p, float x0, float x1, float (&f)[4]) {
  const int lane = threadIdx.x & 31;
  float in[6] = {x0, x1};
#pragma unroll
  for (int s = 1; s < 3; s++) {
    in[2 * s] = __shfl_sync(kFull, x0, (lane + s) & 31);
    in[2 * s + 1] = __shfl_sync(kFull, x1, (lane + s) & 31);
  }
  float top = 0.0f;
  bool bad = false;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    f[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < 6; k++) f[i] = fmaf(p.filter[i][k], in[k], f[i]);
    bad |= f[i] != f[i];
    top = fmaxf(top, fabsf(f[i]));
  }
  top = largest(top, 32);
  return __any_sync(kFull, bad) ? __int_as_float(0x7fc00000) : top;
}

__device__ __forceinline__ int sum_of(int value, int lanes) {
  for (int step = lanes / 2; step; step >>= 1) value += __shfl_xor_sync(kFull, value, step);
  return value;
}

// -> a window's high and low parts [2][128], the factor of its sums and what is taken from them. Byte order: that of the
// bits which a lane (g, t) of a product holds, [t][bit of a code byte][i] for code byte t + 4 i.
__device__ void sac_bytes(const Params& p, float x0, float x1, unsigned char* bytes, float2* unit, float factor) {
  const int lane = threadIdx.x & 31;
  float f[4];
  const float top = filtered(p, x0, x1, f), per_unit = per_unit_of(top, kTop);
  unsigned char* to = bytes + (lane >> 1 & 3) * 32 + (lane & 1) * 16 + (lane >> 3);
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const Quantised q = quantise(i & 1 ? 0.5f * f[i] : f[i], per_unit);  // an odd bit stands for 2
    to[4 * i] = static_cast<unsigned char>(q.high);
    to[128 + 4 * i] = static_cast<unsigned char>(q.low);
    sum += (q.high * 128 + q.low) << (i & 1);
  }
  sum = sum_of(sum, 32);
  if (lane == 0) *unit = make_float2(unit_of(top, kTop) * factor * 2.0f, static_cast<float>(sum) * 0.5f);  // a clear bit is -1
}

// Row l of a 32 x 32 matrix of bits -> column l.
__device__ __forceinline__ unsigned transposed(unsigned row) {
  const int lane = threadIdx.x & 31;
  unsigned keep = 0x0000ffffu;  // bits whose index has `step` clear
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    const unsigned other = __shfl_xor_sync(kFull, row, step);
    row = lane & step ? (row & ~keep) | (other & ~keep) >> step : (row & keep) | (other & keep) << step;
    keep ^= keep << (step >> 1);
  }
  return row;
}

// -> a window's bit planes [16][4]: word t holds the features of the bits that lane t of a product holds, 8 i + bit for code
// byte t + 4 i. unit: as above.
__device__ void sac_planes(const Params& p, float x0, float x1, unsigned* planes, float2* unit, float factor) {
  const int lane = threadIdx.x & 31;
  float f[4];
  const float top = filtered(p, x0, x1, f), per_unit = per_unit_of(top, kTopPlanes);
  int q[4], sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    q[i] = __float2int_rn(f[i] * per_unit);
    sum += q[i];
  }
  sum = sum_of(sum, 32);
  const unsigned low = (q[0] & 0xffff) | q[1] << 16, high = (q[2] & 0xffff) | q[3] << 16;
#pragma unroll
  for (int pair = 0; pair < 2; pair++) {  // t = 2 pair and 2 pair + 1
    unsigned row = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int block = 2 * (2 * pair + i) + 8 * (lane >> 3) + (lane >> 2 & 1);
      const unsigned a = __shfl_sync(kFull, low, block), b = __shfl_sync(kFull, high, block);
      const unsigned both = lane & 2 ? b : a;
      row |= (lane & 1 ? both >> 16 : both & 0xffffu) << 16 * i;
    }
    planes[(lane & 15) * 4 + 2 * pair + (lane >> 4)] = transposed(row);
  }
  if (lane == 0) *unit = make_float2(unit_of(top, kTopPlanes) * factor * 2.0f, static_cast<float>(sum) * 0.5f);
}

// -> bytes [2 windows][2][32] in the order [t][i][nibble] of code byte t + 4 i, and both windows' factors and biases.
__device__ void fp4_features(float x0, float x1, unsigned short* bytes, float2* units, float factor) {
  const int lane = threadIdx.x & 31, half = lane >> 4;
  const bool bad = x0 != x0 || x1 != x1;
  float top = largest(fmaxf(fabsf(x0), fabsf(x1)), 16);
  if (__ballot_sync(kFull, bad) >> 16 * half & 0xffff) top = __int_as_float(0x7fc00000);
  const float per_unit = per_unit_of(top, kTop);
  const Quantised a = quantise(x0, per_unit), b = quantise(x1, per_unit);
  unsigned short* to = bytes + half * 32 + (lane & 3) * 4 + (lane >> 2 & 3);
  to[0] = static_cast<unsigned short>((a.high & 255) | (b.high & 255) << 8);
  to[16] = static_cast<unsigned short>((a.low & 255) | (b.low & 255) << 8);
  const int sum = sum_of((a.high + b.high) * 128 + a.low + b.low, 16);
  if ((lane & 15) == 0)
    units[half] = make_float2(unit_of(top, kTop) * factor * 0.5f, static_cast<float>(kFp4Bias * sum));  // values are doubled
}

// The item of one pair, where an item is one pair and nobody makes a list: routing is older than this call, so that codes
// can be fetched while `prepare` runs. record: null where nothing is to be computed.
__device__ __forceinline__ Item single(const Params& p, int pair) {
  Item item;
  const int expert = p.ids[pair];
  const bool here = expert >= 0 && expert < p.experts;
  item.record = here ? p.records[expert] : nullptr;
  item.kind = here ? p.kinds_of[expert] : 0;
  item.rows = 1;
  item.pair[0] = pair;
  return item;
}

__device__ __forceinline__ int items_of(const Params& p) { return p.item_rows > 1 ? *p.item_count : p.tokens * p.picked; }

// The index of the item that computes a pair; below 0: none.
__device__ __forceinline__ int item_of(const Params& p, int pair) { return p.item_rows > 1 ? p.item_of[pair] : pair; }

// How an item reads its inputs: also the index of x_features.
__device__ __forceinline__ int way_of(const Params& p, int kind, int rows) {
  return kind == kFp4 ? kFp4Bytes : rows <= p.few ? kSacPlanes : kSacBytes;
}

__device__ __forceinline__ void features(const Params& p, int way, float x0, float x1, unsigned char* bytes, float2* units,
                                         float factor) {
  if (way == kSacPlanes) {
    sac_planes(p, x0, x1, reinterpret_cast<unsigned*>(bytes), units, factor);
  } else if (way == kSacBytes) {
    sac_bytes(p, x0, x1, bytes, units, factor);
  } else {
    fp4_features(x0, x1, reinterpret_cast<unsigned short*>(bytes), units, factor);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Inputs and outputs of any float type

__device__ __forceinline__ float read(const Params& p, long long at) {
  if (p.dtype == 0) return static_cast<const float*>(p.x)[at];
  const unsigned short bits = static_cast<const unsigned short*>(p.x)[at];
  if (p.dtype == 1) return __uint_as_float(static_cast<unsigned>(bits) << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ unsigned short half_bits(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ unsigned short brain_bits(float value) {
  const unsigned bits = __float_as_uint(value);
  if (value != value) return 0x7fc0;
  return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

__device__ __forceinline__ void write(const Params& p, long long at, float value) {
  if (p.dtype == 0) {
    static_cast<float*>(p.y)[at] = value;
  } else {
    static_cast<unsigned short*>(p.y)[at] = p.dtype == 1 ? brain_bits(value) : half_bits(value);
  }
}

// The activation that the down projection reads is rounded as x is.
__device__ __forceinline__ float rounded(const Params& p, float value) {
  if (p.dtype == 0) return value;
  if (p.dtype == 1) return __uint_as_float(static_cast<unsigned>(brain_bits(value)) << 16);
  float back;
  asm("cvt.f32.f16 %0, %1;" : "=f"(back) : "h"(half_bits(value)));
  return back;
}

// The next step may be launched.
__device__ __forceinline__ void begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// What the step before wrote may be read. Blocks without work wait too: a step that ends must find the ones before it ended.
__device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Products

// A warp's tiles on their way: each is 64 rows of one window, byte p of row r at 64 p + r, then the rows' scales.
struct __align__(16) Ring {
  unsigned char tile[kStages][kTileBytes];
};

__device__ __forceinline__ unsigned shared_address(const void* at) {
  return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// Starts the copy of one tile.
__device__ __forceinline__ void fetch(unsigned to, const unsigned char* from) {
  const int lane = threadIdx.x & 31;
  to += 16 * lane, from += 16 * lane;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + 512), "l"(from + 512) : "memory");
  if (lane < (kTileBytes - 1024) / 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + 1024), "l"(from + 1024) : "memory");
}

__device__ __forceinline__ uint2 pair_at(unsigned shared) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared));
  return v;
}

// 16 rows of 32 bytes times 8 columns, onto `sum`, or onto 0 if it is the first.
__device__ __forceinline__ void multiply(int (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                         unsigned b1, bool first) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(sum[0]), "=r"(sum[1]), "=r"(sum[2]), "=r"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(first ? 0 : sum[0]), "r"(first ? 0 : sum[1]),
        "r"(first ? 0 : sum[2]), "r"(first ? 0 : sum[3]));
}

// 16 rows of 128 bits (a lane's word of rows g and g + 8) and 8 bit planes: how often both are set.
__device__ __forceinline__ void count(int (&sum)[4], unsigned a0, unsigned a1, unsigned b) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=r"(sum[0]), "=r"(sum[1]), "=r"(sum[2]), "=r"(sum[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(0));
}

// Four bytes of each of four rows -> one word a row.
__device__ __forceinline__ void transpose(const unsigned (&w)[4], unsigned (&row)[4]) {
  const unsigned a = permute(w[0], w[1], 0x5140), b = permute(w[2], w[3], 0x5140);
  const unsigned c = permute(w[0], w[1], 0x7362), d = permute(w[2], w[3], 0x7362);
  row[0] = permute(a, b, 0x5410);
  row[1] = permute(a, b, 0x7632);
  row[2] = permute(c, d, 0x5410);
  row[3] = permute(c, d, 0x7632);
}

// Four nibbles of the low half of `word` -> four biased values of FP4.
__device__ __forceinline__ unsigned fp4_values(unsigned word) {
  const unsigned place = word & 0x7777u;
  // twice 0, 0.5, 1, 1.5, 2, 3, 4, 6, plus and minus, + 16
  const unsigned plus = permute(0x13121110u, 0x1c181614u, place), minus = permute(0x0d0e0f10u, 0x04080a0cu, place);
  const unsigned sign = permute(0x80808080u, 0x80808080u, word);  // 0xff where the nibble's top bit is set, else 0x80
  return (minus & sign) | (plus & ~sign);                         // bit 7 of both is 0
}

// The 2-bit code: four 8-bit integers a nibble value. At a multiple of 256 bytes, so that an address is made in one step.
// The factors of four scale bytes. sac: 2^((byte - 255) / 16). fp4: 2^(byte - 127), 0 for byte 0.
template <int kKind>
__device__ __forceinline__ void scales_of(unsigned bytes, float (&scale)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (kKind == kFp4) {
      scale[i] = __uint_as_float(permute(bytes, 0, 0x0444u | i << 12) >> 1 & 0x7f800000u);
    } else {
      const float shifted = __uint_as_float(permute(bytes, 0x4b000000u, 0x7440u | i));  // 2^23 + byte
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(scale[i]) : "f"(fmaf(shifted, 0.0625f, -524288.0f - 15.9375f)));
    }
  }
}

// 0 for byte 0 of the 2-bit code.
__device__ __forceinline__ void clear_zeros(unsigned bytes, float (&scale)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    if ((bytes >> 8 * i & 255u) == 0) scale[i] = 0.0f;
}

__device__ __forceinline__ bool has_zero(uint2 bytes) {
  return ((bytes.x - 0x01010101u) & ~bytes.x & 0x80808080u) | ((bytes.y - 0x01010101u) & ~bytes.y & 0x80808080u);
}

// Four rows of one window as they multiply: word r holds four code bytes of row r.
template <int kKind, int kGroups>
__device__ __forceinline__ void multiply_rows(const unsigned (&row)[4], const unsigned (&b)[kGroups][8],
                                              int (&sum)[kGroups][2][4]) {
#pragma unroll
  for (int i = 0; i < (kKind == kSac ? 4 : 1); i++) {
    unsigned a[4][2];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      if (kKind == kSac) {  // bits 2 i and 2 i + 1 of each byte, as 1 and 2
        a[r][0] = row[r] >> 2 * i & 0x01010101u;
        a[r][1] = row[r] >> 2 * i & 0x02020202u;
      } else {
        a[r][0] = fp4_values(row[r]);
        a[r][1] = fp4_values(row[r] >> 16);
      }
    }
#pragma unroll
    for (int n = 0; n < kGroups; n++) {
      multiply(sum[n][0], a[0][0], a[1][0], a[0][1], a[1][1], b[n][2 * i], b[n][2 * i + 1], i == 0);
      multiply(sum[n][1], a[2][0], a[3][0], a[2][1], a[3][1], b[n][2 * i], b[n][2 * i + 1], i == 0);
    }
  }
}

// A warp's walk over the windows first..last-1 of 64 rows: `use(window, codes, scales)` gets bytes 4 i + t of rows
// 8 g .. 8 g + 7, and these rows' scales. `ready` runs once, when the first codes are on their way and inputs may be read.
template <class Ready, class Use>
__device__ __forceinline__ void walk_over(unsigned ring, const unsigned char* tile, long long stride, int first, int last,
                                     const Ready& ready, const Use& use) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  unsigned filled = ring, read = ring + 64 * t + 8 * g;
  const unsigned end = ring + kStages * kTileBytes;
  const unsigned char* from = tile + first * stride;
  int left = last - first;
  const auto start = [&] {
    if (left > 0) fetch(filled, from);
    asm volatile("cp.async.commit_group;" ::: "memory");
    from += stride, left--, filled += kTileBytes;
    if (filled == end) filled = ring;
  };
  for (int i = 0; i < kStages - 1; i++) start();
  wait();  // codes are older than what the step before writes
  ready();
#pragma unroll 1
  for (int w = first; w < last; w++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncwarp();  // window w is here for all lanes, and nobody reads window w - 1 any more
    start();
    uint2 codes[4];
#pragma unroll
    for (int i = 0; i < 4; i++) codes[i] = pair_at(read + 256 * i);
    use(w, codes, pair_at(read + kCodeBytes - 64 * t));
    read += kTileBytes;
    if (read >= end) read -= kStages * kTileBytes;
  }
}

// Half of a lane's rows: a word a row, and the factors. zeros: some scale of the warp's may be 0.
template <int kKind>
__device__ __forceinline__ void half_rows(const uint2 (&codes)[4], uint2 scales, bool zeros, int half, unsigned (&row)[4],
                                          float (&scale)[4]) {
  unsigned bytes[4];
#pragma unroll
  for (int i = 0; i < 4; i++) bytes[i] = half ? codes[i].y : codes[i].x;
  transpose(bytes, row);
  scales_of<kKind>(half ? scales.y : scales.x, scale);
  if (kKind == kSac && zeros) clear_zeros(half ? scales.y : scales.x, scale);
}

// For up to kFew rows of the item: y[n][i] is this lane's share, planes 2 t, 2 t + 1 and 8 more, of row 8 g + i of input n.
template <int kFew>
__device__ __forceinline__ void count_product(unsigned ring, const unsigned char* tile, long long stride, int first, int last,
                                              const unsigned char* const (&feature)[kFew], const float2* const (&units)[kFew],
                                              int rows, float (&y)[kFew][8]) {
  const int lane = threadIdx.x & 31, t = lane & 3;
  const int top = t == 3 ? -2 : 2;  // the last plane is the sign
  const float share = static_cast<float>(1 << 2 * t);
  unsigned plane[kFew][2], next_plane[kFew][2];
  float2 unit[kFew], next_unit[kFew];
  const auto read_ahead = [&](int w) {
    if (w >= last) return;
#pragma unroll
    for (int n = 0; n < kFew; n++) {
      if (kFew > 1 && n >= rows) break;
      const unsigned* at = reinterpret_cast<const unsigned*>(feature[n] + w * 256) + lane;
      next_plane[n][0] = at[0], next_plane[n][1] = at[32];
      next_unit[n] = units[n][w];
    }
  };
  const auto ready = [&] { read_ahead(first); };
  walk_over(ring, tile, stride, first, last, ready, [&](int w, const uint2(&codes)[4], uint2 scales) {
#pragma unroll
    for (int n = 0; n < kFew; n++) {
      plane[n][0] = next_plane[n][0], plane[n][1] = next_plane[n][1];
      unit[n] = make_float2(next_unit[n].x * share, t == 0 ? next_unit[n].y : 0.0f);
    }
    read_ahead(w + 1);
    const bool zeros = __any_sync(kFull, has_zero(scales));
#pragma unroll
    for (int half = 0; half < 2; half++) {
      unsigned row[4];
      float scale[4];
      half_rows<kSac>(codes, scales, zeros, half, row, scale);
#pragma unroll
      for (int n = 0; n < kFew; n++) {
        if (kFew > 1 && n >= rows) break;
#pragma unroll
        for (int m = 0; m < 2; m++) {
          int low[4], high[4];
          count(low, row[2 * m], row[2 * m + 1], plane[n][0]);
          count(high, row[2 * m], row[2 * m + 1], plane[n][1]);
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int total = (high[2 * i + 1] * top + high[2 * i]) * 256 + (low[2 * i + 1] * 2 + low[2 * i]);
            float& sum = y[n][4 * half + 2 * m + i];
            sum = fmaf(static_cast<float>(total) - unit[n].y, scale[2 * m + i] * unit[n].x, sum);
          }
        }
      }
    }
  });
#pragma unroll
  for (int n = 0; n < kFew; n++)
#pragma unroll
    for (int i = 0; i < 8; i++) {
      y[n][i] += __shfl_xor_sync(kFull, y[n][i], 1);
      y[n][i] += __shfl_xor_sync(kFull, y[n][i], 2);
    }
}

// For 4 * kGroups rows of the item, or fewer: y[n][i] is row 8 g + i of input 4 n + t. features: of this lane's input and part,
// null for none; units: of this lane's output input.
template <int kKind, int kGroups>
__device__ __forceinline__ void byte_product(unsigned ring, const unsigned char* tile, long long stride, int first, int last,
                                             const unsigned char* const (&feature)[kGroups],
                                             const float2* const (&units)[kGroups], float (&y)[kGroups][8]) {
  constexpr int kFeatureBytes = kKind == kSac ? 256 : 64, kLaneBytes = kFeatureBytes / 8;  // of a window; a lane's own
  const int t = threadIdx.x & 3;
  walk_over(ring, tile, stride, first, last, [] {}, [&](int w, const uint2(&codes)[4], uint2 scales) {
    const bool zeros = kKind == kSac && __any_sync(kFull, has_zero(scales));
    unsigned b[kGroups][8];
    float2 unit[kGroups];
#pragma unroll
    for (int n = 0; n < kGroups; n++) {
      unit[n] = units[n] == nullptr ? make_float2(0.0f, 0.0f) : units[n][w];
#pragma unroll
      for (int i = 0; i < 8; i++) b[n][i] = 0;
      if (feature[n] != nullptr) {
        const unsigned char* at = feature[n] + w * kFeatureBytes + t * kLaneBytes;
        if (kKind == kSac) {
          const uint4 u = *reinterpret_cast<const uint4*>(at), v = *reinterpret_cast<const uint4*>(at + 16);
          b[n][0] = u.x, b[n][1] = u.y, b[n][2] = u.z, b[n][3] = u.w;
          b[n][4] = v.x, b[n][5] = v.y, b[n][6] = v.z, b[n][7] = v.w;
        } else {
          const uint2 u = *reinterpret_cast<const uint2*>(at);
          b[n][0] = u.x, b[n][1] = u.y;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      unsigned row[4];
      float scale[4];
      int sum[kGroups][2][4];
      half_rows<kKind>(codes, scales, zeros, half, row, scale);
      multiply_rows<kKind, kGroups>(row, b, sum);
#pragma unroll
      for (int n = 0; n < kGroups; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float total = static_cast<float>(sum[n][i >> 1][2 * (i & 1)] * 128 + sum[n][i >> 1][2 * (i & 1) + 1]);
          y[n][4 * half + i] = fmaf(total - unit[n].y, scale[i] * unit[n].x, y[n][4 * half + i]);
        }
      }
    }
  });
}

template <bool kSingle>
__device__ __forceinline__ int pair_of(const Item& item, int row) {
  return item.pair[kSingle ? 0 : row];
}

// Where the inputs of an item's rows lie.
struct Inputs {
  const unsigned char* features;
  const float2* units;
  long long feature_stride, unit_stride;  // from one row to the next
  bool by_token;                          // a row is a token, not a pair

  __device__ __forceinline__ long long row(const Params& p, int pair) const { return by_token ? pair / p.picked : pair; }
};

__device__ __forceinline__ void store(float* part, const float (&y)[8]) {
  float4* to = reinterpret_cast<float4*>(part);
  __stcg(to, make_float4(y[0], y[1], y[2], y[3]));
  __stcg(to + 1, make_float4(y[4], y[5], y[6], y[7]));
}

// What a warp walks over.
struct Walk {
  unsigned ring;
  const unsigned char* tile;
  long long stride;
  int first, last;
};

// As many groups of four rows as the item has, each number of them a program of its own. kSingle: items have one row.
template <int kKind, int kGroups, bool kSingle>
__device__ __forceinline__ void multiply_groups(const Params& p, const Item& item, const Walk& walk, const Inputs& in,
                                                float* part, long long part_stride) {
  if constexpr (kGroups > 1) {
    constexpr int kFewer = kGroups / 2;  // 4, 2 or 1
    if (item.rows <= 4 * kFewer) return multiply_groups<kKind, kFewer, kSingle>(p, item, walk, in, part, part_stride);
  }
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const unsigned char* feature[kGroups];
  const float2* units[kGroups];
  float y[kGroups][8];
#pragma unroll
  for (int n = 0; n < kGroups; n++) {
    const int input = 4 * n + (g >> 1), output = 4 * n + t;
    feature[n] = nullptr, units[n] = nullptr;
    if (input < item.rows)
      feature[n] = in.features + in.row(p, pair_of<kSingle>(item, input)) * in.feature_stride + (g & 1) * (kKind == kSac ? 128 : 32);
    if (output < item.rows) units[n] = in.units + in.row(p, pair_of<kSingle>(item, output)) * in.unit_stride;
#pragma unroll
    for (int i = 0; i < 8; i++) y[n][i] = 0.0f;
  }
  byte_product<kKind, kGroups>(walk.ring, walk.tile, walk.stride, walk.first, walk.last, feature, units, y);
#pragma unroll
  for (int n = 0; n < kGroups; n++)
    if (4 * n + t < item.rows) store(part + pair_of<kSingle>(item, 4 * n + t) * part_stride, y[n]);
}

// One warp's part of one tile of an item: rows [pair][64] at `part`.
template <int kFew, int kGroups>
__device__ __forceinline__ void multiply_part(const Params& p, const Item& item, const Matrix& matrix, int tile, int split,
                                              int splits, unsigned ring, const Inputs& in, float* part, long long part_stride) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const unsigned char* at = item.record + matrix.offset + tile * matrix.tile_stride;
  const int windows = static_cast<int>(matrix.windows), first = windows * split / splits, last = windows * (split + 1) / splits;
  part += tile * kTileRows + 8 * g;
  const int way = way_of(p, item.kind, item.rows);
  if (way == kSacPlanes) {
    const unsigned char* feature[kFew];
    const float2* units[kFew];
    float y[kFew][8];
#pragma unroll
    for (int n = 0; n < kFew; n++) {
      const long long row = in.row(p, pair_of<kGroups == 1>(item, min(n, item.rows - 1)));
      feature[n] = in.features + row * in.feature_stride;
      units[n] = in.units + row * in.unit_stride;
#pragma unroll
      for (int i = 0; i < 8; i++) y[n][i] = 0.0f;
    }
    count_product<kFew>(ring, at, matrix.window_stride, first, last, feature, units, item.rows, y);
#pragma unroll
    for (int n = 0; n < kFew; n++)
      if (n < item.rows && t == n) store(part + pair_of<kGroups == 1>(item, n) * part_stride, y[n]);
    return;
  }
  const Walk walk{ring, at, matrix.window_stride, first, last};
  if (way == kFp4Bytes) {
    multiply_groups<kFp4, kGroups, kGroups == 1>(p, item, walk, in, part, part_stride);
  } else if constexpr (kGroups > 1) {  // with one row an item there are planes
    multiply_groups<kSac, kGroups, false>(p, item, walk, in, part, part_stride);
  }
}

// How many warps share one tile of a product, so that all of them fill the GPU.
__device__ __forceinline__ int splits_for(const Params& p, int items, int tiles, int windows) {
  const int even = p.warps / (max(items, 1) * tiles);
  return max(1, min(min(even, windows), min(kSplitsMax, kPartsMax / (p.tokens * p.picked))));
}

__device__ __forceinline__ int gate_splits(const Params& p, int items) {
  return splits_for(p, items, p.inner_tiles * 2, p.input_windows);
}

__device__ __forceinline__ int down_splits(const Params& p, int items) {
  return splits_for(p, items, p.hidden_tiles, p.inner_tiles);
}

// Two neighbouring rows of all parts, added in their order.
__device__ __forceinline__ float2 added(const float* part, int parts, long long stride) {
  float2 v[kSplitsMax];
#pragma unroll
  for (int i = 0; i < kSplitsMax; i++)
    v[i] = i < parts ? __ldcg(reinterpret_cast<const float2*>(part + i * stride)) : make_float2(0.0f, 0.0f);
  float2 sum = v[0];
#pragma unroll
  for (int i = 1; i < kSplitsMax; i++) sum.x += v[i].x, sum.y += v[i].y;
  return sum;
}

__device__ __forceinline__ float swiglu(const Params& p, float gate, float up) {
  gate = fminf(gate, p.limit) + gate * 0.0f;  // keeps a NaN; of an infinity it makes one, as any product with 0 would
  up = fminf(fmaxf(up, -p.limit), p.limit) + up * 0.0f;
  return __fdividef(gate, 1.0f + __expf(-p.alpha * gate)) * (up + p.beta);
}

__device__ __forceinline__ int warp_of_grid() { return blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); }

template <int kFew, int kGroups>
__device__ __forceinline__ void gate_up_of(const Params& p) {
  __shared__ Ring rings[kBlockThreads / 32];
  const unsigned ring = shared_address(&rings[threadIdx.x >> 5]);
  begin();
  if (kGroups > 1) wait();  // for the list of items
  const int items = items_of(p), tiles = p.inner_tiles, splits = gate_splits(p, items);
  const int task = warp_of_grid();
  if (task >= items * tiles * 2 * splits) return wait();
  const int split = task % splits, which = task / splits % 2, tile = task / (2 * splits) % tiles;
  const int index = task / (2 * splits * tiles);
  const Item own = kGroups > 1 ? Item{} : single(p, index);
  const Item& item = kGroups > 1 ? p.items[index] : own;
  if (item.record == nullptr) return wait();
  const Kind& kind = p.kinds[item.kind];
  const long long row_floats = static_cast<long long>(tiles) * kTileRows, pairs = p.tokens * p.picked;
  const int way = way_of(p, item.kind, item.rows);
  const Inputs in{p.x_features[way], p.x_units[way], p.x_feature_stride[way], p.x_unit_stride[way], !p.weight_on_input};
  multiply_part<kFew, kGroups>(p, item, which ? kind.up : kind.gate, tile, split, splits, ring, in,
                               p.gate_parts + (which * splits + split) * pairs * row_floats, row_floats);
}

template <int kFew, int kGroups>
__device__ __forceinline__ void down_of(const Params& p) {
  __shared__ Ring rings[kBlockThreads / 32];
  const unsigned ring = shared_address(&rings[threadIdx.x >> 5]);
  begin();
  if (kGroups > 1) wait();  // for the list of items
  const int items = items_of(p), tiles = p.hidden_tiles, splits = down_splits(p, items);
  const int task = warp_of_grid();
  if (task >= items * tiles * splits) return wait();
  const int split = task % splits, tile = task / splits % tiles;
  const int index = task / (splits * tiles);
  const Item own = kGroups > 1 ? Item{} : single(p, index);
  const Item& item = kGroups > 1 ? p.items[index] : own;
  if (item.record == nullptr) return wait();
  const long long row_floats = static_cast<long long>(tiles) * kTileRows, pairs = p.tokens * p.picked;
  const Inputs in{p.h_features, p.h_units, p.inner_tiles * 256ll, p.inner_tiles * 2ll, false};
  multiply_part<kFew, kGroups>(p, item, p.kinds[item.kind].down, tile, split, splits, ring, in,
                               p.down_parts + split * pairs * row_floats, row_floats);
}

}  // namespace

// A warp: 64 rows of one pair's gate and up.
extern "C" __global__ void __launch_bounds__(128) tandem_activate(const __grid_constant__ Params p) {
  begin();
  wait();
  const int tiles = p.inner_tiles, task = warp_of_grid(), lane = threadIdx.x & 31;
  const long long pairs = p.tokens * p.picked;
  if (task >= pairs * tiles) return;
  const int pair = task / tiles, tile = task % tiles, index = item_of(p, pair);
  if (index < 0) return;
  const Item own = single(p, pair);
  if (own.record == nullptr) return;
  const unsigned char* record = own.record;
  const int code = own.kind;
  const int splits = gate_splits(p, items_of(p));
  const long long row_floats = static_cast<long long>(tiles) * kTileRows;
  const float* at = p.gate_parts + pair * row_floats + tile * kTileRows + 2 * lane;
  const float2 gate = added(at, splits, pairs * row_floats);
  const float2 up = added(at + splits * pairs * row_floats, splits, pairs * row_floats);
  const Kind& kind = p.kinds[code];
  float base[3] = {1.0f, 1.0f, 1.0f};
  if (kind.bases >= 0)
    for (int i = 0; i < 3; i++) base[i] = reinterpret_cast<const float*>(record + kind.bases)[i];
  const int row = tile * kTileRows + 2 * lane;  // rows of padding count nothing
  const float h0 = row < p.inner ? rounded(p, swiglu(p, gate.x * base[0], up.x * base[1])) : 0.0f;
  const float h1 = row + 1 < p.inner ? rounded(p, swiglu(p, gate.y * base[0], up.y * base[1])) : 0.0f;
  const float weight = p.weight_on_input ? 1.0f : p.weights[pair];
  const int way = way_of(p, code, p.item_rows > 1 ? p.items[index].rows : 1);
  features(p, way, h0, h1, p.h_features + static_cast<long long>(pair) * tiles * 256 + tile * (code == kSac ? 256 : 128),
           p.h_units + static_cast<long long>(pair) * tiles * 2 + tile * (code == kSac ? 1 : 2), weight * base[2]);
}

// A block: 64 outputs of one token; warp k adds the parts of pair k, of pair k + warps, ...
extern "C" __global__ void __launch_bounds__(256) tandem_combine(const __grid_constant__ Params p) {
  __shared__ float2 sums[8][32];
  begin();
  wait();
  const int token = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.x * kTileRows + 2 * lane;
  const int splits = down_splits(p, items_of(p));
  const long long row_floats = static_cast<long long>(p.hidden_tiles) * kTileRows, pairs = p.tokens * p.picked;
  float2 sum = make_float2(0.0f, 0.0f);
  for (int first = 0; first < p.picked; first += 8) {
    const int k = first + warp, pair = token * p.picked + k;
    sums[warp][lane] = k < p.picked && single(p, pair).record != nullptr
                           ? added(p.down_parts + pair * row_floats + row, splits, pairs * row_floats)
                           : make_float2(0.0f, 0.0f);
    __syncthreads();
    if (warp == 0)
      for (int i = 0; i < 8; i++) sum.x += sums[i][lane].x, sum.y += sums[i][lane].y;
    __syncthreads();
  }
  if (warp != 0) return;
  const long long at = static_cast<long long>(token) * p.hidden + row;
  if (row < p.hidden) write(p, at, sum.x);
  if (row + 1 < p.hidden) write(p, at + 1, sum.y);
}

// Grid: the first block makes the items, each further warp 64 inputs of one row.
extern "C" __global__ void __launch_bounds__(256) tandem_prepare(const __grid_constant__ Params p) {
  const int pairs = p.tokens * p.picked;
  wait();
  begin();  // after waiting, so that routing is there for steps that do not wait for this one
  if (blockIdx.x == 0) {
    if (p.item_rows == 1) return;
    __shared__ int id[kPairsMax], rank[kPairsMax];
    __shared__ unsigned items;
    if (threadIdx.x == 0) items = 0;
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
      const int expert = p.ids[i];
      const bool here = expert >= 0 && expert < p.experts && p.records[expert] != nullptr;
      id[i] = here ? expert : -1;
      if (!here) p.item_of[i] = -1;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
      int same = 0;
      for (int j = 0; j < i; j++) same += id[j] == id[i];
      rank[i] = same;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
      if (id[i] < 0 || rank[i] % p.item_rows != 0) continue;
      int before = 0;
      for (int j = 0; j < i; j++) before += id[j] >= 0 && rank[j] % p.item_rows == 0;
      Item& item = p.items[before];
      item.record = p.records[id[i]];
      item.kind = p.kinds_of[id[i]];
      int rows = 0;
      for (int j = i; j < pairs && rows < p.item_rows; j++)
        if (id[j] == id[i]) item.pair[rows++] = j, p.item_of[j] = before;
      item.rows = rows;
      atomicAdd(&items, 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) *p.item_count = static_cast<int>(items);
    return;
  }
  const int warp = (blockIdx.x - 1) * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  const int windows = p.input_windows, rows = p.weight_on_input ? pairs : p.tokens;
  const int row = warp / windows, window = warp % windows;
  if (row >= rows) return;
  const int token = p.weight_on_input ? row / p.picked : row, input = window * 64 + 2 * lane;
  const long long at = static_cast<long long>(token) * p.hidden + input;
  float x0 = input < p.hidden ? read(p, at) : 0.0f, x1 = input + 1 < p.hidden ? read(p, at + 1) : 0.0f;
  if (p.weight_on_input) {
    const float weight = rounded(p, p.weights[row]);
    x0 = rounded(p, x0 * weight), x1 = rounded(p, x1 * weight);
  }
  for (int way = 0; way < kWays; way++)
    if (p.ways >> way & 1)
      features(p, way, x0, x1, p.x_features[way] + row * p.x_feature_stride[way] + window * (way == kFp4Bytes ? 128 : 256),
               p.x_units[way] + row * p.x_unit_stride[way] + window * (way == kFp4Bytes ? 2 : 1), 1.0f);
}

constexpr int kBlocks1 = 6, kBlocks2 = 4, kBlocks4 = 3;  // a multiprocessor

#define TANDEM_KERNELS(few, groups)                                                                          \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, kBlocks##groups)                               \
      tandem_gate_up_##groups(const __grid_constant__ Params p) {                                            \
    gate_up_of<few, groups>(p);                                                                              \
  }                                                                                                          \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, kBlocks##groups)                               \
      tandem_down_##groups(const __grid_constant__ Params p) {                                               \
    down_of<few, groups>(p);                                                                                 \
  }
TANDEM_KERNELS(1, 1)
TANDEM_KERNELS(2, 2)
TANDEM_KERNELS(2, 4)
