// What the prefill kernel does with the results of a tile's chunks: folds them into those that came
// before, or stores them for whoever ends the tile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/bodies/attention_chunks.h"
#include "cuda/bodies/attention_output.h"
#include "cuda/bodies/fragments.h"
#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

// Of a warp's 16 rows and kColumns of 32 dims: kHeld in registers, others in shared memory, where
// each lane has its own.
template <int kColumns, int kWarps, int kHeld>
class PrefillResult {
 public:
  static constexpr bool kShares = kColumns > kHeld;
  using Column = Quad[4][kWarp];
  struct Shared {
    std::conditional_t<kShares, Column[kWarps * (kColumns - kHeld) + !kShares], char> values;
    int32_t num_rows;     // of the tile
    int32_t partial;      // of the item
    int32_t first_chunk;  // of the item
  };

  template <class Unit>
  EFFINFER_DEVICE PrefillResult(Unit& unit, const AttentionParams& params, Shared& shared)
      : params_(params),
        dims_(params.p.v.dims),
        shared_(shared),
        first_row_(unit.warp * kTileRows + unit.lane / 4) {
    EFFINFER_UNROLL
    for (int column = kHeld; column < kColumns; ++column) {
      LaneValues zeros = {};
      put(unit, column, zeros);
    }
  }

  // By one thread, for all: what is looked up in each chunk.
  EFFINFER_DEVICE static void begin_item(const ops::AttentionItem& item,
                                         const ops::AttentionTile& tile, Shared& shared) {
    shared.num_rows = tile.num_rows * tile.num_heads;
    shared.partial = item.partial;
    shared.first_chunk = item.first_unit / kChunkUnits;
  }

  EFFINFER_DEVICE int num_rows() const { return shared_.num_rows; }
  // Whether chunks are stored for others.
  EFFINFER_DEVICE bool is_partial() const { return shared_.partial >= 0; }

