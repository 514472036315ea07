// The kernels of bodies/stream_block.h by the format of their weights. They take long to compile,
// so three files share them.
#pragma once

#include <array>
#include <utility>

#include "cuda/bodies/stream_block.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {

// The formats of files that have such a kernel (packed_format() of ops/packed_weight.h).
inline constexpr auto kStreamFormats = [] {
  using enum ops::QuantBits;
  using enum ops::ScaleKind;
  return std::to_array<ops::PackedFormat>({
      {u4, direct, false, 32, 8},
      {u4, direct, true, 32, 0},
      {u4, super, true, 32, 0},
      {u4, super, true, 16, 0},
      {u4, super, false, 16, 4},
      {u4, super, false, 32, 1},
      {u5, direct, false, 32, 16},
      {u5, direct, true, 32, 0},
      {u5, super, true, 32, 0},
      {u6, super, false, 16, 32},
      {u8, direct, false, 32, 128},
      {u8, super, false, 32, 128},
      kDenseBf16,
      kDenseF16,
  });
}();

// Launches the kernel of `format` with the fewest tiles that hold all tokens, or with 4 for each 32
// of them.
void launch_u4(const ops::PackedFormat& format, StreamParams& params, Queue& queue);
void launch_u5_u6(const ops::PackedFormat& format, StreamParams& params, Queue& queue);
void launch_u8_dense(const ops::PackedFormat& format, StreamParams& params, Queue& queue);

template <class Kernel>
void launch_stream(StreamParams& params, int64_t blocks, Queue& queue) {
  params.token_blocks = static_cast<int32_t>(blocks_for(params.tokens, Kernel::kTokens));
  launch<Kernel>(params, blocks * params.token_blocks, queue);
}

// Two blocks of the kernel of one tile share a multiprocessor, unless there are so few that each
// has one to itself: then more registers hold weights on their way.
template <ops::PackedFormat kFormat>
void launch_format(StreamParams& params, Queue& queue) {
  constexpr int64_t kFewBlocks = 160;
  int64_t blocks = 0;
  for (const StreamPart& part : params.parts) blocks += part.blocks;
  if (params.tokens > 2 * kTileTokens) {
    launch_stream<StreamMatmul<kFormat, 4, 32, 1>>(params, blocks, queue);
  } else if (params.tokens > kTileTokens) {
    launch_stream<StreamMatmul<kFormat, 2, 40, 1>>(params, blocks, queue);
  } else if (blocks > kFewBlocks) {
    launch_stream<StreamMatmul<kFormat, 1, 40, 2>>(params, blocks, queue);
  } else {
    launch_stream<StreamMatmul<kFormat, 1, 96, 1>>(params, blocks, queue);
  }
}

// Compiles the formats of `kBits`.
template <ops::QuantBits... kBits>
void launch_formats(const ops::PackedFormat& format, StreamParams& params, Queue& queue) {
  const auto offer = [&]<size_t kIndex>() {
    constexpr ops::PackedFormat kFormat = kStreamFormats[kIndex];
    if constexpr (((kFormat.bits == kBits) || ...)) {
      if (format == kFormat) launch_format<kFormat>(params, queue);
    }
  };
  [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
    (offer.template operator()<kIndices>(), ...);
  }(std::make_index_sequence<kStreamFormats.size()>());
}

}  // namespace effinfer::cuda
