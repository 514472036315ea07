// The kernels of bodies/tile_block.h by the format of their weights. They take long to compile, so
// some files share them.
#pragma once

#include <algorithm>
#include <cstddef>

#include "cuda/bodies/stream_formats.h"
#include "cuda/bodies/tile_block.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {

// Multiplies with the tile of tokens that suits the numbers of tokens and rows.
void launch_tiles(const ops::PackedFormat& format, TileParams& params, Queue& queue);

void launch_tiles_u4(const ops::PackedFormat& format, TileParams& params, Queue& queue);
void launch_tiles_u5_u6(const ops::PackedFormat& format, TileParams& params, Queue& queue);
void launch_tiles_u8_dense(const ops::PackedFormat& format, TileParams& params, Queue& queue);

// Of a block of the largest kernel.
inline constexpr size_t kTileSharedBytes = (64 << 10) + 128;

template <class Kernel, int kUnits>
void launch_tile(TileParams& params, Queue& queue) {
  params.token_blocks = static_cast<int32_t>(blocks_for(params.tokens, Kernel::kTokens));
  params.row_blocks = 0;
  for (const TilePart& part : params.parts) {
    params.row_blocks += static_cast<int32_t>(blocks_for(part.units, kUnits));
  }
  static_assert(sizeof(typename Kernel::Shared) <= kTileSharedBytes);
  launch<Kernel>(params, int64_t{params.token_blocks} * params.row_blocks, queue);
}

template <ops::PackedFormat kFormat>
void launch_tile_format(TileParams& params, Queue& queue) {
  if (params.tokens <= 64) {
    launch_tile<TileMatmul<kFormat, 8, 2>, kTileWarps>(params, queue);
  } else {
    launch_tile<TileMatmul<kFormat, 16, 1>, kTileWarps>(params, queue);
  }
}

// Compiles the formats of `kBits`.
template <ops::QuantBits... kBits>
void launch_tile_formats(const ops::PackedFormat& format, TileParams& params, Queue& queue) {
  with_stream_format(format, [&]<ops::PackedFormat kFormat>() {
    if constexpr (((kFormat.bits == kBits) || ...)) launch_tile_format<kFormat>(params, queue);
  });
}

}  // namespace effinfer::cuda
