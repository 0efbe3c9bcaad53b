// The encoder of the sliding additive code on a GPU: the same integers as native/sac_encode.inl, so the same nibbles.
//
// A warp encodes two windows, 16 lanes each. Lane p holds the states whose last nibble is p: 16 own nibbles. A block of two
// weights costs each lane 256 additions and minima, whose constants are the same for all lanes.

constexpr int kBlocks = 32, kInputs = 64, kNibbles = 16, kLead = 8, kSteps = kBlocks + 2 * kLead;
constexpr int kOne = 64, kLimit = 12 * kOne, kFar = 1 << 29, kTop = 255;
constexpr int kWarps = 3;
constexpr unsigned kFull = 0xffffffffu;

struct Params {
  const float* weights;  // [windows][64]
  unsigned char* nibbles;  // [windows][32]
  unsigned char* scales;   // [windows]
  const float* levels;     // [256], rising from 1 on
  long long windows;
  float base;
  int tries;
  int step_of[8];
  int own[2][kNibbles], last[kNibbles][2], older[kNibbles][2];
  int cross[kNibbles][kNibbles], energy[kNibbles];
};

namespace {

struct Scratch {  // of a warp
  int cost[2][kNibbles * 20 + 16];  // [window][own][last]: rows of 20, so that 16 bytes a lane meet no bank twice
  uint2 from[kSteps][32];           // of each step and lane: 16 nibbles that fell out
  float weight[2][kInputs];
  int x[2][kInputs];
};

// One block of two weights; `cost` of this lane's row is read and all rows are written.
template <bool kTrack>
__device__ __forceinline__ void advance(const Params& p, Scratch& s, int window, int last, const int (&mine)[2], int block,
                                        int step) {
  const int y0 = s.x[window][2 * block] - mine[0], y1 = s.x[window][2 * block + 1] - mine[1];
  const int square = 16 * (y0 * y0 + y1 * y1);
  int c[kNibbles];
  const int4* row = reinterpret_cast<const int4*>(s.cost[window] + last * 20);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int4 v = row[i];
    c[4 * i] = v.x, c[4 * i + 1] = v.y, c[4 * i + 2] = v.z, c[4 * i + 3] = v.w;
  }
#pragma unroll
  for (int q = 0; q < kNibbles; q++)
    c[q] += square - y0 * (32 * p.older[q][0]) - y1 * (32 * p.older[q][1]);
  __syncwarp();
  uint2 dropped = make_uint2(0, 0);
#pragma unroll
  for (int a = 0; a < kNibbles; a++) {
    int best = c[0] + p.cross[0][a];
#pragma unroll
    for (int q = 1; q < kNibbles; q++) best = min(best, c[q] + p.cross[q][a]);
    if (kTrack) {
      const unsigned nibble = static_cast<unsigned>(best & 15) << 4 * (a & 7);
      if (a < 8) {
        dropped.x |= nibble;
      } else {
        dropped.y |= nibble;
      }
    }
    s.cost[window][a * 20 + last] = (best & ~15) + 16 * p.energy[a] - y0 * (32 * p.own[0][a]) - y1 * (32 * p.own[1][a]);
  }
  if (kTrack) s.from[step][threadIdx.x & 31] = dropped;
  __syncwarp();
}

// The state (own + 16 * last) of least cost, the lowest of equals, and its cost.
__device__ __forceinline__ int2 best_state(const Scratch& s, int window, int last) {
  int least = s.cost[window][last], own = 0;
#pragma unroll 1
  for (int a = 1; a < kNibbles; a++) {
    const int cost = s.cost[window][a * 20 + last];
    if (cost < least) least = cost, own = a;
  }
  int state = own + kNibbles * last;
#pragma unroll
  for (int step = 8; step; step >>= 1) {
    const int other = __shfl_xor_sync(kFull, least, step), other_state = __shfl_xor_sync(kFull, state, step);
    if (other < least || (other == least && other_state < state)) least = other, state = other_state;
  }
  return make_int2(state, least);
}

__device__ __forceinline__ int previous(const Scratch& s, int window, int step, int state) {
  const uint2 dropped = s.from[step][window * 16 + (state >> 4)];
  const unsigned word = state & 8 ? dropped.y : dropped.x;
  return (state >> 4) | static_cast<int>(word >> 4 * (state & 7) & 15u) << 4;
}

