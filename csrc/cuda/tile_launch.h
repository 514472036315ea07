// The kernels of bodies/tile_block.h by the format of their weights. They take long to compile, so
// some files share them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "cuda/bodies/stream_formats.h"
#include "cuda/bodies/tile_block.h"
#include "cuda/bodies/tile_rows.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {

// Which parts of a problem.
using MatmulParts = std::array<bool, ops::kMaxMatmulParts>;

// A kernel: `tokens` of a block, and 32 rows (tile_rows.h) or 256 (tile_block.h).
struct TileShape {
  int tokens = 0;
  bool wide = false;
};

// The shape that suits the tokens and the rows of parts of one format. All have the same bits.
TileShape tile_shape(const ops::MatmulProblem& problem, const MatmulParts& takes,
                     const Queue& queue);
// Multiplies these parts.
void multiply_tiled(const ops::MatmulProblem& problem, const MatmulParts& takes, TileShape shape,
                    Queue& queue);

// What all their kernels need, but x and the numbers of blocks; and the parts' format.
TileParams tile_params(const ops::MatmulProblem& problem, const MatmulParts& takes);
ops::PackedFormat tile_format(const ops::MatmulProblem& problem, const MatmulParts& takes);

void launch_tiles_u4(const ops::PackedFormat& format, const ops::Operand& x, TileParams& params,
                     TileShape shape, Queue& queue);
void launch_tiles_u5_u6(const ops::PackedFormat& format, const ops::Operand& x, TileParams& params,
                        TileShape shape, Queue& queue);
void launch_tiles_u8_dense(const ops::PackedFormat& format, const ops::Operand& x,
                           TileParams& params, TileShape shape, Queue& queue);

// Of a block of the largest kernel.
inline constexpr size_t kTileSharedBytes = 99 << 10;

template <class Kernel>
void launch_tile(const ops::Operand& x, TileParams& params, int units, Queue& queue) {
  params.x = Kernel::x_of(x);
  params.token_blocks = static_cast<int32_t>(blocks_for(params.tokens, Kernel::kTokens));
  params.row_blocks = 0;
  for (const TilePart& part : params.parts) {
    params.row_blocks += static_cast<int32_t>(blocks_for(part.units, units));
  }
  static_assert(sizeof(typename Kernel::Shared) <= kTileSharedBytes);
  launch<Kernel>(params, int64_t{params.token_blocks} * params.row_blocks, queue);
}

template <ops::PackedFormat kFormat>
void launch_tile_format(const ops::Operand& x, TileParams& params, TileShape shape, Queue& queue) {
  if (!shape.wide) {
    if (shape.tokens == 16) return launch_tile<TileRows<kFormat, 2>>(x, params, 1, queue);
    return launch_tile<TileRows<kFormat, 8>>(x, params, 1, queue);
  }
  // Float16 weights are rare: of 128 tokens they are read twice, and have no kernel of their own.
  if constexpr (kFormat.bits != ops::QuantBits::f16) {
    if (shape.tokens == 128) {
      return launch_tile<TileMatmul<kFormat, 16>>(x, params, kTileWarps, queue);
    }
  }
  launch_tile<TileMatmul<kFormat, 8>>(x, params, kTileWarps, queue);
}

// Compiles the formats of `kBits`.
template <ops::QuantBits... kBits>
void launch_tile_formats(const ops::PackedFormat& format, const ops::Operand& x, TileParams& params,
                         TileShape shape, Queue& queue) {
  with_stream_format(format, [&]<ops::PackedFormat kFormat>() {
    if constexpr (((kFormat.bits == kBits) || ...))
      launch_tile_format<kFormat>(x, params, shape, queue);
  });
}

}  // namespace effinfer::cuda
