// What the decoding kernel does with a tile's results: stores them for whoever ends the tile, or
// merges them.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/attention_output.h"
#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

// Of 32 partial results of each row: what is multiplied, and the row with it.
struct MergeFactors {
  Factors factors[kWarp][kTileRows];
  RowState rows[kWarp][kTileRows];  // the maximum so far, the chunk's own sum
};

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
      float of_row[8];
      row_values(values, r, of_row);
      if (dim_of(unit) < dims_) {
        AttentionOutput::store_partial_values(p_, index, dim_of(unit), of_row);
      }
      if (tells_row(unit))
        AttentionOutput::store_partial_state(p_, index, r == 0 ? rows[0] : rows[1]);
    }
  }

  // All partial results of the tile, from left to right, by whole blocks. What they are multiplied
  // by depends on the rows' maxima alone, so a warp's lanes make the factors of 32 of them at once.
  template <class Unit>
  EFFINFER_DEVICE void merge(Unit& unit, const ops::AttentionMerge& merge,
                             MergeFactors& shared) const {
    RowState rows[2];
    LaneValues values = {};
    float highest[kTileRows / kWarps];  // of the warp's rows, so far
    EFFINFER_UNROLL
    for (float& max : highest) max = kNoScore;
    EFFINFER_NO_UNROLL
    for (int first = 0; first < merge.num_partials; first += kWarp) {
      const int left = merge.num_partials - first;
      const int64_t index = merge.first_partial + int64_t{first} * num_rows();
      EFFINFER_NO_UNROLL
      for (int i = 0; i < kTileRows / kWarps; ++i) {
        set_factors(unit, index, left, unit.warp * (kTileRows / kWarps) + i, highest[0], shared);
        turn(highest);
      }
      unit.sync();
      fold_partials(unit, index, left < kWarp ? left : kWarp, shared, rows, values);
      unit.sync();
    }
    store(unit, rows, values);
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

  // Of 32 partial results of a row, of which `left` are there, behind others of that maximum.
  template <class Unit>
  EFFINFER_DEVICE void set_factors(Unit& unit, int64_t index, int left, int row, float& highest,
                                   MergeFactors& shared) const {
    RowState own;
    if (unit.lane < left && row < num_rows()) {
      own = AttentionOutput::load_partial_state(p_, index + int64_t{unit.lane} * num_rows() + row);
    }
    float max = fmaxf(own.max, highest);  // up to and with the lane's own
    EFFINFER_UNROLL
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const float lower = unit.shfl(max, (unit.lane - distance) & (kWarp - 1));
      if (unit.lane >= distance) max = fmaxf(max, lower);
    }
    const float lower = unit.shfl(max, (unit.lane - 1) & (kWarp - 1));
    const RowState before = {unit.lane == 0 ? highest : lower, 0.0f};
    shared.factors[unit.lane][row] = factors_of(unit, before, own);
    shared.rows[unit.lane][row] = {max, own.sum};
    highest = unit.shfl(max, kWarp - 1);
  }

  template <class Unit>
  EFFINFER_DEVICE void fold_partials(Unit& unit, int64_t index, int count,
                                     const MergeFactors& shared, RowState (&rows)[2],
                                     LaneValues& values) const {
    EFFINFER_NO_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (has(unit, r))
        fold_row_partials(unit, index, count, row_of(unit, r), shared, rows[0], values);
      swap_rows(rows, values);  // twice
    }
  }

  // Those of row `row`, into the first row of `values`.
  template <class Unit>
  EFFINFER_DEVICE void fold_row_partials(Unit& unit, int64_t index, int count, int row,
                                         const MergeFactors& shared, RowState& sum,
                                         LaneValues& values) const {
    constexpr int kAhead = 8;  // partial results that are loaded at once
    const int dim = dim_of(unit) < dims_ ? dim_of(unit) : 0;
    EFFINFER_NO_UNROLL
    for (int first = 0; first < count; first += kAhead) {
      float chunk[kAhead][8];
      EFFINFER_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        const int at = first + i < count ? first + i : count - 1;
        AttentionOutput::load_partial_values(unit, p_, index + int64_t{at} * num_rows() + row, dim,
                                             chunk[i]);
      }
      EFFINFER_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= count) break;
        const Factors factors = shared.factors[first + i][row];
        const RowState state = shared.rows[first + i][row];
        sum.max = state.max;
        sum.sum = fold_value(sum.sum, state.sum, factors);
        EFFINFER_UNROLL
        for (int d = 0; d < 8; ++d) {
          float& value = value_at(values, d, 0);
          value = fold_value(value, chunk[i][d], factors);
        }
      }
    }
  }

  const ops::AttentionProblem& p_;
  const AttentionOutput out_;
  const int dims_;
};

}  // namespace effinfer::cuda