// Weights in 1/64 of a scale.
__device__ __forceinline__ float divide(const Params& p, Scratch& s, int window, int last, int byte) {
  const float step = p.levels[byte] * p.base;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kInputs / 16; i++) {
    const int at = last + 16 * i;
    const float units = __fmul_rn(__fdiv_rn(s.weight[window][at], step), static_cast<float>(kOne));
    s.x[window][at] = __float2int_rn(fminf(fmaxf(units, -static_cast<float>(kLimit)), static_cast<float>(kLimit)));
  }
  __syncwarp();
  return step;
}

__device__ __forceinline__ void clear_costs(Scratch& s, int window, int last, int value) {
#pragma unroll
  for (int a = 0; a < kNibbles; a++) s.cost[window][a * 20 + last] = value;
  __syncwarp();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kWarps) tandem_encode(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char memory[];
  Scratch& s = reinterpret_cast<Scratch*>(memory)[threadIdx.x >> 5];
  const int lane = threadIdx.x & 31, window = lane >> 4, last = lane & 15;
  const int mine[2] = {p.last[last][0], p.last[last][1]};
  const long long pairs = (p.windows + 1) / 2, warps = static_cast<long long>(gridDim.x) * kWarps;
  for (long long pair = static_cast<long long>(blockIdx.x) * kWarps + (threadIdx.x >> 5); pair < pairs; pair += warps) {
    const long long index = min(2 * pair + window, p.windows - 1);
    double energy = 0.0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kInputs / 16; i++) s.weight[window][last + 16 * i] = p.weights[index * kInputs + last + 16 * i];
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < kInputs; i++) {  // in this order, so that every machine gets the same sum
      const double w = s.weight[window][i];
      energy = __dadd_rn(energy, __dmul_rn(w, w));
    }
    const float rms = static_cast<float>(__dsqrt_rn(energy / kInputs)), relative = __fdiv_rn(rms, p.base);
    int first = 1;  // the highest byte whose level is not above, at least 1
#pragma unroll 1
    for (int jump = 128; jump; jump >>= 1)
      if (first + jump <= kTop && p.levels[first + jump] <= relative) first += jump;
    int chosen = first;
    float least = 0.0f;
#pragma unroll 1
    for (int i = 0; i < p.tries; i++) {
      const int byte = min(max(first + p.step_of[i], 1), kTop);
      const float step = divide(p, s, window, last, byte);
      clear_costs(s, window, last, 0);
#pragma unroll 1
      for (int block = 0; block < kBlocks; block++) advance<false>(p, s, window, last, mine, block, 0);
      const float error = __fmul_rn(__fmul_rn(static_cast<float>(best_state(s, window, last).y / 16), step), step);
      if (i == 0 || error < least) least = error, chosen = byte;
    }
    divide(p, s, window, last, chosen);
    clear_costs(s, window, last, 0);
#pragma unroll 1
    for (int step = 0; step < kSteps; step++)
      advance<true>(p, s, window, last, mine, (step - kLead + kBlocks) % kBlocks, step);
    int state = best_state(s, window, last).x;
#pragma unroll 1
    for (int step = kSteps - 1; step >= kBlocks + kLead; step--) state = previous(s, window, step, state);
    const int seam = state;  // after block 31, and so before block 0
    __syncwarp();
    clear_costs(s, window, last, kFar);
    if (last == 0) s.cost[window][(seam & 15) * 20 + (seam >> 4)] = 0;
    __syncwarp();
#pragma unroll 1
    for (int block = 0; block < kBlocks; block++) advance<true>(p, s, window, last, mine, block, block);
    state = seam;
    int out[2] = {0, 0};  // nibbles of blocks `last` and `last + 16`
#pragma unroll 1
    for (int block = kBlocks - 1; block >= 0; block--) {
      if ((block & 15) == last) out[block >> 4] = state & 15;
      state = previous(s, window, block, state);
    }
    const bool zero = energy == 0.0;
    if (2 * pair + window < p.windows) {
      p.nibbles[index * kBlocks + last] = static_cast<unsigned char>(zero ? 0 : out[0]);
      p.nibbles[index * kBlocks + last + 16] = static_cast<unsigned char>(zero ? 0 : out[1]);
      if (last == 0) p.scales[index] = static_cast<unsigned char>(zero ? 0 : chosen);
    }
  }
}
