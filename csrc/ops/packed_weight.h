// Weights in the one layout that every CPU kernel reads: packed once at load.
//
// Rows (outputs) come in groups of 16. Within a group the stream advances over k; a 64-byte *line*
// holds 16 rows x 4 bytes, and byte j of row r's dword belongs to the j-th of 4 consecutive k. So a
// line is one VNNI operand against a broadcast dword of 4 activations, half a line is one AVX2
// operand, and 16 lines are an AMX B tile.
//
// Quants of a superblock of 64 k (u4 as an example; q is unsigned, biased where the type is
// signed):
//
//            bits 0..3 of byte (r, j)      bits 4..7
//   line 0   k =  0 + j                    k = 32 + j
//   line 1   k =  4 + j                    k = 36 + j
//   ...
//   line 7   k = 28 + j                    k = 60 + j
//
//   u4  8 lines
//   u5  8 lines as u4, then 2 lines of high bits: bit b of byte (r, j) of high line h belongs to
//       "field line" f*8 + i = 8*h + b, that is k = 32*f + 4*i + j
//   u6  8 lines as u4, then 4 lines of 2-bit highs: bits 2b..2b+1 of high line h belong to field
//       line 4*h + b
//   u8  16 lines of whole bytes: line i holds k = 4*i + j
//
// Scales follow the quants they belong to:
//
//   direct  after each superblock: f16 d[2][16] (block of 32 k, row), then f16 m[2][16] if has_min.
//           w = d * (q - zero) + m          (q4_0 q4_1 q5_0 q5_1 q8_0 iq4_nl)
//   super   the group starts with a header: f16 d[K/256][16], then f16 dmin[K/256][16] if has_min,
//           padded to 64 bytes. After each superblock: sub-block scales s[64/sub][16] as int8 (sub
//           = 16 or 32 values), then mins m[64/sub][16] as uint8 if has_min, padded to 64 bytes.
//           w = (d * s) * (q - zero) - (dmin * m)
//           (q2_k q3_k q4_k q5_k q6_k iq4_xs tq1_0 tq2_0)
//   row     the group starts with a header: f32 d[16].  w = d * (q - 1)           (i2_s)
//   group   the header is f32 d[16], then i32 uniform, padded to 128 bytes; after all quants follow
//           f16 d[K/256][16], padded to 64 bytes. Where a row has one scale for all its blocks of
//           256, which is what ternary models are made of, `uniform` is 1, the header holds it and
//           nobody reads the rest.                                            (tq1_0 tq2_0)
//   dense   no scales: f32 and f16 lines hold [k][16 rows]; bf16 lines hold [k/2][16 rows][2], the
//           operand of VDPBF16PS.
//
// Ternary weights under an int8_token operand have formats of their own. A value is the digit c =
// w + 1. A block of 256 k, that is 64 dwords of activations, has L lines; a byte (r, j) of line i
// holds the digits of the dwords i, L + i, 2 L + i, ...:
//
//   t2     L = 16   c0 | c1 << 2 | c2 << 4 | c3 << 6, digit f of dword f L + i. An AND gives
//                   4^f c, which is multiplied as it is
//   t1_6   L = 13   ceil(256 / 243 (81 c0 + 27 c1 + 9 c2 + 3 c3 + c4)): with b_0 the byte and
//                   b_f+1 = 3 b_f mod 256, c_f = (3 b_f - b_f+1) / 256. That is linear, so
//                   sum(c a) = (3 sum(b_f a) - sum(b_f+1 a)) / 256 with no digit extracted.
//                   The 65th dword of a block does not exist; its digits are 0
//
// The last block has as many lines as its dwords need: L = ceil(dwords / 4) or ceil(dwords / 5).
//
// Rows are padded to 16 and k to 64 with zero weights. Packing is exact: unpacking gives back the
// file's dequantised values bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "effinfer/dtype.h"
#include "effinfer/tensor.h"
#include "effinfer/threads.h"

