#include "sac_encode.inl"

namespace tandem {

std::int32_t sac_encode_avx512(const SacTaps& taps, const std::int32_t* x, bool rough, std::uint8_t* nibbles) {
  return encode(taps, x, rough, nibbles);
}

}  // namespace tandem