  // Of what the chunk's columns are added to, one after the other.
  template <class Unit>
  EFFINFER_DEVICE void begin_chunk(Unit& unit, int32_t chunk, const RowState (&rows)[2]) {
    if (shared_.partial < 0) {
      EFFINFER_UNROLL
      for (int r = 0; r < 2; ++r) factors_[r] = fold_row(unit, rows_[r], rows[r]);
      return;
    }
    partial_ = shared_.partial + (chunk - shared_.first_chunk) * num_rows() + first_row_;
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (!has(r) || unit.lane % 4 != 0) continue;
      AttentionOutput::store_partial_state(params_.p, partial_ + 8 * r, rows[r]);
    }
  }
  // `kShared`: to a column from kHeld on.
  template <bool kShared, class Unit>
  EFFINFER_DEVICE void add(Unit& unit, int column, LaneValues& products) {
    if (partial_ >= 0) {
      EFFINFER_NO_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (!has(r) || dim_of(unit, column) >= dims_) continue;
        float of_row[8];
        row_values(products, r, of_row);
        AttentionOutput::store_partial_values(params_.p, partial_ + 8 * r, dim_of(unit, column),
                                              of_row);
      }
    } else if constexpr (!kShared) {
      fold_values(values_[column], products, factors_);
    } else {
      LaneValues values;
      get(unit, column, values);
      fold_values(values, products, factors_);
      put(unit, column, values);
    }
  }

  // All that was added.
  template <class Unit>
  EFFINFER_DEVICE void store(Unit& unit, const ops::AttentionTile& tile) {
    const AttentionOutput out(params_, tile);
    float factor[2];
    set_factors(unit, out, rows_, factor, true);
    EFFINFER_NO_UNROLL
    for (int column = 0; column < kColumns; ++column) {
      LaneValues values;
      if (column < kHeld) {
        take_held(values);
      } else {
        get(unit, column, values);
      }
      store_column(unit, out, column, factor, values);
    }
  }
  // All partial results of the tile, from left to right.
  template <class Unit>
  EFFINFER_DEVICE void merge(Unit& unit, const ops::AttentionTile& tile,
                             const ops::AttentionMerge& merge) {
    const AttentionOutput out(params_, tile);
    EFFINFER_NO_UNROLL
    for (int column = 0; column < kColumns && dim_of(unit, column) < dims_; ++column) {
      RowState rows[2];
      LaneValues values = {};
      for (int first = 0; first < merge.num_partials; first += kAhead) {
        fold_partials(unit, merge, first, column, rows, values);
      }
      float factor[2];
      set_factors(unit, out, rows, factor, column == 0);
      store_column(unit, out, column, factor, values);
    }
  }

 private:
  static constexpr int kAhead = 4;  // partial results that are loaded at once

  template <class Unit>
  EFFINFER_DEVICE static int dim_of(Unit& unit, int column) {
    return column * kBlock + unit.lane % 4 * 8;
  }
  EFFINFER_DEVICE bool has(int r) const { return first_row_ + 8 * r < num_rows(); }

  EFFINFER_DEVICE void take_held(LaneValues& values) {
    if constexpr (kHeld > 0) take_first(values_, values);
  }

  // Columns that are not held.
  template <class Unit>
  EFFINFER_DEVICE void get(Unit& unit, int column, LaneValues& values) const {
    if constexpr (kShares) {
      const Column& place = shared_.values[unit.warp * (kColumns - kHeld) + column - kHeld];
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        const Quad quad = place[i][unit.lane];
        EFFINFER_UNROLL
        for (int r = 0; r < 4; ++r) values[i][r] = float_of(quad.words[r]);
      }
    }
  }
  template <class Unit>
  EFFINFER_DEVICE void put(Unit& unit, int column, const LaneValues& values) const {
    if constexpr (kShares) {
      Column& place = shared_.values[unit.warp * (kColumns - kHeld) + column - kHeld];
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        place[i][unit.lane] = {bits_of(values[i][0]), bits_of(values[i][1]), bits_of(values[i][2]),
                               bits_of(values[i][3])};
      }
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void set_factors(Unit& unit, const AttentionOutput& out,
                                   const RowState (&rows)[2], float (&factor)[2],
                                   bool stores_lse) const {
    factor[0] = factor[1] = 0.0f;
    EFFINFER_NO_UNROLL
    for (int r = 0; r < 2; ++r) {
      factor[0] = factor[1];
      if (!has(r)) continue;
      const RowState row = r == 0 ? rows[0] : rows[1];
      factor[1] = out.end_row(unit, first_row_ + 8 * r, row, stores_lse && unit.lane % 4 == 0);
    }
  }
  template <class Unit>
  EFFINFER_DEVICE void store_column(Unit& unit, const AttentionOutput& out, int column,
                                    const float (&factor)[2], LaneValues& values) const {
    const int dim = dim_of(unit, column);
    const int step = dims_ < kBlock * kColumns ? dims_ : kBlock * kColumns;
    EFFINFER_NO_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (!has(r) || dim >= dims_) continue;
      float of_row[8];
      row_values(values, r, of_row);
      out.store_values(unit, first_row_ + 8 * r, dim, r == 0 ? factor[0] : factor[1], of_row, step);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void fold_partials(Unit& unit, const ops::AttentionMerge& merge, int first,
                                     int column, RowState (&rows)[2], LaneValues& values) const {
    EFFINFER_NO_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (has(r)) {
        const int64_t index = merge.first_partial + first_row_ + 8 * r;
        fold_row_partials(unit, index, first, merge.num_partials, dim_of(unit, column), rows[0],
                          values);
      }
      swap_rows(rows, values);  // twice
    }
  }

  // Partial results from `first` on of the row whose first one is number `index`, into the first
  // row of `values`.
  template <class Unit>
  EFFINFER_DEVICE void fold_row_partials(Unit& unit, int64_t index, int first, int count, int dim,
                                         RowState& row, LaneValues& values) const {
    RowState state[kAhead];
    float chunk[kAhead][8];
    EFFINFER_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const int at = first + i < count ? first + i : count - 1;
      const int64_t partial = index + int64_t{at} * num_rows();
      state[i] = AttentionOutput::load_partial_state(params_.p, partial);
      AttentionOutput::load_partial_values(unit, params_.p, partial, dim, chunk[i]);
    }
    EFFINFER_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= count) break;
      const Factors factors = fold_row(unit, row, state[i]);
      EFFINFER_UNROLL
      for (int d = 0; d < 8; ++d) {
        float& value = value_at(values, d, 0);
        value = fold_value(value, chunk[i][d], factors);
      }
    }
  }

  const AttentionParams& params_;
  const int dims_;
  Shared& shared_;
  const int first_row_;   // the lane's; the other one is 8 on
  int32_t partial_ = -1;  // of the lane's first row and the chunk; -1: results are folded
  Factors factors_[2];    // of the chunk
  RowState rows_[2];      // of the chunks before
  LaneValues values_[kHeld] = {};
};

}  // namespace effinfer::cuda
