// Launches of bodies/wgmma_matmul.h by the format of weights: for the files that compile them.
#pragma once

#include "cuda/bodies/stream_formats.h"
#include "cuda/bodies/wgmma_matmul.h"
#include "cuda/entry.h"
#include "cuda/register.h"
#include "cuda/tensor_map.h"
#include "cuda/wgmma_launch.h"

namespace effinfer::cuda {

// Blocks of a tile of tokens.
template <class Kernel>
int64_t wgmma_blocks(const WgmmaParams& params) {
  int64_t row_blocks = 0;
  for (const WgmmaPart& part : params.parts) row_blocks += blocks_for(part.units, Kernel::kWarps);
  return row_blocks * blocks_for(params.tokens, Kernel::kTokens);
}

template <class Kernel>
void launch_wgmma(const ops::Operand& x, WgmmaParams& params, Queue& queue) {
  static_assert(sizeof(typename Kernel::Shared) <= kWgmmaSharedBytes);
  const int64_t blocks = wgmma_blocks<Kernel>(params);
  params.token_blocks = static_cast<int32_t>(blocks_for(params.tokens, Kernel::kTokens));
  params.row_blocks = static_cast<int32_t>(blocks / params.token_blocks);
  params.x = tensor_map({x.data, x.rows, ops::padded_cols(x.cols), x.row_bytes(), Kernel::kTokens,
                         static_cast<int>(ops::kSuperblock), Swizzle::bytes128},
                        queue);
  launch<Kernel>(params, blocks, queue);
}

// Tiles of 64 tokens unpack weights twice as often, and keep more multiprocessors busy where there
// are few. Both give the same bits.
template <ops::PackedFormat kFormat>
void launch_wgmma_format(const ops::Operand& x, WgmmaParams& params, Queue& queue) {
  using Small = WgmmaMatmul<kFormat, 64>;
  using Large = WgmmaMatmul<kFormat, 128>;
  const int64_t at_once = num_multiprocessors(queue);
  const int64_t small = blocks_for(wgmma_blocks<Small>(params), at_once) * 3;
  const int64_t large = blocks_for(wgmma_blocks<Large>(params), at_once) * 4;
  if (small < large) return launch_wgmma<Small>(x, params, queue);
  launch_wgmma<Large>(x, params, queue);
}

// Compiles the formats of `kBits`.
template <ops::QuantBits... kBits>
void launch_wgmma_formats(const ops::PackedFormat& format, const ops::Operand& x,
                          WgmmaParams& params, Queue& queue) {
  with_stream_format(format, [&]<ops::PackedFormat kFormat>() {
    if constexpr (((kFormat.bits == kBits) || ...)) launch_wgmma_format<kFormat>(x, params, queue);
  });
}

}  // namespace effinfer::cuda
