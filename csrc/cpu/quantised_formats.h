// The formats of packed weights whose quants are whole numbers of some bits (ops/packed_weight.h).
#pragma once

#include "ops/packed_weight.h"

namespace effinfer::cpu {

// Calls body.template operator()<format>() with the format as a constant.
template <class Body>
[[gnu::always_inline]] inline void with_quantised_format(const ops::PackedFormat& format,
                                                         Body&& body) {
  using enum ops::QuantBits;
  using enum ops::ScaleKind;
  using Format = ops::PackedFormat;
  if (format.scales == direct) {
    if (format.bits == u8) return body.template operator()<Format{u8, direct, false, 32, 128}>();
    if (format.bits == u5) {
      if (format.has_min) return body.template operator()<Format{u5, direct, true, 32, 0}>();
      return body.template operator()<Format{u5, direct, false, 32, 16}>();
    }
    if (format.has_min) return body.template operator()<Format{u4, direct, true, 32, 0}>();
    return body.template operator()<Format{u4, direct, false, 32, 8}>();
  }
  if (format.bits == u8) return body.template operator()<Format{u8, super, false, 32, 128}>();
  if (format.bits == u6) return body.template operator()<Format{u6, super, false, 16, 32}>();
  if (format.bits == u5) return body.template operator()<Format{u5, super, true, 32, 0}>();
  if (format.sub_block == 16) {
    if (format.has_min) return body.template operator()<Format{u4, super, true, 16, 0}>();
    return body.template operator()<Format{u4, super, false, 16, 4}>();
  }
  if (format.has_min) return body.template operator()<Format{u4, super, true, 32, 0}>();
  return body.template operator()<Format{u4, super, false, 32, 1}>();
}

// Whether the list above has `format`.
[[gnu::always_inline]] inline bool is_quantised_format(const ops::PackedFormat& format) {
  bool found = false;
  if (format.scales == ops::ScaleKind::dense) return found;
  with_quantised_format(format, [&]<ops::PackedFormat known>() { found = known == format; });
  return found;
}

}  // namespace effinfer::cpu
