// Types of 32 elements, and the ternary types.
#include "io/quantize_blocks.h"

#include <cmath>

#include "io/quantize_fit.h"

namespace effinfer::gguf {
namespace {

void pack_fifth_bits(const uint8_t* q, uint8_t* qh) {
  for (int i = 0; i < 4; ++i) {
    int byte = 0;
    for (int bit = 0; bit < 8; ++bit) byte |= (q[8 * i + bit] >> 4) << bit;
    qh[i] = static_cast<uint8_t>(byte);
  }
}

// w = d * (q - half): writes the quants, returns d.
template <int half>
Half encode_symmetric(const float* w, uint8_t* q) {
  const Half d = half_of(fit_symmetric<32, half>(w));
  const float inv = inverse(d.value());
  for (int i = 0; i < 32; ++i) {
    q[i] = static_cast<uint8_t>(limit(nearest(w[i] * inv), -half, half - 1) + half);
  }
  return d;
}

// w = d * q + m with q in [0, max].
template <int max>
void encode_affine(const float* w, uint8_t* q, Half& d, Half& m) {
  const Affine fit = fit_affine<32, max, false>(w);
  d = half_of(fit.scale);
  m = half_of(fit.offset);
  const float inv = inverse(d.value());
  const float offset = m.value();
  for (int i = 0; i < 32; ++i) {
    q[i] = static_cast<uint8_t>(limit(nearest((w[i] - offset) * inv), 0.0f, max));
  }
}

// Five ternary digits a byte, the first on top: ceil(digits * 256 / 243), of which the decoder's
// multiplications bring up one digit after the other. Digits that are missing are 0.
template <int bytes, int digits>
void pack_digits(const uint8_t* in, uint8_t* out) {
  for (int i = 0; i < bytes; ++i) {
    int value = 0;
    for (int n = 0; n < 5; ++n) value = 3 * value + (n < digits ? in[bytes * n + i] : 0);
    out[i] = static_cast<uint8_t>((value * 256 + 242) / 243);
  }
}

}  // namespace

// Rounds as the gguf package: the scale is of the largest magnitude, ties go away from zero.
void encode_block(const float* w, BlockQ8_0& block) {
  float largest = 0;
  for (int i = 0; i < 32; ++i) largest = std::max(largest, std::abs(w[i]));
  const float d = largest / 127.0f;
  block.d = half_of(d);
  const float inv = inverse(d);
  for (int i = 0; i < 32; ++i) {
    const float magnitude = std::abs(w[i] * inv);
    const float whole = std::floor(magnitude);
    const float q = limit(whole + std::floor(2.0f * (magnitude - whole)), 0.0f, 127.0f);
    block.qs[i] = static_cast<uint8_t>(static_cast<int>(w[i] < 0.0f ? -q : q));
  }
}

void encode_block(const float* w, BlockQ4_0& block) {
  uint8_t q[32];
  block.d = encode_symmetric<8>(w, q);
  pack_nibbles<16>(q, block.qs);
}

void encode_block(const float* w, BlockQ4_1& block) {
  uint8_t q[32];
  encode_affine<15>(w, q, block.d, block.m);
  pack_nibbles<16>(q, block.qs);
}

void encode_block(const float* w, BlockQ5_0& block) {
  uint8_t q[32];
  block.d = encode_symmetric<16>(w, q);
  pack_nibbles<16>(q, block.qs);
  pack_fifth_bits(q, block.qh);
}

void encode_block(const float* w, BlockQ5_1& block) {
  uint8_t q[32];
  encode_affine<31>(w, q, block.d, block.m);
  pack_nibbles<16>(q, block.qs);
  pack_fifth_bits(q, block.qh);
}

void encode_ternary(const uint8_t* digits, float scale, BlockTq1_0& block) {
  pack_digits<32, 5>(digits, block.qs);
  pack_digits<16, 5>(digits + 160, block.qs + 32);
  pack_digits<4, 4>(digits + 240, block.qs + 48);
  block.d = half_of(scale);
}

void encode_ternary(const uint8_t* digits, float scale, BlockTq2_0& block) {
  pack_pairs(digits, block.qs);
  pack_pairs(digits + 128, block.qs + 32);
  block.d = half_of(scale);
}

void encode_ternary(const uint8_t* digits, BlockI2S& block) {
  for (int i = 0; i < 32; ++i) {
    block.qs[i] = static_cast<uint8_t>(digits[i] << 6 | digits[32 + i] << 4 | digits[64 + i] << 2 |
                                       digits[96 + i]);
  }
}

}  // namespace effinfer::gguf
