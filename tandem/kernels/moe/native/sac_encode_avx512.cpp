#include "sac_encode.inl"

namespace tandem {

float sac_encode_avx512(const SacTaps& taps, const float* x, bool rough, std::uint8_t* nibbles) {
  return encode(taps, x, rough, nibbles);
}

}  // namespace tandem
