// What a warp of wgmma_attention.h does with the sums of a segment: folds them into those that came
// before, which lie in shared memory, each lane's own; stores them for bodies/attention_merge.h,
// where an item has but a part of its tile's keys; or ends the tile's rows with them. Items of one
// segment, as those of most lists, go from registers to their rows.
#pragma once

#include <cstdint>

#include "cuda/bodies/attention_output.h"
#include "cuda/bodies/attention_result.h"
#include "cuda/bodies/fragments.h"
#include "cuda/bodies/seen_words.h"
#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

// What segments are looked up by.
struct ResultItem {
  int32_t num_rows;       // of the tile
  int32_t partial;        // of the item; -1: it has all of the tile's keys
  int32_t first_segment;  // of the item
};
EFFINFER_DEVICE ResultItem result_item_of(const ops::AttentionItem& item,
                                          const ops::AttentionTile& tile) {
  return {tile.num_rows * tile.num_heads, item.partial, item.first_unit / ops::kSegmentUnits};
}

template <int kColumns, int kWarps>
class WgmmaResult {
 public:
  using Values = LaneValues[kColumns];
  struct Shared {
    Quad values[kWarps][kColumns][4][kWarp];
  };

  template <class Unit>
  EFFINFER_DEVICE WgmmaResult(Unit& unit, const AttentionParams& params, Shared& shared)
      : params_(params), shared_(shared) {
    begin(unit);
  }

  // Of an item.
  template <class Unit>
  EFFINFER_DEVICE void begin(Unit& unit) {
    const RowState nothing[2];
    keep(unit, nothing);
  }

  // A segment, whose values are zeros then. What follows it before segment `end` has no values:
  // partial results have a place for it all the same.
  template <class Unit>
  EFFINFER_DEVICE void add(Unit& unit, const ResultItem& item, int segment, int end,
                           const RowState (&rows)[2], Values& values) {
    Factors factors[2];
    RowState folded[2];
    fold_rows(unit, rows, folded, factors);
    keep(unit, folded);
    EFFINFER_UNROLL
    for (int column = 0; column < kColumns; ++column) {
      if (item.partial >= 0) {
        store_partial(unit, item, segment, column, values[column]);
      } else {
        add_folded(unit, segment > item.first_segment, column, factors, values[column]);
        put(unit, column, values[column]);
      }
      clear(values[column]);
    }
    if (item.partial >= 0) store_states(unit, item, segment, end, rows);
  }

  // All that was added, and the last segment. The values are zeros then.
  template <class Unit>
  EFFINFER_DEVICE void finish(Unit& unit, const ResultItem& item, const ops::AttentionTile& tile,
                              int segment, int end, const RowState (&rows)[2], Values& values) {
    if (item.partial >= 0) {
      store_states(unit, item, segment, end, rows);
      EFFINFER_NO_UNROLL
      for (int column = 0; column < kColumns; ++column) {
        LaneValues sums;
        take_first(values, sums);
        store_partial(unit, item, segment, column, sums);
      }
    } else {
      end_rows(unit, item, tile, segment > item.first_segment, rows, values);
    }
    EFFINFER_UNROLL
    for (int column = 0; column < kColumns; ++column) clear(values[column]);
  }

 private:
  // Of an item that has all of its tile's keys. Items of few steps have little else: no value
  // moves, as a loop would have it, whose registers have no index.
  template <class Unit>
  EFFINFER_DEVICE void end_rows(Unit& unit, const ResultItem& item, const ops::AttentionTile& tile,
                                bool has_folded, const RowState (&rows)[2], Values& values) {
    const AttentionOutput out(params_, tile);
    Factors factors[2];
    RowState folded[2];
    float factor[2] = {};
    AttentionOutput::Place places[2] = {};
    fold_rows(unit, rows, folded, factors);
    set_places(unit, item, out, folded, factor, places);
    const bool has_row[2] = {has(unit, item, 0), has(unit, item, 1)};
    EFFINFER_UNROLL
    for (int column = 0; column < kColumns; ++column) {
      add_folded(unit, has_folded, column, factors, values[column]);
      EFFINFER_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (!has_row[r]) continue;
        float of_row[8];
        row_values(values[column], r, of_row);
        out.store_eight(unit, places[r], dim_of(unit, column), factor[r], of_row);
      }
    }
    EFFINFER_NO_UNROLL
    for (int column = 0; column < kColumns; ++column) {
      EFFINFER_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (!has_row[r] || places[r].operand == nullptr) continue;
        out.store_pads(unit, places[r], dim_of(unit, column), kColumns * kBlock);
      }
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static int dim_of(Unit& unit, int column) {
    return column * kBlock + unit.lane % 4 * 8;
  }
  // The lane's.
  template <class Unit>
  EFFINFER_DEVICE static int row_of(Unit& unit, int r) {
    return unit.warp * kTileRows + unit.lane / 4 + 8 * r;
  }
  template <class Unit>
  EFFINFER_DEVICE static bool has(Unit& unit, const ResultItem& item, int r) {
    return row_of(unit, r) < item.num_rows;
  }

