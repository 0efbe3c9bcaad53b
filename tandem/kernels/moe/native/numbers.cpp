#include "numbers.h"

namespace tandem {
namespace {

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

std::uint16_t to_bf16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<std::uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}

float from_bf16(std::uint16_t half) { return from_bits(static_cast<std::uint32_t>(half) << 16); }

float from_f16(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000) << 16;
  const std::uint32_t rest = half & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | rest << 13);
  return from_bits(sign | bits_of(from_bits(rest << 13) * 0x1p112f));  // exact, denormals included
}

std::uint16_t to_f16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  std::uint32_t half;
  if (rest > 0x7f800000) {
    half = 0x7e00;
  } else if (rest >= 0x477ff000) {  // rounds to 65536 or more
    half = 0x7c00;
  } else if (rest < 0x38800000) {  // below 2^-14: the addition rounds to steps of 2^-24
    half = bits_of(from_bits(rest) + 0.5f) - 0x3f000000;
  } else {
    half = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

// exp(x) for x in [-87, 88], to 2 units in the last place.
inline float exponential(float x) {
  const float shifted = x * 1.44269504f + 12582912.0f;  // the integer nearest x / ln 2 in the low bits
  const std::uint32_t exponent = bits_of(shifted) << 23;
  const float whole = shifted - 12582912.0f;
  const float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float sum = 1.9875691500e-4f;
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  return from_bits(bits_of(sum) + exponent);
}

}  // namespace

void widen(Dtype dtype, const void* from, float* to, std::int64_t count) {
  const std::uint16_t* halves = static_cast<const std::uint16_t*>(from);
  switch (dtype) {
    case Dtype::kF32:
      std::memcpy(to, from, sizeof(float) * static_cast<std::size_t>(count));
      break;
    case Dtype::kBf16:
      for (std::int64_t i = 0; i < count; i++) to[i] = from_bf16(halves[i]);
      break;
    case Dtype::kF16:
      for (std::int64_t i = 0; i < count; i++) to[i] = from_f16(halves[i]);
      break;
  }
}

void narrow(Dtype dtype, const float* from, void* to, std::int64_t count) {
  std::uint16_t* halves = static_cast<std::uint16_t*>(to);
  switch (dtype) {
    case Dtype::kF32:
      std::memcpy(to, from, sizeof(float) * static_cast<std::size_t>(count));
      break;
    case Dtype::kBf16:
      for (std::int64_t i = 0; i < count; i++) halves[i] = to_bf16(from[i]);
      break;
    case Dtype::kF16:
      for (std::int64_t i = 0; i < count; i++) halves[i] = to_f16(from[i]);
      break;
  }
}

void round_to(Dtype dtype, float* values, std::int64_t count) {
  if (dtype == Dtype::kBf16)
    for (std::int64_t i = 0; i < count; i++) values[i] = from_bf16(to_bf16(values[i]));
  if (dtype == Dtype::kF16)
    for (std::int64_t i = 0; i < count; i++) values[i] = from_f16(to_f16(values[i]));
}

void swiglu(const Swiglu& rule, const float* gate, const float* up, float* out, std::int64_t count) {
  const float limit = rule.limit;
  for (std::int64_t i = 0; i < count; i++) {
    // comparisons that keep a NaN
    const float g = gate[i] > limit ? limit : gate[i];
    const float above = up[i] > limit ? limit : up[i];
    const float u = above < -limit ? -limit : above;
    float power = -rule.alpha * g;
    power = power > 88.0f ? 88.0f : power;
    power = power < -87.0f ? -87.0f : power;
    out[i] = g / (1.0f + exponential(power)) * (u + rule.beta);
  }
}

}  // namespace tandem
