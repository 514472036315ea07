// The quantised blocks of GGUF files, byte for byte. Source: the block formats of ggml
// (ggml-common.h) and of the gguf Python package (quants.py).
//
// Every block type has the same face, which decoder and packer are written against:
//
//   kSize          elements in a block
//   kZero          subtracted from a quant; quants() gives unsigned bytes for every type
//   kHasMin        whether a minimum follows the scale
//   quants(out)    the block's quants in element order, one byte each
//
// Types of 32 elements have one scale; `m` exists where kHasMin:
//
//   w = d * (q - zero) + m
//
// Types of 256 elements have a scale a sub-block of kSubBlock elements; `dmin` and sub_min() exist
// where kHasMin:
//
//   w = (d * sub_scale(j)) * (q - zero) - dmin * sub_min(j)      j = element / kSubBlock
//
// All members are bytes: blocks may lie at any address. Multi-byte numbers are little-endian.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "core/float16.h"
#include "effinfer/dtype.h"
#include "effinfer/error.h"

namespace effinfer::gguf {

struct Half {
  uint8_t low;
  uint8_t high;
  uint16_t bits() const { return static_cast<uint16_t>(low | high << 8); }
  float value() const { return f16_to_f32(bits()); }
};

// out[i] = low nibble of bytes[i], out[count + i] = high nibble.
template <int count>
inline void unpack_nibbles(const uint8_t* bytes, uint8_t* out) {
  for (int i = 0; i < count; ++i) {
    out[i] = bytes[i] & 15;
    out[count + i] = bytes[i] >> 4;
  }
}

// out[32 * f + i] = bits 2f..2f+1 of bytes[i], for 32 bytes.
inline void unpack_pairs(const uint8_t* bytes, uint8_t* out) {
  for (int field = 0; field < 4; ++field) {
    for (int i = 0; i < 32; ++i) out[32 * field + i] = bytes[i] >> 2 * field & 3;
  }
}

// out[32 * f + i] |= bit f of bytes[i] at position `place`, for 32 bytes.
inline void add_bit_planes(const uint8_t* bytes, int place, uint8_t* out) {
  for (int plane = 0; plane < 8; ++plane) {
    for (int i = 0; i < 32; ++i) {
      out[32 * plane + i] =
          static_cast<uint8_t>(out[32 * plane + i] | (bytes[i] >> plane & 1) << place);
    }
  }
}

// The values of 4-bit codes in iq4_nl and iq4_xs, plus 128.
inline constexpr std::array<uint8_t, 16> kIq4Values = {1,   24,  45,  63,  79,  93,  106, 118,
                                                       129, 141, 153, 166, 181, 197, 217, 241};

// Unpacks as unpack_nibbles<16> does, with the values of the codes.
inline void unpack_iq4(const uint8_t* bytes, uint8_t* out) {
  for (int i = 0; i < 16; ++i) {
    out[i] = kIq4Values[bytes[i] & 15];
    out[16 + i] = kIq4Values[bytes[i] >> 4];
  }
}

// ---- 32 elements, one scale ---------------------------------------------------------------------

// q8_0: [d f16][32 signed bytes]
struct BlockQ8_0 {
  static constexpr DType kDType = DType::q8_0;
  static constexpr int kSize = 32;
  static constexpr int kZero = 128;
  static constexpr bool kHasMin = false;
  Half d;
  uint8_t qs[32];
  void quants(uint8_t* out) const {
    for (int i = 0; i < 32; ++i) out[i] = qs[i] ^ 0x80;
  }
};

// q4_0: [d f16][16 bytes: byte i holds element i below, element 16 + i above]
struct BlockQ4_0 {
  static constexpr DType kDType = DType::q4_0;
  static constexpr int kSize = 32;
  static constexpr int kZero = 8;
  static constexpr bool kHasMin = false;
  Half d;
  uint8_t qs[16];
  void quants(uint8_t* out) const { unpack_nibbles<16>(qs, out); }
};

// q4_1: [d f16][m f16][16 bytes as q4_0]
struct BlockQ4_1 {
  static constexpr DType kDType = DType::q4_1;
  static constexpr int kSize = 32;
  static constexpr int kZero = 0;
  static constexpr bool kHasMin = true;
  Half d;
  Half m;
  uint8_t qs[16];
  void quants(uint8_t* out) const { unpack_nibbles<16>(qs, out); }
};

// The fifth bits of 32 quants: bit i of a little-endian dword belongs to element i. Eight at a
// time: the byte is repeated, each copy keeps its own bit, and adding 0x7f carries any bit into the
// top.
inline void add_fifth_bits(const uint8_t* qh, uint8_t* out) {
  for (int i = 0; i < 4; ++i) {
    const uint64_t copies = qh[i] * 0x0101010101010101u & 0x8040201008040201u;
    const uint64_t fifth = (copies + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
    uint64_t low;
    std::memcpy(&low, out + 8 * i, sizeof low);
    low |= fifth;
    std::memcpy(out + 8 * i, &low, sizeof low);
  }
}

// q5_0: [d f16][32 fifth bits][16 bytes as q4_0]
struct BlockQ5_0 {
  static constexpr DType kDType = DType::q5_0;
  static constexpr int kSize = 32;
  static constexpr int kZero = 16;
  static constexpr bool kHasMin = false;
  Half d;
  uint8_t qh[4];
  uint8_t qs[16];
  void quants(uint8_t* out) const {
    unpack_nibbles<16>(qs, out);
    add_fifth_bits(qh, out);
  }
};

// q5_1: [d f16][m f16][32 fifth bits][16 bytes as q4_0]
struct BlockQ5_1 {
  static constexpr DType kDType = DType::q5_1;
  static constexpr int kSize = 32;
  static constexpr int kZero = 0;
  static constexpr bool kHasMin = true;
  Half d;
  Half m;
  uint8_t qh[4];
  uint8_t qs[16];
  void quants(uint8_t* out) const {
    unpack_nibbles<16>(qs, out);
    add_fifth_bits(qh, out);
  }
};

// iq4_nl: as q4_0, the codes index a table of 16 values
struct BlockIq4Nl {
  static constexpr DType kDType = DType::iq4_nl;
  static constexpr int kSize = 32;
  static constexpr int kZero = 128;
  static constexpr bool kHasMin = false;
  Half d;
  uint8_t qs[16];
  void quants(uint8_t* out) const { unpack_iq4(qs, out); }
};

// ---- 256 elements, a scale a sub-block ----------------------------------------------------------

// q2_k: [16 bytes: scale below, min above][64 bytes of quants][d f16][dmin f16]
// Byte 32c + i of the quants holds elements 128c + i, +32, +64, +96, from the low bits up.
struct BlockQ2K {
  static constexpr DType kDType = DType::q2_k;
  static constexpr int kSize = 256;
  static constexpr int kSubBlock = 16;
  static constexpr int kZero = 0;
  static constexpr bool kHasMin = true;
  uint8_t scales[16];
  uint8_t qs[64];
  Half d;
  Half dmin;
  int sub_scale(int j) const { return scales[j] & 15; }
  int sub_min(int j) const { return scales[j] >> 4; }
  void quants(uint8_t* out) const {
    unpack_pairs(qs, out);
    unpack_pairs(qs + 32, out + 128);
  }
};

// q3_k: [32 bytes of third bits][64 bytes of low bits as q2_k][12 bytes: 16 scales of 6 bits][d
// f16] Bit p of third-bit byte i belongs to element 32p + i. Scale j, biased by 32: its low nibble
// is in byte j % 8 (below for j < 8, above for the rest), its high pair in byte 8 + j % 4 at 2 (j /
// 4).
struct BlockQ3K {
  static constexpr DType kDType = DType::q3_k;
  static constexpr int kSize = 256;
  static constexpr int kSubBlock = 16;
  static constexpr int kZero = 4;
  static constexpr bool kHasMin = false;
  uint8_t hmask[32];
  uint8_t qs[64];
  uint8_t scales[12];
  Half d;
  int sub_scale(int j) const {
    const int low = scales[j % 8] >> 4 * (j / 8) & 15;
    const int high = scales[8 + j % 4] >> 2 * (j / 4) & 3;
    return (low | high << 4) - 32;
  }
  void quants(uint8_t* out) const {
    unpack_pairs(qs, out);
    unpack_pairs(qs + 32, out + 128);
    add_bit_planes(hmask, 2, out);
  }
};

// The 8 scales and 8 minima of q4_k and q5_k, 6 bits each in 12 bytes:
//   bytes 0..3   scale 0..3 in bits 0..5, the top two bits of scale 4..7 in bits 6..7
//   bytes 4..7   min 0..3 in bits 0..5, the top two bits of min 4..7 in bits 6..7
//   bytes 8..11  the low nibbles of scale 4..7 (below) and of min 4..7 (above)
struct ScalesK {
  uint8_t bytes[12];
  int scale(int j) const {
    return j < 4 ? bytes[j] & 63 : (bytes[4 + j] & 15) | (bytes[j - 4] >> 6) << 4;
  }
  int min(int j) const {
    return j < 4 ? bytes[4 + j] & 63 : bytes[4 + j] >> 4 | (bytes[j] >> 6) << 4;
  }
};

// q4_k: [d f16][dmin f16][12 bytes of scales][128 bytes of quants]
// Byte 32c + i of the quants holds element 64c + i below, element 64c + 32 + i above.
struct BlockQ4K {
  static constexpr DType kDType = DType::q4_k;
  static constexpr int kSize = 256;
  static constexpr int kSubBlock = 32;
  static constexpr int kZero = 0;
  static constexpr bool kHasMin = true;
  Half d;
  Half dmin;
  ScalesK scales;
  uint8_t qs[128];
  int sub_scale(int j) const { return scales.scale(j); }
  int sub_min(int j) const { return scales.min(j); }
  void quants(uint8_t* out) const {
    for (int c = 0; c < 4; ++c) unpack_nibbles<32>(qs + 32 * c, out + 64 * c);
  }
};

// q5_k: [d f16][dmin f16][12 bytes of scales][32 bytes of fifth bits][128 bytes as q4_k]
// Bit p of fifth-bit byte i belongs to element 32p + i.
struct BlockQ5K {
  static constexpr DType kDType = DType::q5_k;
  static constexpr int kSize = 256;
  static constexpr int kSubBlock = 32;
  static constexpr int kZero = 0;
  static constexpr bool kHasMin = true;
  Half d;
  Half dmin;
  ScalesK scales;
  uint8_t qh[32];
  uint8_t qs[128];
  int sub_scale(int j) const { return scales.scale(j); }
  int sub_min(int j) const { return scales.min(j); }
  void quants(uint8_t* out) const {
    for (int c = 0; c < 4; ++c) unpack_nibbles<32>(qs + 32 * c, out + 64 * c);
    add_bit_planes(qh, 4, out);
  }
};

// q6_k: [128 bytes of low nibbles][64 bytes of high pairs][16 scales int8][d f16]
// Low byte 64c + i holds element 128c + i below, element 128c + 64 + i above; the high pairs lie as
// the quants of q2_k.
struct BlockQ6K {
  static constexpr DType kDType = DType::q6_k;
  static constexpr int kSize = 256;
  static constexpr int kSubBlock = 16;
  static constexpr int kZero = 32;
  static constexpr bool kHasMin = false;
  uint8_t ql[128];
  uint8_t qh[64];
  int8_t scales[16];
  Half d;
  int sub_scale(int j) const { return scales[j]; }
  void quants(uint8_t* out) const {
    uint8_t high[128];
    for (int c = 0; c < 2; ++c) {
      unpack_nibbles<64>(ql + 64 * c, out + 128 * c);
      unpack_pairs(qh + 32 * c, high);
      for (int i = 0; i < 128; ++i) {
        out[128 * c + i] = static_cast<uint8_t>(out[128 * c + i] | high[i] << 4);
      }
    }
  }
};

// iq4_xs: [d f16][8 high pairs of the scales, u16][8 low nibbles of the scales][128 bytes of codes]
// Scale j is biased by 32. Each 16 bytes of codes are a sub-block as in iq4_nl.
struct BlockIq4Xs {
  static constexpr DType kDType = DType::iq4_xs;
  static constexpr int kSize = 256;
  static constexpr int kSubBlock = 32;
  static constexpr int kZero = 128;
  static constexpr bool kHasMin = false;
  Half d;
  uint8_t scales_high[2];
  uint8_t scales_low[4];
  uint8_t qs[128];
  int sub_scale(int j) const {
    const int low = scales_low[j / 2] >> 4 * (j % 2) & 15;
    const int high = scales_high[j / 4] >> 2 * (j % 4) & 3;
    return (low | high << 4) - 32;
  }
  void quants(uint8_t* out) const {
    for (int c = 0; c < 8; ++c) unpack_iq4(qs + 16 * c, out + 32 * c);
  }
};

// tq1_0: [48 bytes][4 bytes][d f16], ternary digits, five to a byte (four in the last 4 bytes). A
// byte is ceil(digits * 256 / 243): multiplied by 3^n mod 256 it has digit n on top, and a further
// factor of 3 carries that digit into bits 8..9.
//   bytes 0..31   digit n of byte i: element 32n + i
//   bytes 32..47  digit n of byte 32 + i: element 160 + 16n + i
//   bytes 48..51  digit n of byte 48 + i: element 240 + 4n + i
struct BlockTq1_0 {
  static constexpr DType kDType = DType::tq1_0;
  static constexpr int kSize = 256;
  static constexpr int kSubBlock = 256;
  static constexpr int kZero = 1;
  static constexpr bool kHasMin = false;
  uint8_t qs[52];
  Half d;
  int sub_scale(int) const { return 1; }
  void quants(uint8_t* out) const {
    unpack_digits<32, 5>(qs, out);
    unpack_digits<16, 5>(qs + 32, out + 160);
    unpack_digits<4, 4>(qs + 48, out + 240);
  }

 private:
  template <int bytes, int digits>
  static void unpack_digits(const uint8_t* in, uint8_t* out) {
    uint8_t power = 1;
    for (int n = 0; n < digits; ++n) {
      for (int i = 0; i < bytes; ++i) {
        const uint8_t shifted = static_cast<uint8_t>(in[i] * power);
        out[bytes * n + i] = static_cast<uint8_t>(shifted * 3 >> 8);
      }
      power = static_cast<uint8_t>(power * 3);
    }
  }
};

// tq2_0: [64 bytes of quants as q2_k][d f16]
struct BlockTq2_0 {
  static constexpr DType kDType = DType::tq2_0;
  static constexpr int kSize = 256;
  static constexpr int kSubBlock = 256;
  static constexpr int kZero = 1;
  static constexpr bool kHasMin = false;
  uint8_t qs[64];
  Half d;
  int sub_scale(int) const { return 1; }
  void quants(uint8_t* out) const {
    unpack_pairs(qs, out);
    unpack_pairs(qs + 32, out + 128);
  }
};

// i2_s: [32 bytes], two bits an element, the first field on top. No scale a block: one float32 d
// for all blocks lies behind the last one, in 32 bytes whose rest is padding.
//   byte i   element i in bits 6..7, 32 + i in 4..5, 64 + i in 2..3, 96 + i in 0..1
// Source: ggml-bitnet-mad.cpp of bitnet.cpp, the order of its x86 builds.
struct BlockI2S {
  static constexpr DType kDType = DType::i2_s;
  static constexpr int kSize = 128;
  static constexpr int kZero = 1;
  static constexpr bool kHasMin = false;
  uint8_t qs[32];
  void quants(uint8_t* out) const {
    for (int field = 0; field < 4; ++field) {
      for (int i = 0; i < 32; ++i) out[32 * field + i] = qs[i] >> (6 - 2 * field) & 3;
    }
  }
};

// The scale of an i2_s tensor of `count` elements.
inline float i2_s_scale(const void* blocks, int64_t count) {
  float scale;
  std::memcpy(&scale, static_cast<const uint8_t*>(blocks) + count / 4, sizeof scale);
  return scale;
}

static_assert(sizeof(BlockQ8_0) == 34 && sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20);
static_assert(sizeof(BlockQ5_0) == 22 && sizeof(BlockQ5_1) == 24 && sizeof(BlockIq4Nl) == 18);
static_assert(sizeof(BlockQ2K) == 84 && sizeof(BlockQ3K) == 110 && sizeof(BlockQ4K) == 144);
static_assert(sizeof(BlockQ5K) == 176 && sizeof(BlockQ6K) == 210 && sizeof(BlockIq4Xs) == 136);
static_assert(sizeof(BlockTq1_0) == 54 && sizeof(BlockTq2_0) == 66);
static_assert(sizeof(BlockI2S) == 32);

// Whether a block type has sub-blocks, that is the second formula above.
template <class Block>
inline constexpr bool kHasSubBlocks = requires { Block::kSubBlock; };

// Calls body(std::type_identity<BlockX>()) for the block type of a quantised dtype and returns what
// it returns. Throws InvalidArgument for a dtype without blocks, and for i2_s, whose blocks have no
// scale.
template <class Body>
auto with_block_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::q8_0:
      return body(std::type_identity<BlockQ8_0>());
    case DType::q4_0:
      return body(std::type_identity<BlockQ4_0>());
    case DType::q4_1:
      return body(std::type_identity<BlockQ4_1>());
    case DType::q5_0:
      return body(std::type_identity<BlockQ5_0>());
    case DType::q5_1:
      return body(std::type_identity<BlockQ5_1>());
    case DType::iq4_nl:
      return body(std::type_identity<BlockIq4Nl>());
    case DType::q2_k:
      return body(std::type_identity<BlockQ2K>());
    case DType::q3_k:
      return body(std::type_identity<BlockQ3K>());
    case DType::q4_k:
      return body(std::type_identity<BlockQ4K>());
    case DType::q5_k:
      return body(std::type_identity<BlockQ5K>());
    case DType::q6_k:
      return body(std::type_identity<BlockQ6K>());
    case DType::iq4_xs:
      return body(std::type_identity<BlockIq4Xs>());
    case DType::tq1_0:
      return body(std::type_identity<BlockTq1_0>());
    case DType::tq2_0:
      return body(std::type_identity<BlockTq2_0>());
    default:
      throw InvalidArgument("[gguf] dtype: expected a block-quantised type, got " +
                            std::string(name(dtype)));
  }
}

}  // namespace effinfer::gguf