  // The two rows of four lanes: each of these has one of their numbers.
  template <class Unit>
  EFFINFER_DEVICE void keep(Unit& unit, const RowState (&rows)[2]) {
    const RowState row = (unit.lane & 2) == 0 ? rows[0] : rows[1];
    kept_ = (unit.lane & 1) == 0 ? row.max : row.sum;
  }
  template <class Unit>
  EFFINFER_DEVICE void fold_rows(Unit& unit, const RowState (&rows)[2], RowState (&folded)[2],
                                 Factors (&factors)[2]) const {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int first = (unit.lane & ~3) + 2 * r;
      folded[r] = {unit.shfl(kept_, first), unit.shfl(kept_, first + 1)};
      factors[r] = fold_row(unit, folded[r], rows[r]);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void set_places(Unit& unit, const ResultItem& item, const AttentionOutput& out,
                                  const RowState (&rows)[2], float (&factor)[2],
                                  AttentionOutput::Place (&places)[2]) const {
    EFFINFER_NO_UNROLL
    for (int r = 0; r < 2; ++r) {
      factor[0] = factor[1];
      places[0] = places[1];
      if (!has(unit, item, r)) continue;
      const AttentionOutput::Row row = out.row_at(row_of(unit, r));
      const RowState state = r == 0 ? rows[0] : rows[1];
      factor[1] = out.end_row(unit, row, state, unit.lane % 4 == 0);
      places[1] = out.place_of(row);
    }
  }

  // The number of a segment's partial result for the lane's first row.
  template <class Unit>
  EFFINFER_DEVICE static int64_t partial_of(Unit& unit, const ResultItem& item, int segment) {
    return item.partial + (segment - item.first_segment) * item.num_rows + row_of(unit, 0);
  }
  template <class Unit>
  EFFINFER_DEVICE void store_partial(Unit& unit, const ResultItem& item, int segment, int column,
                                     const LaneValues& values) const {
    const int64_t index = partial_of(unit, item, segment);
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (!has(unit, item, r)) continue;
      float of_row[8];
      row_values(values, r, of_row);
      store_partial_eight(params_.p.partial_out + (index + 8 * r) * (kColumns * kBlock),
                          dim_of(unit, column), of_row);
    }
  }
  // And that there is nothing in those behind it, before `end`.
  template <class Unit>
  EFFINFER_DEVICE void store_states(Unit& unit, const ResultItem& item, int segment, int end,
                                    const RowState (&rows)[2]) const {
    EFFINFER_NO_UNROLL
    for (int at = segment; at < end; ++at) {
      const int64_t index = partial_of(unit, item, at);
      EFFINFER_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (!has(unit, item, r)) continue;
        const RowState state = at == segment ? rows[r] : RowState{};
        if (unit.lane % 4 == 0)
          AttentionOutput::store_partial_state(params_.p, index + 8 * r, state);
        if (at > segment) store_zeros(unit, index + 8 * r);
      }
    }
  }
  template <class Unit>
  EFFINFER_DEVICE void store_zeros(Unit& unit, int64_t index) const {
    EFFINFER_NO_UNROLL
    for (int column = 0; column < kColumns; ++column) {
      store_partial_eight(params_.p.partial_out + index * (kColumns * kBlock), dim_of(unit, column),
                          {});
    }
  }

  // To the sums of a segment what came before it. Of a first one the factor is 1: as if zeros came
  // before.
  template <class Unit>
  EFFINFER_DEVICE void add_folded(Unit& unit, bool has_folded, int column,
                                  const Factors (&factors)[2], LaneValues& sums) const {
    if (has_folded) {
      LaneValues before;
      get(unit, column, before);
      fold_values(before, sums, factors);
      EFFINFER_UNROLL
      for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] = before[i / 4][i % 4];
    } else {
      EFFINFER_UNROLL
      for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] += 0.0f;  // -0 becomes 0
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void get(Unit& unit, int column, LaneValues& values) const {
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) {
      const Quad quad = shared_.values[unit.warp][column][i][unit.lane];
      EFFINFER_UNROLL
      for (int r = 0; r < 4; ++r) values[i][r] = float_of(quad.words[r]);
    }
  }
  template <class Unit>
  EFFINFER_DEVICE void put(Unit& unit, int column, const LaneValues& values) const {
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) {
      shared_.values[unit.warp][column][i][unit.lane] = {
          bits_of(values[i][0]), bits_of(values[i][1]), bits_of(values[i][2]),
          bits_of(values[i][3])};
    }
  }

  const AttentionParams& params_;
  Shared& shared_;
  float kept_;  // of the rows' states, behind the segments before
};

}  // namespace effinfer::cuda
