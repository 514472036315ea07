// What the decoding kernel does with a tile's results: folds them into those of the chunks before,
// or stores them for whoever merges them (bodies/attention_merge.h).
#pragma once

#include <cstdint>

#include "cuda/bodies/attention_output.h"
#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

// Where a partial result has dim `dim`. Of each 16 two neighbouring lanes have eight: each of their
// stores is of four, and the two lanes' lie side by side, for memory takes 32 bytes at once.
EFFINFER_DEVICE int place_of_partial(int dim) {
  return dim / 16 * 16 + dim % 8 / 4 * 8 + dim % 16 / 8 * 4 + dim % 4;
}

// Eight dims from `dim` on of the partial result that begins at `to`.
EFFINFER_DEVICE void store_partial_eight(float* to, int dim, const float (&of_row)[8]) {
  to += place_of_partial(dim);
  EFFINFER_UNROLL
  for (int d = 0; d < 8; d += 4) {
    *reinterpret_cast<Quad*>(to + d * 2) = {bits_of(of_row[d]), bits_of(of_row[d + 1]),
                                            bits_of(of_row[d + 2]), bits_of(of_row[d + 3])};
  }
}

// Of warps that have 32 dims each.
template <int kWarps>
class AttentionResult {
 public:
  EFFINFER_DEVICE AttentionResult(const AttentionParams& params, const ops::AttentionTile& tile)
      : p_(params.p), out_(params, tile), dims_(params.p.v.dims) {}

  EFFINFER_DEVICE int num_rows() const { return out_.num_rows(); }

  template <class Unit>
  EFFINFER_DEVICE static void fold(Unit& unit, RowState (&rows)[2], LaneValues& values,
                                   const RowState (&chunk_rows)[2], LaneValues& chunk_values) {
    const Factors factors[2] = {fold_row(unit, rows[0], chunk_rows[0]),
                                fold_row(unit, rows[1], chunk_rows[1])};
    fold_values(values, chunk_values, factors);
  }

  // Of the chunk whose first row's partial result is number `first`.
  template <class Unit>
  EFFINFER_DEVICE void store_partial(Unit& unit, int64_t first, const RowState (&rows)[2],
                                     LaneValues& values) const {
    EFFINFER_NO_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (!has(unit, r)) continue;
      const int64_t index = first + row_of(unit, r);
      if (dim_of(unit) < dims_) store_partial_values(unit, index * dims_, r, values);
      if (tells_row(unit))
        AttentionOutput::store_partial_state(p_, index, r == 0 ? rows[0] : rows[1]);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void store(Unit& unit, const RowState (&rows)[2], LaneValues& values) const {
    EFFINFER_NO_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (!has(unit, r)) continue;
      const RowState row = r == 0 ? rows[0] : rows[1];
      const float factor = out_.end_row(unit, row_of(unit, r), row, tells_row(unit));
      if (dim_of(unit) >= dims_) continue;
      const int step = dims_ < 32 * kWarps ? dims_ : 32 * kWarps;
      float of_row[8];
      row_values(values, r, of_row);
      out_.store_values(unit, row_of(unit, r), dim_of(unit), factor, of_row, step);
    }
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE void store_partial_values(Unit& unit, int64_t first, int r,
                                            LaneValues& values) const {
    float of_row[8];
    row_values(values, r, of_row);
    store_partial_eight(p_.partial_out + first, dim_of(unit), of_row);
  }

  template <class Unit>
  EFFINFER_DEVICE static int row_of(Unit& unit, int r) {
    return unit.lane / 4 + 8 * r;
  }
  template <class Unit>
  EFFINFER_DEVICE static int dim_of(Unit& unit) {
    return 32 * unit.warp + unit.lane % 4 * 8;
  }
  // Whose lanes have what is one of a row.
  template <class Unit>
  EFFINFER_DEVICE static bool tells_row(Unit& unit) {
    return unit.warp == 0 && unit.lane % 4 == 0;
  }
  template <class Unit>
  EFFINFER_DEVICE bool has(Unit& unit, int r) const {
    return row_of(unit, r) < num_rows();
  }

  const ops::AttentionProblem& p_;
  const AttentionOutput out_;
  const int dims_;
};

}  // namespace effinfer::cuda
