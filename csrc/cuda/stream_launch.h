// The kernels of bodies/stream_block.h by the format of their weights. They take long to compile,
// so four files share them.
#pragma once

#include <algorithm>
#include <string>

#include "cuda/bodies/stream_block.h"
#include "cuda/bodies/stream_formats.h"
#include "cuda/bodies/stream_pair.h"
#include "cuda/entry.h"
#include "cuda/register.h"
#include "effinfer/error.h"

namespace effinfer::cuda {

// Launches the kernel of `format` with the fewest tiles that hold all tokens, or with 4 for each 32
// of them, or for as many as the GPU's shared memory allows. All have the same bits.
void launch_u4(const ops::PackedFormat& format, StreamParams& params, Queue& queue);
void launch_u5_u6(const ops::PackedFormat& format, StreamParams& params, Queue& queue);
void launch_u8_dense(const ops::PackedFormat& format, StreamParams& params, Queue& queue);

// Both weights of a GLU, of any two of the formats.
void launch_pair(PairParams& params, Queue& queue);

inline int most_places(const Queue& queue) {
  return has_bulk_copies(queue) ? kBulkPlaces : kMostPlaces;
}

// Of a block's shared memory. In a round each slice or every other one is multiplied.
template <class Kernel>
int64_t bytes_of(int places, int warps, int slices, int tokens) {
  return warps * Kernel::warp_bytes(places, tokens) +
         std::max(1, slices / Kernel::kSlotRounds) * Kernel::slice_bytes(places, tokens);
}

// The places, of which one is multiplied, with which a block of so many warps and slices has at most
// `bytes` of shared memory: as many as there may be, of bulk copies all of them; less than two are
// none.
template <class Kernel>
int places_within(int64_t bytes, int warps, int slices, int tokens, const Queue& queue) {
  const int least = has_bulk_copies(queue) ? kBulkPlaces : 2;
  for (int places = most_places(queue); places >= least; --places) {
    if (bytes_of<Kernel>(places, warps, slices, tokens) <= bytes) return places;
  }
  return 0;
}

// Launches it with so many slots a block, or says that the GPU has too little shared memory for so
// many tokens. A multiprocessor is to hold 16 warps, but 8 of two rounds.
template <class Kernel>
bool launch_stream(StreamParams& params, int slots, int tokens, Queue& queue) {
  const int64_t most = shared_bytes_of(queue);
  const int warps = slots / Kernel::kSlotRounds;
  const int together = kMostSlots / slots;  // blocks; the system takes 1 KB beside each
  int slices = 1;
  int64_t blocks = 0;
  for (StreamPart& part : params.parts) {
    slices = std::max(slices, 1 << part.slice_bits);
    part.blocks = static_cast<int32_t>(blocks_for(part.units, slots >> part.slice_bits));
    blocks += part.blocks;
  }
  const int64_t bytes = (most + 1024) / together - 1024;
  params.places = places_within<Kernel>(bytes, warps, slices, tokens, queue);
  if (params.places == 0) return false;
  params.slots = slots;
  params.block_tokens = tokens;
  params.token_blocks = static_cast<int32_t>(blocks_for(params.tokens, tokens));
  params.warp_bytes = Kernel::warp_bytes(params.places, tokens);
  params.token_bytes = Kernel::slice_bytes(params.places, tokens);
  launch<Kernel>(params, blocks * params.token_blocks, queue,
                 static_cast<size_t>(bytes_of<Kernel>(params.places, warps, slices, tokens)),
                 warps * kWarp);
  return true;
}

// Blocks of few warps are spread evenly over a GPU, those of many share what comes of more tokens. Of
// four tiles, and where 16 warps have no room, they have 8 of two rounds.
template <ops::PackedFormat kFormat>
void launch_format(StreamParams& params, Queue& queue) {
  int slots = kLeastSlots;
  for (const StreamPart& part : params.parts) slots = std::max(slots, 1 << part.slice_bits);
  const int tokens = params.tokens;
  if (tokens <= kTileTokens) {
    if (launch_stream<StreamMatmul<kFormat, 1, 16>>(params, slots, tokens, queue)) return;
  } else if (tokens <= 2 * kTileTokens) {
    if (launch_stream<StreamMatmul<kFormat, 2, 16>>(params, kMostSlots, tokens, queue)) return;
  }
  for (int most = 4 * kTileTokens; most >= kTileTokens; most /= 2) {
    using Kernel = StreamMatmul<kFormat, 4, 8, 2>;
    if (launch_stream<Kernel>(params, kMostSlots, std::min(tokens, most), queue)) return;
  }
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
