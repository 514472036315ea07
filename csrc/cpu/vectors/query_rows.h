// Query rows on their way into the products: widened, scaled, and as pairs of bfloat16 where lines
// are multiplied as such.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/vectors/attention_math.h"
#include "cpu/vectors/row_vectors.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// Bytes of an element of queries and results.
constexpr int64_t float_bytes(DType dtype) {
  return dtype == DType::f32 ? 4 : 2;
}

// Query and result rows are a head's part of a token's, so the hardware does not foresee them.
constexpr int64_t kRowsAhead = 8;

template <int kWrite>
[[gnu::always_inline]] inline void prefetch_row(const uint8_t* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, kWrite, 3);
}

// Tile rows [first, first + count) of a task's `queries` to q[count][dim]; `wide` is for one row.
template <class Kv>
void load_queries(const AttentionTask& task, const ops::QueryRows& queries, int64_t first,
                  int64_t count, int64_t dim, float* wide, float* q) {
  using V = typename Kv::V;
  const auto widen = [&](const ops::QueryRows& rows, int64_t row, float* to) {
    const auto at = [&](int64_t i) {
      const int64_t element =
          i / task.num_heads * rows.row_stride + i % task.num_heads * rows.head_stride;
      return rows.data + element * float_bytes(rows.dtype);
    };
    if (row + kRowsAhead < first + count) {
      prefetch_row<0>(at(row + kRowsAhead), rows.dims * float_bytes(rows.dtype));
    }
    with_float_type(rows.dtype, [&]<class T>() {
      const auto* from = reinterpret_cast<const T*>(at(row));
      for_vectors(rows.dims, [&](int64_t d, auto&& load, auto&&) { load(from + d).store(to + d); });
    });
  };
  const V scale = V::set(task.q_scale);
  for (int64_t row = 0; row < count; ++row) {
    widen(queries, first + row, wide);
    if (task.q_rope.dims > 0) widen(task.q_rope, first + row, wide + queries.dims);
    for (int64_t d = 0; d < dim; d += 16) {
      AttentionMath<Kv>::store_factor(V::load(wide + d) * scale, q + row * dim, d);
    }
  }
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