namespace effinfer::ops {

// The version of everything above: raise it when the packed bytes of any type change, so that
// packed weights that lie on disk are not misread.
inline constexpr uint32_t kPackedLayoutVersion = 2;

inline constexpr int64_t kGroupRows = 16;
inline constexpr int64_t kSuperblock = 64;
inline constexpr int64_t kHeaderBlock = 256;  // values under one scale of a super group's header
inline constexpr int64_t kTernaryBlock = 256;

enum class QuantBits : uint8_t { u4, u5, u6, u8, f16, bf16, f32, t2, t1_6 };
enum class ScaleKind : uint8_t { dense, direct, super, row, group };

// How ternary types are packed: t2 and t1_6 serve int8_token operands, `u4` all others. i2_s has
// only the first two, and is t2 in place of u4.
enum class TernaryForm : uint8_t { u4, t2, t1_6 };

[[gnu::always_inline]] inline constexpr bool is_ternary(DType dtype) {
  return dtype == DType::tq1_0 || dtype == DType::tq2_0 || dtype == DType::i2_s;
}

struct PackedFormat {
  QuantBits bits = QuantBits::f32;
  ScaleKind scales = ScaleKind::dense;
  bool has_min = false;
  uint8_t sub_block = 32;  // values under one scale: 32, or 16 for q2_k, q3_k, q6_k
  uint8_t zero = 0;        // subtracted from q: 8 q4_0, 16 q5_0, 32 q6_k, 128 signed bytes, ...

  bool operator==(const PackedFormat&) const = default;
};

// How a file type is packed; every weight dtype of the readers has one. Throws InvalidArgument for
// a ternary form of a dtype that is not ternary.
PackedFormat packed_format(DType dtype, TernaryForm form = TernaryForm::u4);

[[gnu::always_inline]] inline constexpr bool is_ternary(const PackedFormat& format) {
  return format.bits == QuantBits::t2 || format.bits == QuantBits::t1_6;
}

// Lines of a ternary block of `dwords` dwords of activations.
[[gnu::always_inline]] inline constexpr int64_t ternary_lines(QuantBits bits, int64_t dwords) {
  return bits == QuantBits::t2 ? (dwords + 3) / 4 : (dwords + 4) / 5;
}

// Bytes of the quants of a ternary group, and of what follows them.
[[gnu::always_inline]] inline constexpr int64_t ternary_quant_bytes(QuantBits bits, int64_t cols) {
  const int64_t dwords = (cols + kSuperblock - 1) / kSuperblock * kSuperblock / 4;
  constexpr int64_t kDwords = kTernaryBlock / 4;
  const int64_t lines =
      dwords / kDwords * ternary_lines(bits, kDwords) + ternary_lines(bits, dwords % kDwords);
  return lines * kGroupRows * 4;
}
[[gnu::always_inline]] inline constexpr int64_t ternary_tail_bytes(ScaleKind scales, int64_t cols) {
  const int64_t bytes = (cols + kTernaryBlock - 1) / kTernaryBlock * kGroupRows * 2;
  return scales == ScaleKind::group ? (bytes + 63) / 64 * 64 : 0;
}

// Bytes of the quants of one superblock of a group, or of its lines if dense. Not for ternary ones.
[[gnu::always_inline]] inline constexpr int64_t quant_bytes(QuantBits bits) {
  constexpr int64_t kBitsPerValue[] = {4, 5, 6, 8, 16, 16, 32};
  return kGroupRows * kSuperblock * kBitsPerValue[static_cast<int>(bits)] / 8;
}

// Where the parts of a quantised superblock lie: quants, scales, minima.
[[gnu::always_inline]] inline constexpr int64_t min_offset(const PackedFormat& format) {
  return quant_bytes(format.bits) + (format.scales == ScaleKind::direct
                                         ? kSuperblock / 32 * kGroupRows * 2
                                         : kSuperblock / format.sub_block * kGroupRows);
}

// Bytes between consecutive superblocks of a group.
[[gnu::always_inline]] inline constexpr int64_t superblock_bytes(const PackedFormat& format) {
  const int64_t quants = quant_bytes(format.bits);
  if (format.scales == ScaleKind::dense) return quants;
  const int64_t scales = (min_offset(format) - quants) * (format.has_min ? 2 : 1);
  return quants + (scales + 63) / 64 * 64;
}

// Bytes of one row of a super group's header (the scales, or the minima), and of all of it.
[[gnu::always_inline]] inline constexpr int64_t header_row_bytes(int64_t cols) {
  return (cols + kHeaderBlock - 1) / kHeaderBlock * kGroupRows * 2;
}
[[gnu::always_inline]] inline constexpr int64_t header_bytes(const PackedFormat& format,
                                                             int64_t cols) {
  if (format.scales == ScaleKind::row) return 64;
  if (format.scales == ScaleKind::group) return 128;
  if (format.scales != ScaleKind::super) return 0;
  return (header_row_bytes(cols) * (format.has_min ? 2 : 1) + 63) / 64 * 64;
}

// Bytes between consecutive row groups, a multiple of 64.
inline constexpr int64_t packed_group_bytes(const PackedFormat& format, int64_t cols) {
  if (is_ternary(format)) {
    return header_bytes(format, cols) + ternary_quant_bytes(format.bits, cols) +
           ternary_tail_bytes(format.scales, cols);
  }
  return header_bytes(format, cols) +
         (cols + kSuperblock - 1) / kSuperblock * superblock_bytes(format);
}

// A packed matrix [rows, cols]: POD, points into memory that someone else owns.
struct PackedWeight {
  PackedFormat format;
  DType source = DType::f32;  // the file's type, for explain()
  int64_t rows = 0;           // outputs N
  int64_t cols = 0;           // inputs K
  int64_t group_bytes = 0;
  const uint8_t* data = nullptr;  // 64-byte aligned

