// Merges the partial results of tiles that were divided: a block a row, a thread a dim.
//
// Rows are folded chunk by chunk from left to right, as by the block of a tile that is not divided.
// That is a chain of two operations a chunk; what takes time is the memory, so that a warp has the
// states and values of the next 96 chunks on their way while it folds 32. What chunks are
// multiplied by depends on the maxima alone: each lane finds it for one of the chunks, and all read
// it from shared memory, as three shuffles a chunk took longer than the chain.
//
// It is a kernel of its own: rows of a tile are merged by as many multiprocessors, no block of the
// kernel before waits for stores or counts others, and what merges is in no kernel of products.
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

// Whether the kernel of the tile does not merge it itself, which that of long tiles does, but for
// the one whose sums are its own.
EFFINFER_DEVICE bool is_left(const ops::AttentionProblem& p, const ops::AttentionTile& tile) {
  return p.own_sums || tile.num_rows * tile.num_heads <= kTileRows;
}

class RowMerge {
 public:
  EFFINFER_DEVICE RowMerge(const AttentionParams& params, const ops::AttentionMerge& merge,
                           const ops::AttentionTile& tile, int row)
      : dims_(params.p.v.dims),
        chunks_(merge.num_partials),
        rows_(tile.num_rows * tile.num_heads),
        states_(reinterpret_cast<const RowState*>(params.p.partial_ms) + merge.first_partial + row),
        values_(params.p.partial_out + (int64_t{merge.first_partial} + row) * params.p.v.dims),
        out_(params, tile),
        at_(out_.row_at(row)),
        place_(out_.place_of(at_)) {}

  // What 32 chunks are multiplied by and their sums, a chunk's in 16 bytes.
  using Chunks = Quad[kWarp];
  static constexpr int kWindows = 3;  // under way

  // A warp: 32 dims from `first_dim` on.
  template <class Unit>
  EFFINFER_DEVICE void run(Unit& unit, int first_dim, Chunks (&of_warp)[kWindows]) const {
    RowState row;
    float value = 0.0f;
    Window windows[kWindows] = {};
    EFFINFER_UNROLL
    for (int i = 0; i < kWindows; ++i) load(unit, i * kWarp, first_dim, windows[i]);
    EFFINFER_NO_UNROLL
    for (int first = 0; first < chunks_; first += kWindows * kWarp) {
      EFFINFER_UNROLL
      for (int i = 0; i < kWindows; ++i) {
        const int at = first + i * kWarp;
        if (at >= chunks_) break;
        fold(unit, windows[i], chunks_ - at, of_warp[i], row, value);
        load(unit, at + kWindows * kWarp, first_dim, windows[i]);
      }
    }
    const bool is_first = first_dim == 0 && unit.lane == 0;
    const float factor = out_.end_row(unit, at_, row, is_first);
    float eight[8];
    EFFINFER_UNROLL
    for (int d = 0; d < 8; ++d) eight[d] = unit.shfl(value, (8 * unit.lane + d) & (kWarp - 1));
    const int dim = first_dim + 8 * unit.lane;
    if (unit.lane >= kWarp / 8 || dim >= dims_) return;
    out_.store_values(unit, place_, dim, factor, eight, dims_);
  }

 private:
  // Of 32 chunks: each lane's dim of all, and the state of one. Behind the last one is nothing, and
  // behind the kStep that it is of are values that nobody reads.
  static constexpr int kStep = 4;
  struct Window {
    RowState state;
    float values[kWarp];
  };

  template <class Unit>
  EFFINFER_DEVICE void load(Unit& unit, int first, int first_dim, Window& to) const {
    const int dim = first_dim + unit.lane;
    to.state = RowState();
    if (first >= chunks_) return;
    const bool has_dim = dim < dims_;
    const float* from = values_ + int64_t{first} * rows_ * dims_ + place_of_partial(dim);
    if (first + unit.lane < chunks_) to.state = states_[(first + unit.lane) * int64_t{rows_}];
    EFFINFER_UNROLL
    for (int c = 0; c < kWarp; ++c, from += rows_ * dims_) {
      if (c % kStep == 0 && first + c >= chunks_) break;
      to.values[c] = 0.0f;
      if (has_dim && first + c < chunks_) to.values[c] = *from;
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void fold(Unit& unit, const Window& window, int count, Chunks& chunks,
                                   RowState& row, float& value) {
    float max = fmaxf(window.state.max, row.max);  // up to and with the lane's own
    EFFINFER_UNROLL
    for (int distance = 1; distance < kWarp; distance *= 2) {
      if (distance >= count) break;
      const float lower = unit.shfl(max, (unit.lane - distance) & (kWarp - 1));
      if (unit.lane >= distance) max = fmaxf(max, lower);
    }
    const float lower = unit.shfl(max, (unit.lane - 1) & (kWarp - 1));
    const RowState before = {unit.lane == 0 ? row.max : lower, 0.0f};
    const Factors own = factors_of(unit, before, window.state);
    // What was there was read before the barriers of the windows between.
    chunks[unit.lane] = {{bits_of(own.before), bits_of(own.chunk), bits_of(window.state.sum), 0}};
    unit.sync_warp();
    EFFINFER_UNROLL
    for (int c = 0; c < kWarp; ++c) {
      if (c % kStep == 0 && c >= count) break;
      const Quad of = chunks[c];
      const Factors factors = {float_of(of.words[0]), float_of(of.words[1])};
      row.sum = fold_value(row.sum, float_of(of.words[2]), factors);
      value = fold_value(value, window.values[c], factors);
    }
    row.max = unit.shfl(max, (count < kWarp ? count : kWarp) - 1);
  }

  const int dims_;
  const int chunks_;
  const int rows_;                // of the tile
  const RowState* const states_;  // of the row
  const float* const values_;
  const AttentionOutput out_;
  const AttentionOutput::Row at_;
  const AttentionOutput::Place place_;
};

struct AttentionMergeKernel {
  static constexpr const char* kName = "attention_merge";
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 3;
  static constexpr bool kWaitsItself = true;
  using Params = AttentionParams;
  struct Shared {
    RowMerge::Chunks chunks[kThreads / kWarp][RowMerge::kWindows];
  };

  // A block for each row that a merge's tile may have; the first rows of all tiles first, for many
  // tiles have no others. Merges that the rounding of a step adds are of no chunks.
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const int merges = static_cast<int>(params.p.work.num_merges);
    const ops::AttentionMerge merge = params.p.work.merges[unit.block % merges];
    const ops::AttentionTile tile = params.p.work.tiles[merge.tile];
    const int row = unit.block / merges;
    const bool has_parts = merge.num_partials > 0 && is_left(params.p, tile);
    const bool has_row = has_parts && row < tile.num_rows * tile.num_heads;
    // Where its parts are and its results go is known before the kernel before has ended. A merge
    // of no chunks has the first tile.
    const RowMerge rows(params, merge, tile, has_row ? row : 0);
    unit.wait_for_inputs();
    if (!has_row) return;
    EFFINFER_NO_UNROLL
    for (int dim = kWarp * unit.warp; dim < params.p.v.dims; dim += kThreads) {
      if (dim >= kThreads) unit.sync_warp();  // all have read what was of other dims
      rows.run(unit, dim, shared.chunks[unit.warp]);
    }
  }
};

}  // namespace effinfer::cuda
