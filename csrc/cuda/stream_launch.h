// The kernels of bodies/stream_block.h by the format of their weights. They take long to compile,
// so four files share them.
#pragma once

#include <algorithm>
#include <bit>
#include <string>

#include "cuda/bodies/stream_block.h"
#include "cuda/bodies/stream_formats.h"
#include "cuda/bodies/stream_pair.h"
#include "cuda/entry.h"
#include "cuda/register.h"
#include "cuda/tensor_map.h"
#include "effinfer/error.h"

namespace effinfer::cuda {

// Launches the kernel of `format` with the fewest tiles that hold all tokens, or with the most that
// there are for as many of them as the GPU's shared memory allows. All have the same bits.
void launch_u4(const ops::PackedFormat& format, StreamParams& params, Queue& queue);
void launch_u5_u6(const ops::PackedFormat& format, StreamParams& params, Queue& queue);
void launch_u8_dense(const ops::PackedFormat& format, StreamParams& params, Queue& queue);

// Both weights of a GLU, of any two of the formats.
void launch_pair(PairParams& params, Queue& queue);

// What a block is to have.
struct StreamBlock {
  int warps;
  int slices;
  int tokens;
  bool in_boxes;  // which tokens come in
  int run_bits;   // log2 of the slices of a warp
  int64_t bytes;  // of shared memory
};

// Boxes are aligned as whatever copy_tile() takes.
constexpr int64_t tokens_at(int64_t warps, int64_t warp_bytes) {
  return blocks_for(warps * warp_bytes, 1024) * 1024;
}

// Of shared memory. In a round each slice or every other one is multiplied.
template <class Kernel>
int64_t bytes_of(const FeedShape& shape, const StreamBlock& block) {
  return tokens_at(block.warps, Kernel::warp_bytes(shape, block.tokens, block.run_bits)) +
         std::max(1, block.slices / Kernel::kSlotRounds >> block.run_bits) *
             Kernel::token_bytes(shape, block.tokens, block.in_boxes);
}

// Boxes of a piece's k and all of a kernel's tokens.
inline TensorMap token_map(const StreamParams& params, const PieceLayout& piece, int box_tokens,
                           Queue& queue) {
  return tensor_map({params.x, params.tokens, int64_t{params.superblocks} * ops::kSuperblock,
                     params.x_row_bytes, box_tokens, piece.steps * 16, box_swizzle(piece.steps)},
                    queue);
}

// The first that fits: few large places cost fewer instructions. (An H100 takes 13.5, 14.8 and 17.6
// us for 33 MB of Q4_0 with places of four, two pieces and one.) Copies that are counted are better
// far ahead.
template <class Kernel>
FeedShape feed_shape(const StreamBlock& block, int superblocks, const Queue& queue) {
  const auto fits = [&](const FeedShape& shape) {
    return bytes_of<Kernel>(shape, block) <= block.bytes &&
           // A slice that is followed by another one ends with a place.
           (block.run_bits == 0 || superblocks / block.slices % shape.hold() == 0);
  };
  if (has_bulk_copies(queue)) {
    for (int hold_bits = 2; hold_bits >= 0; --hold_bits) {
      const FeedShape shape = {kBulkPlaces, hold_bits};
      if (fits(shape)) return shape;
    }
    return {};
  }
  for (int places = kMostPlaces; places >= 2; --places) {
    if (fits({places, 0})) return {places, 0};
  }
  return {};
}

// Blocks of 16 warps, of one a unit, that are more than multiprocessors take two rounds, the second
// with a few of these. So warps have two slices in a row of one token then, and two blocks are
// held.
inline int run_bits_of(const StreamParams& params, int slots, int64_t blocks, Queue& queue) {
  bool one_unit = slots == kMostSlots;
  for (const StreamPart& part : params.parts) {
    one_unit &= part.units == 0 || part.slice_bits == kMostSliceBits;
  }
  const bool runs = one_unit && params.superblocks % kMostSlots == 0 && params.next.chunks == 0 &&
                    blocks > num_multiprocessors(queue);
  return runs && has_bulk_copies(queue) ? 1 : 0;
}

// Launches it with so many slots a block, or says that the GPU has too little shared memory for so
// many tokens. A multiprocessor is to hold 16 warps, but 8 of two rounds.
template <class Kernel>
bool launch_stream(StreamParams& params, int slots, int tokens, Queue& queue) {
  const bool in_boxes = has_bulk_copies(queue) && Kernel::kTokens > kTileTokens;
  StreamBlock block = {};
  block.slices = 1;
  int64_t blocks = 0;
  for (StreamPart& part : params.parts) {
    if (part.units == 0) continue;
    block.slices = std::max(block.slices, 1 << part.slice_bits);
    part.blocks = static_cast<int32_t>(blocks_for(part.units, slots >> part.slice_bits));
    blocks += part.blocks;
  }
  params.run_bits = Kernel::kTokens == 1 ? run_bits_of(params, slots, blocks, queue) : 0;
  // Blocks that are held; the system takes 1 KB beside each.
  const int together = kMostSlots / (slots >> params.run_bits);
  block.warps = slots / Kernel::kSlotRounds >> params.run_bits;
  block.tokens = tokens;
  block.in_boxes = in_boxes;
  block.run_bits = params.run_bits;
  block.bytes = (shared_bytes_of(queue) + 1024) / together - 1024;
  params.feed = feed_shape<Kernel>(block, params.superblocks, queue);
  if (params.feed.places == 0) return false;
  params.slot_bits = std::countr_zero(static_cast<unsigned>(slots));
  params.block_tokens = tokens;
  params.token_blocks = static_cast<int32_t>(blocks_for(params.tokens, tokens));
  params.warp_bytes = Kernel::warp_bytes(params.feed, tokens, params.run_bits);
  params.tokens_at = static_cast<int32_t>(tokens_at(block.warps, params.warp_bytes));
  params.token_bytes = Kernel::token_bytes(params.feed, tokens, in_boxes);
  if (in_boxes) params.x_map = token_map(params, Kernel::layout(), Kernel::kTokens, queue);
  launch<Kernel>(params, blocks * params.token_blocks, queue,
                 static_cast<size_t>(bytes_of<Kernel>(params.feed, block)), block.warps * kWarp);
  return true;
}

inline constexpr int kFewTokens = 4;

// More than a tile: as many as 16 warps have registers for.
template <ops::PackedFormat kFormat>
bool launch_hopper(StreamParams& params, int slots, Queue& queue) {
  constexpr int kMost = (stream_has_tiles(kFormat, 4, 90) ? 4 : 2) * kTileTokens;
  const int tokens = std::min(params.tokens, kMost);
  if (tokens <= 2 * kTileTokens) {
    return launch_stream<StreamMatmul<kFormat, 16, 16>>(params, slots, tokens, queue);
  }
  return launch_stream<StreamMatmul<kFormat, kMost, 16>>(params, kMostSlots, tokens, queue);
}

// Two tiles, or four that 8 warps of two rounds multiply. Where these have no room, of fewer tokens
// at a time.
template <ops::PackedFormat kFormat>
bool launch_others(StreamParams& params, Queue& queue) {
  const int tokens = params.tokens;
  if constexpr (stream_has_tiles(kFormat, 2, 80)) {
    if (tokens > kTileTokens && tokens <= 2 * kTileTokens &&
        launch_stream<StreamMatmul<kFormat, 16, 16>>(params, kMostSlots, tokens, queue)) {
      return true;
    }
  }
  for (int most = 4 * kTileTokens; most >= kTileTokens; most /= 2) {
    using Kernel = StreamMatmul<kFormat, 32, 8, 2>;
    if (launch_stream<Kernel>(params, kMostSlots, std::min(tokens, most), queue)) return true;
  }
  return false;
}

// Blocks of few warps are spread evenly over a GPU, those of many share what comes of more tokens.
// On Hopper two of 8 are better for up to 16 tokens than one of 16: while one begins or ends, the
// other multiplies. (16 of Q4_0 times 14336 x 4096 took 16.5 us on an H200 and 18.0, of Q6_K 22.5
// and 23.7; shapes of 16 slices have 16 all the same.)
template <ops::PackedFormat kFormat>
void launch_format(StreamParams& params, Queue& queue) {
  const bool is_hopper = has_bulk_copies(queue);
  const int tokens = params.tokens;
  int slots = tokens <= kFewTokens ? kLeastSlots : is_hopper ? kMostSlots / 2 : kMostSlots;
  for (const StreamPart& part : params.parts) slots = std::max(slots, 1 << part.slice_bits);
  if constexpr (kFormat.scales != ops::ScaleKind::dense) {  // which has nothing to scale
    if (tokens == 1 && launch_stream<StreamMatmul<kFormat, 1, 16>>(params, slots, tokens, queue)) {
      return;
    }
  }
  if (tokens <= kTileTokens &&
      launch_stream<StreamMatmul<kFormat, kTileTokens, 16>>(params, slots, tokens, queue)) {
    return;
  }
  if (is_hopper && launch_hopper<kFormat>(params, slots, queue)) return;
  if (!is_hopper && launch_others<kFormat>(params, queue)) return;
  throw InternalError("[matmul] no ring fits into " + std::to_string(shared_bytes_of(queue)) +
                      " bytes of shared memory");
}

// Compiles the formats of `kBits`.
template <ops::QuantBits... kBits>
void launch_formats(const ops::PackedFormat& format, StreamParams& params, Queue& queue) {
  with_stream_format(format, [&]<ops::PackedFormat kFormat>() {
    if constexpr (((kFormat.bits == kBits) || ...)) launch_format<kFormat>(params, queue);
  });
}

}  // namespace effinfer::cuda
