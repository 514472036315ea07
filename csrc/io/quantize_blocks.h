// Encoders of the block types: the counterparts of the quants() of io/gguf_blocks.h.
#pragma once

#include "io/gguf_blocks.h"

namespace effinfer::gguf {

// Writes one block of the type's kSize values.
void encode_block(const float* w, BlockQ8_0& block);
void encode_block(const float* w, BlockQ4_0& block);
void encode_block(const float* w, BlockQ4_1& block);
void encode_block(const float* w, BlockQ5_0& block);
void encode_block(const float* w, BlockQ5_1& block);
void encode_block(const float* w, BlockQ4K& block);
void encode_block(const float* w, BlockQ5K& block);
void encode_block(const float* w, BlockQ6K& block);

// `digits`: 0, 1, 2 for -1, 0, 1.
void encode_ternary(const uint8_t* digits, float scale, BlockTq1_0& block);
void encode_ternary(const uint8_t* digits, float scale, BlockTq2_0& block);
void encode_ternary(const uint8_t* digits, BlockI2S& block);

inline Half half_of(float x) {
  const uint16_t bits = f32_to_f16(x);
  return {static_cast<uint8_t>(bits & 255), static_cast<uint8_t>(bits >> 8)};
}

// bytes[i] = in[i] below, in[count + i] above: the counterpart of unpack_nibbles.
template <int count>
inline void pack_nibbles(const uint8_t* in, uint8_t* bytes) {
  for (int i = 0; i < count; ++i) {
    bytes[i] = static_cast<uint8_t>((in[i] & 15) | (in[count + i] & 15) << 4);
  }
}

// The counterpart of unpack_pairs, for 128 values of two bits.
inline void pack_pairs(const uint8_t* in, uint8_t* bytes) {
  for (int i = 0; i < 32; ++i) {
    bytes[i] = static_cast<uint8_t>((in[i] & 3) | (in[32 + i] & 3) << 2 | (in[64 + i] & 3) << 4 |
                                    (in[96 + i] & 3) << 6);
  }
}

// The counterpart of add_bit_planes: bit `place` of 256 values.
inline void pack_bit_planes(const uint8_t* in, int place, uint8_t* bytes) {
  for (int i = 0; i < 32; ++i) {
    int byte = 0;
    for (int plane = 0; plane < 8; ++plane) byte |= (in[32 * plane + i] >> place & 1) << plane;
    bytes[i] = static_cast<uint8_t>(byte);
  }
}

}  // namespace effinfer::gguf