  int64_t groups() const { return (rows + kGroupRows - 1) / kGroupRows; }
  const uint8_t* group(int64_t index) const { return data + index * group_bytes; }
  size_t num_bytes() const { return static_cast<size_t>(groups() * group_bytes); }
};

// Owns the bytes of a PackedWeight (64-byte aligned, huge pages where the system gives them).
struct PackedBuffer {
  PackedWeight view;
  std::shared_ptr<void> storage;
};

// Packs a [rows, cols] tensor of any weight dtype, in parallel. Throws InvalidArgument on a bad
// shape or dtype and where a ternary form finds a fourth code, OutOfMemory.
PackedBuffer pack(const TensorView& weight, ThreadPool& pool, TernaryForm form = TernaryForm::u4);

// What pack() would make of a tensor, without data. Throws as pack().
PackedWeight packed_shape(const TensorView& weight, TernaryForm form = TernaryForm::u4);

// Called when bytes [begin, end) of a tensor have been read for the last time, from any thread.
using SourceDone = std::function<void(size_t begin, size_t end)>;

// Packs into `out`: packed_shape(weight).num_bytes() bytes, 64-byte aligned. Goes through the
// source in slices, so that a caller who drops their pages never holds a large tensor twice. On a
// machine of several NUMA nodes each thread fills one contiguous range of rows, whose pages then
// lie on its node; elsewhere rows are claimed, which balances better.
void pack_into(const TensorView& weight, ThreadPool& pool, uint8_t* out, const SourceDone& done,
               TernaryForm form = TernaryForm::u4);

// The 16 rows of one group back as floats, [16][cols]: the values of the file, bit for bit.
void unpack_group(const PackedWeight& weight, int64_t group, float* out);

// One row back as floats, [cols], with the same bits.
void unpack_row(const PackedWeight& weight, int64_t row, float* out);

std::string to_string(const PackedFormat& format);

}  // namespace effinfer::ops
