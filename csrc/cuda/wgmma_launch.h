// The kernels of bodies/wgmma_matmul.h by the format of their weights. They take long to compile,
// so some files share them.
#pragma once

#include <cstddef>

#include "cuda/bodies/stream_formats.h"
#include "cuda/bodies/wgmma_matmul.h"
#include "cuda/entry.h"
#include "cuda/register.h"
#include "cuda/tensor_map.h"
#include "cuda/tile_launch.h"

namespace effinfer::cuda {

// As multiply_tiled(), on a GPU of compute capability 9.0.
void multiply_wgmma(const ops::MatmulProblem& problem, const MatmulParts& takes, Queue& queue);

void launch_wgmma_u4(const ops::PackedFormat& format, const ops::Operand& x, const TileParams& tile,
                     Queue& queue);
void launch_wgmma_u5_u6(const ops::PackedFormat& format, const ops::Operand& x,
                        const TileParams& tile, Queue& queue);
void launch_wgmma_u8_dense(const ops::PackedFormat& format, const ops::Operand& x,
                           const TileParams& tile, Queue& queue);

template <class Kernel>
int64_t wgmma_row_blocks(const TileParams& tile) {
  int64_t blocks = 0;
  for (const TilePart& part : tile.parts) blocks += blocks_for(part.units, Kernel::kUnits);
  return blocks;
}

template <class Kernel>
void launch_wgmma_tile(const ops::Operand& x, const TileParams& tile, Queue& queue) {
  WgmmaParams params;
  params.tile = tile;
  params.tile.token_blocks = static_cast<int32_t>(blocks_for(tile.tokens, Kernel::kTokens));
  params.tile.row_blocks = static_cast<int32_t>(wgmma_row_blocks<Kernel>(tile));
  params.x = tensor_map({x.data, x.rows, ops::padded_cols(x.cols), x.row_bytes(), Kernel::kTokens,
                         static_cast<int>(ops::kSuperblock), Swizzle::bytes128},
                        queue);
  launch<Kernel>(params, int64_t{params.tile.token_blocks} * params.tile.row_blocks, queue);
}

// Half as many tokens keep more multiprocessors busy where there are few tiles. Both give the same
// bits.
template <ops::PackedFormat kFormat>
void launch_wgmma_format(const ops::Operand& x, const TileParams& tile, Queue& queue) {
  using Small = WgmmaMatmul<kFormat, 128>;
  using Large = WgmmaMatmul<kFormat, 256>;
  static_assert(Small::kUnits == Large::kUnits);
  const int64_t row_blocks = wgmma_row_blocks<Large>(tile);
  const auto turns = [&](int tokens) {
    return blocks_for(row_blocks * blocks_for(tile.tokens, tokens), num_multiprocessors(queue));
  };
  // A small tile takes about three quarters of the time: as many weights are unpacked.
  if (3 * turns(Small::kTokens) < 4 * turns(Large::kTokens)) {
    launch_wgmma_tile<Small>(x, tile, queue);
  } else {
    launch_wgmma_tile<Large>(x, tile, queue);
  }
}

// Compiles the formats of `kBits`.
template <ops::QuantBits... kBits>
void launch_wgmma_formats(const ops::PackedFormat& format, const ops::Operand& x,
                          const TileParams& tile, Queue& queue) {
  with_stream_format(format, [&]<ops::PackedFormat kFormat>() {
    if constexpr (((kFormat.bits == kBits) || ...)) launch_wgmma_format<kFormat>(x, tile, queue);
  });
}

}  // namespace effinfer::cuda
