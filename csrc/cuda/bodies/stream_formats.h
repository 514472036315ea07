// The formats that the kernels of stream_matmul.h multiply.
#pragma once

#include <array>
#include <utility>

#include "cuda/bodies/dequant.h"

namespace effinfer::cuda {

// What packed_format() of ops/packed_weight.h makes of files' types, but float32 and those for
// int8_token operands.
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

// Calls body.template operator()<format>() with the format as a constant, if it is one of these.
template <class Body>
constexpr void with_stream_format(const ops::PackedFormat& format, Body&& body) {
  [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
    (..., [&] {
      constexpr ops::PackedFormat kFormat = kStreamFormats[kIndices];
      if (format == kFormat) body.template operator()<kFormat>();
    }());
  }(std::make_index_sequence<kStreamFormats.size()>());
}

}  // namespace effinfer::cuda
