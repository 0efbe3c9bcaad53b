// Number formats of activations, and SwiGLU. Plain loops that compilers turn into vector code.
#pragma once

#include <cstdint>
#include <cstring>

namespace tandem {

enum class Dtype { kF32 = 0, kBf16 = 1, kF16 = 2 };

constexpr int bytes_of(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

// `count` numbers from `from` (of `dtype`) to f32 and back, rounded to nearest even.
void widen(Dtype dtype, const void* from, float* to, std::int64_t count);
void narrow(Dtype dtype, const float* from, void* to, std::int64_t count);

// What the numbers become when they are stored as `dtype`.
void round_to(Dtype dtype, float* values, std::int64_t count);

struct Swiglu {
  float limit;  // infinity: no clamp
  float alpha;
  float beta;
};

// out[i] = g * sigmoid(alpha * g) * (u + beta), where g is clamped above at `limit` and u to [-limit, limit].
void swiglu(const Swiglu& rule, const float* gate, const float* up, float* out, std::int64_t count);

}  // namespace tandem
