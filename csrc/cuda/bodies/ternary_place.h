// Which rows and which tokens a block of ternary.h has.
#pragma once

#include <cstdint>

#include "cuda/bodies/ternary_copies.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

struct TernaryPlace {
  const MatmulWeight* part;
  int unit;  // two row groups, with GLU one of each part
  int first_token;
  int num_tokens;
};

EFFINFER_DEVICE int ternary_units(const MatmulWeight& part) {
  return (part.groups + 1) / 2;
}

template <class Unit>
EFFINFER_DEVICE TernaryPlace ternary_place(const Unit& unit, const TernaryParams& p) {
  // Divisions take as long as some loads.
  const bool divides = p.token_blocks > 1;
  const int first = divides ? unit.block % p.token_blocks * p.block_tokens : 0;
  int index = divides ? unit.block / p.token_blocks : unit.block;
  const MatmulWeight* part = p.parts;
  if (p.glu == ops::UnaryOp::none) {
    while (index >= ternary_units(*part)) index -= ternary_units(*part++);
  }
  return {part, index, first,
          p.tokens - first < p.block_tokens ? p.tokens - first : p.block_tokens};
}

// Half `half` of a unit: the second group of its part, or with GLU the group of the second part.
EFFINFER_DEVICE const uint8_t* ternary_group(const TernaryParams& p, const TernaryPlace& place,
                                             int half) {
  const bool gated = p.glu != ops::UnaryOp::none;
  const MatmulWeight& weight = gated ? p.parts[half] : *place.part;
  const int wanted = gated ? place.unit : 2 * place.unit + half;
  const int index = wanted < weight.groups ? wanted : weight.groups - 1;
  return weight.data + index * weight.group_bytes;
}

// What follows the bytes of a token: its scale, the sum of its values, that of each block.
EFFINFER_DEVICE const int32_t* ternary_tail(const TernaryParams& p, const TernaryPlace& place,
                                            int token) {
  return reinterpret_cast<const int32_t*>(p.x + (place.first_token + token) * p.x_row_bytes +
                                          p.padded);
}

}  // namespace effinfer::cuda
