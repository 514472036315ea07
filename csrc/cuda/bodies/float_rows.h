// Rows of any float type, or int8, as a caller has them, on their way to products in float32: 32
// numbers of some rows at a time, as floats in shared memory; where keys and values lie.
#pragma once

#include <cstdint>

#include "cuda/bodies/any_float.h"
#include "cuda/bodies/plain_rows.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

inline constexpr int kPiece = kWarp;   // numbers of a row at once: a warp reads as much of a row
using FloatPiece = float[kPiece + 1];  // the same number of 32 rows lies in as many banks

EFFINFER_DEVICE int bytes_of(DType dtype) {
  if (dtype == DType::f32) return 4;
  return dtype == DType::f16 || dtype == DType::bf16 ? 2 : 1;
}

// Numbers [begin, begin + kPiece) of `kRows` rows, by `kWarps` warps; zeros behind `dims` numbers
// and where a row is null. Four loads of a lane are under way at once.
template <int kRows, int kWarps, class Unit>
EFFINFER_DEVICE void fetch_piece(Unit& unit, DType dtype, int begin, int dims,
                                 FloatPiece (&to)[kRows], const uint8_t* const* rows) {
  constexpr int kAtOnce = 4;
  static_assert(kRows % (kWarps * kAtOnce) == 0);
  const int bytes = bytes_of(dtype);
  const int at = begin + unit.lane;
  EFFINFER_NO_UNROLL
  for (int first = unit.warp; first < kRows; first += kWarps * kAtOnce) {
    uint32_t bits[kAtOnce] = {};
    EFFINFER_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const uint8_t* row = rows[first + i * kWarps];
      if (row == nullptr || at >= dims) continue;
      row += at * bytes;
      if (bytes == 4) {
        bits[i] = unit.load(reinterpret_cast<const uint32_t*>(row));
      } else if (bytes == 2) {
        bits[i] = unit.load(reinterpret_cast<const uint16_t*>(row));
      } else {
        bits[i] = unit.load(row);
      }
    }
    EFFINFER_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      to[first + i * kWarps][unit.lane] =
          bytes == 4 ? float_of(bits[i]) : float_of_bits(unit, dtype, bits[i]);
    }
  }
}

// Where some tokens' rows lie, null where there is no such token, and their scales.
template <int kTokens>
struct FloatTokens {
  const uint8_t* row[kTokens];
  float scale[kTokens];

  // Those of a unit, from token `begin` on: a warp has looked them up.
  template <class Unit>
  EFFINFER_DEVICE void store(Unit& unit, const ops::KvRows& rows, int kv_head, int begin,
                             const TokenPlaces& places) {
    float scales[2] = {1.0f, 1.0f};
    PlainRows<64>::find_scales(unit, rows, kv_head, places, scales);
    EFFINFER_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int at = begin + half * kWarp + unit.lane;
      const bool found = places.page[half] >= 0;
      row[at] = found ? rows.data + kv_head * rows.head_stride +
                            places.page[half] * rows.page_stride +
                            places.slot[half] * rows.token_stride
                      : nullptr;
      scale[at] = scales[half];
    }
  }
};

// Of a query in one head.
EFFINFER_DEVICE const uint8_t* query_at(const ops::QueryRows& q, int64_t row, int64_t head) {
  return q.data + (row * q.row_stride + head * q.head_stride) * bytes_of(q.dtype);
}

}  // namespace effinfer::cuda
