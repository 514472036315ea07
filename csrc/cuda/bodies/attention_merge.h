// What the decoding kernel does with a tile's results: stores them for whoever ends the tile, or
// merges them.
//
// The partial results of a tile are one array, chunk by chunk, and so are their maxima and sums.
// One block folds them from left to right, which takes long if it waits for memory chunk by chunk:
//
//   states    of as many chunks as there is room for, by all threads at once
//   factors   of 32 chunks by the lanes of a warp, as they depend on maxima alone
//   values    through a ring of stages of up to 16 rows, each row's sum and four dims a thread's
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/attention_output.h"
#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

// In the memory of a ring of keys, of kBytes.
template <int kWarps, int kBytes>
struct MergeShared {
  static constexpr int kRowQuads = 8 * kWarps;  // of 32 dims a warp
  static constexpr int kStageQuads = kTileRows * kRowQuads;

  // A chunk's row.
  struct Entry {
    RowState state;
    Factors factors;
  };
  static constexpr int kEntries = kBytes / 8 / static_cast<int>(sizeof(Entry));
  static constexpr int kStages = kBytes / 8 * 7 / 16 / kStageQuads;
  static constexpr int kAhead = kStages - 1;

  Entry entries[kEntries];
  float highest[kTileRows];  // of the chunks before
  Quad stages[kStages][kStageQuads];
};

// Folds the partial results of a tile by a whole block: values to the first stage, row by row, and
// the rows' states to the first entries.
template <int kWarps, class Shared>
class PartialFold {
 public:
  static constexpr int kThreads = kWarps * kWarp;
  // Of a thread: four dims of a row each, threads side by side.
  static constexpr int kOwn = Shared::kStageQuads / kThreads;

  EFFINFER_DEVICE PartialFold(const ops::AttentionProblem& p, const ops::AttentionMerge& merge,
                              int rows, Shared& shared)
      : shared_(shared),
        states_(reinterpret_cast<const RowState*>(p.partial_ms) + merge.first_partial),
        values_(p.partial_out + int64_t{merge.first_partial} * p.v.dims),
        chunks_(merge.num_partials),
        rows_(rows),
        row_quads_(p.v.dims / 4),
        step_(kTileRows / rows),
        window_(Shared::kEntries / rows / step_ * step_) {}

