// What a launch of stream_block.h says: the weights, the tokens, and how a unit's k is divided.
#pragma once

#include <cstdint>

#include "cuda/bodies/matmul_epilogue.h"
#include "cuda/bodies/row_groups.h"
#include "cuda/bodies/stream_feed.h"
#include "cuda/bodies/stream_next.h"

namespace effinfer::cuda {

inline constexpr int kStreamWarps = 8;
inline constexpr int kStreamRows = 32;
using StreamRow = float[kStreamRows];  // a warp's sums of a token
inline constexpr int kMostSliceBits = 4;
inline constexpr int kMostSlots = 1 << kMostSliceBits;
inline constexpr int kLeastSlots = 4;

struct StreamPart {
  MatmulWeight weight;
  int64_t unit_bytes = 0;  // from unit to unit of a half of the lanes' groups
  int64_t half_bytes = 0;  // from the first half's group to the second's
  int32_t units = 0;
  int32_t full_units = 0;  // that have both
  int32_t slice_bits = 0;  // log2 of the slices of k
  int32_t blocks = 0;      // that share the units
};

inline StreamPart stream_part(const ops::MatmulPart& of) {
  StreamPart part;
  part.weight = matmul_weight(of);
  part.unit_bytes = 2 * part.weight.group_bytes;
  part.half_bytes = part.weight.group_bytes;
  part.units = (part.weight.groups + 1) / 2;
  part.full_units = part.weight.groups / 2;
  return part;
}
// With GLU.
inline StreamPart stream_part(const ops::MatmulPart& gate, const ops::MatmulPart& linear) {
  StreamPart part;
  part.weight = matmul_weight(gate);
  part.unit_bytes = part.weight.group_bytes;
  part.half_bytes = linear.weight.data - gate.weight.data;
  part.units = part.full_units = part.weight.groups;
  return part;
}

// Weights of one format, times all tokens. With GLU the second part is the linear one.
struct StreamParams {
  TensorMap x_map = {};  // boxes of a piece's k, where tokens come so
  const uint8_t* x = nullptr;
  int64_t x_row_bytes = 0;
  int32_t tokens = 0;
  int32_t superblocks = 0;
  int32_t token_blocks = 0;
  int32_t block_tokens = 0;  // at most, of one of them
  FeedShape feed;            // of a warp
  int32_t warp_bytes = 0;    // of shared memory
  int32_t tokens_at = 0;     // those of the first slice, behind all warps'
  int32_t token_bytes = 0;   // of a slice
  int32_t slot_bits = 0;     // log2 of a block's slots
  int32_t run_bits = 0;      // log2 of the slices in a row that a warp has, of one token
  ops::UnaryOp glu = ops::UnaryOp::none;
  int64_t header_bytes = 0;      // of a group
  int64_t header_row_bytes = 0;  // of the scales in it
  StreamPart parts[ops::kMaxMatmulParts];
  OperandOut operand;
  StreamNext next;  // with one tile of tokens
};

// log2 of the slices of k of a unit. Warps that an H100 holds at a time, 16 a multiprocessor, read
// a superblock each in about the time in which its memory delivers them, and take some more to
// begin and to end: the number of slices for which that is the least.
constexpr int stream_slice_bits(int64_t units, int64_t superblocks) {
  constexpr int64_t kWarps = 132 * 16;
  constexpr int64_t kAround = 3;  // superblocks' time
  int best = 0;
  int64_t least = INT64_MAX;
  for (int bits = 0; bits <= kMostSliceBits && superblocks >> bits != 0; ++bits) {
    const int64_t rounds = ((units << bits) + kWarps - 1) / kWarps;
    const int64_t sixteenths = superblocks << kMostSliceBits >> bits;
    const int64_t time = rounds * (sixteenths + (kAround << kMostSliceBits));
    if (time >= least) continue;
    best = bits;
    least = time;
  }
  return best;
}

}  // namespace effinfer::cuda