  template <class Unit>
  EFFINFER_DEVICE void run(Unit& unit) {
    EFFINFER_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const int row = (unit.thread + i * kThreads) / row_quads_;
      own_rows_[i] = row < rows_ ? row : -1;
    }
    EFFINFER_NO_UNROLL
    for (int i = 0; i < Shared::kAhead; ++i) fetch_stage(unit);
    States states;
    load_states(unit, 0, states);
    EFFINFER_NO_UNROLL
    for (int first = 0; first < chunks_; first += window_) {
      const int count = window_from(first);
      store_states(unit, count, states);
      unit.sync();
      load_states(unit, first + window_, states);
      set_factors(unit, first, count);
      unit.sync();
      fold_window(unit, count);
      unit.sync();
    }
    EFFINFER_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const int row = own_rows_[i];
      if (row < 0) break;
      const int own = unit.thread + i * kThreads;
      Quad quad;
      EFFINFER_UNROLL
      for (int d = 0; d < 4; ++d) quad.words[d] = bits_of(sums_[i][d]);
      shared_.stages[0][own] = quad;
      if (own == row * row_quads_) shared_.entries[row].state = {shared_.highest[row], weights_[i]};
    }
    unit.sync();
  }

 private:
  static constexpr int kLoads = Shared::kEntries / kThreads;
  using States = RowState[kLoads];

  EFFINFER_DEVICE int window_from(int first) const {
    return chunks_ - first < window_ ? chunks_ - first : window_;
  }

  // The next chunks, as many as a stage takes, on their way: each thread copies what it folds.
  template <class Unit>
  EFFINFER_DEVICE void fetch_stage(Unit& unit) {
    const int end = next_ + step_ < chunks_ ? next_ + step_ : chunks_;
    const int quads = rows_ * row_quads_;
    Quad* to = shared_.stages[stage_] + unit.thread;
    const float* from = values_ + 4 * (int64_t{next_} * quads + unit.thread);
    EFFINFER_NO_UNROLL
    for (; next_ < end; ++next_, to += quads, from += 4 * quads) {
      EFFINFER_UNROLL
      for (int i = 0; i < kOwn; ++i) {
        if (own_rows_[i] < 0) break;
        unit.copy_async(to + i * kThreads, from + 4 * i * kThreads);
      }
    }
    unit.commit();
    stage_ = stage_ + 1 == Shared::kStages ? 0 : stage_ + 1;
  }

  // Those of a window, a part for each thread: on their way while the window before is folded.
  template <class Unit>
  EFFINFER_DEVICE void load_states(Unit& unit, int first, States& states) const {
    const RowState* from = states_ + int64_t{first} * rows_;
    const int entries = first < chunks_ ? window_from(first) * rows_ : 0;
    EFFINFER_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const int entry = unit.thread + i * kThreads;
      if (entry < entries) states[i] = from[entry];
    }
  }
  template <class Unit>
  EFFINFER_DEVICE void store_states(Unit& unit, int count, const States& states) const {
    EFFINFER_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const int entry = unit.thread + i * kThreads;
      if (entry < count * rows_) shared_.entries[entry].state = states[i];
    }
  }

  // What chunks are multiplied by depends on the maxima up to them alone.
  template <class Unit>
  EFFINFER_DEVICE void set_factors(Unit& unit, int first, int count) {
    EFFINFER_NO_UNROLL
    for (int row = unit.warp; row < rows_; row += kWarps) {
      float highest = kNoScore;
      if (first > 0 && unit.lane == 0) highest = shared_.highest[row];
      highest = unit.shfl(highest, 0);
      EFFINFER_NO_UNROLL
      for (int set = 0; set < count; set += kWarp) {
        const int chunk = set + unit.lane;
        RowState own;
        if (chunk < count) own = shared_.entries[chunk * rows_ + row].state;
        float max = fmaxf(own.max, highest);  // up to and with the lane's own
        EFFINFER_UNROLL
        for (int distance = 1; distance < kWarp; distance *= 2) {
          const float lower = unit.shfl(max, (unit.lane - distance) & (kWarp - 1));
          if (unit.lane >= distance) max = fmaxf(max, lower);
        }
        const float lower = unit.shfl(max, (unit.lane - 1) & (kWarp - 1));
        const RowState before = {unit.lane == 0 ? highest : lower, 0.0f};
        if (chunk < count) {
          shared_.entries[chunk * rows_ + row].factors = factors_of(unit, before, own);
        }
        highest = unit.shfl(max, kWarp - 1);
      }
      if (unit.lane == 0) shared_.highest[row] = highest;
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void fold_window(Unit& unit, int count) {
    EFFINFER_NO_UNROLL
    for (int chunk = 0; chunk < count; chunk += step_) {
      unit.template wait<Shared::kAhead - 1>();
      const Quad* values = shared_.stages[stage_ + 1 == Shared::kStages ? 0 : stage_ + 1];
      fetch_stage(unit);
      const int left = count - chunk < step_ ? count - chunk : step_;
      EFFINFER_UNROLL
      for (int i = 0; i < kOwn; ++i) {
        if (own_rows_[i] < 0) break;
        fold(&shared_.entries[chunk * rows_ + own_rows_[i]], values + unit.thread + i * kThreads,
             left, sums_[i], weights_[i]);
      }
    }
  }

  // A thread's row and dims of `count` chunks, whose loads are two at a time.
  EFFINFER_DEVICE void fold(const typename Shared::Entry* entries, const Quad* values, int count,
                            float (&sums)[4], float& weights) const {
    EFFINFER_NO_UNROLL
    for (int c = 0; c < count; c += 2, entries += 2 * rows_, values += 2 * rows_ * row_quads_) {
      const int second = c + 1 < count ? 1 : 0;
      const typename Shared::Entry of[2] = {entries[0], entries[second * rows_]};
      const Quad quads[2] = {values[0], values[second * rows_ * row_quads_]};
      EFFINFER_UNROLL
      for (int j = 0; j < 2; ++j) {
        if (j > second) break;
        weights = fold_value(weights, of[j].state.sum, of[j].factors);
        EFFINFER_UNROLL
        for (int d = 0; d < 4; ++d) {
          sums[d] = fold_value(sums[d], float_of(quads[j].words[d]), of[j].factors);
        }
      }
    }
  }

  Shared& shared_;
  const RowState* const states_;
  const float* const values_;
  const int chunks_;
  const int rows_;
  const int row_quads_;
  const int step_;      // chunks of a stage
  const int window_;    // of those whose states are there, whole stages
  int next_ = 0;        // chunk to be sent for
  int stage_ = 0;       // its place
  int own_rows_[kOwn];  // -1: none, nor of those that follow
  float sums_[kOwn][4] = {};
  float weights_[kOwn] = {};
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

  // All partial results of the tile, from left to right, by whole blocks.
  template <class Unit, class Shared>
  EFFINFER_DEVICE void merge(Unit& unit, const ops::AttentionMerge& merge, Shared& shared) const {
    PartialFold<kWarps, Shared>(p_, merge, num_rows(), shared).run(unit);
    RowState rows[2];
    LaneValues values = {};
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (!has(unit, r)) continue;
      const int row = row_of(unit, r);
      rows[r] = shared.entries[row].state;
      if (dim_of(unit) >= dims_) continue;
      EFFINFER_UNROLL
      for (int d = 0; d < 8; ++d) {
        const Quad& quad = shared.stages[0][(row * dims_ + dim_of(unit)) / 4 + d / 4];
        value_at(values, d, r) = float_of(quad.words[d % 4]);
      }
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

  const ops::AttentionProblem& p_;
  const AttentionOutput out_;
  const int dims_;
};

}  // namespace effinfer::cuda
