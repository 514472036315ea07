// What a warpgroup of wgmma_attention.h does that multiplies.
#pragma once

#include <cstdint>

#include "cuda/bodies/attention_output.h"
#include "cuda/bodies/attention_rows.h"
#include "cuda/bodies/wgmma_queries.h"
#include "cuda/bodies/wgmma_shared.h"
#include "cuda/bodies/wgmma_softmax.h"
#include "cuda/bodies/wgmma_turns.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

// A warpgroup that multiplies.
template <class Unit, DType kType, int kColumns>
class WgmmaAttentionRun {
 public:
  using Shared = WgmmaAttentionShared<kColumns>;
  using Tiles = typename Shared::Tiles;
  using Item = typename Shared::Item;
  using Queries = WgmmaQueries<kColumns>;
  using Softmax = StepSoftmax<kType, kColumns>;

  EFFINFER_DEVICE WgmmaAttentionRun(Unit& unit, const AttentionParams& params, Shared& shared)
      : unit_(unit),
        p_(params.p),
        shared_(shared),
        group_(static_cast<int>(unit.same(static_cast<uint32_t>(unit.warp / kGroupWarps)))),
        result_(unit, params, shared.result) {}

  // The queries of an item are set when all of the warpgroup have multiplied those before: in its
  // last turn they are asked for, and its values wait for their products meanwhile.
  EFFINFER_DEVICE void run() {
    typename Queries::Pieces queries;
    Turns::start(unit_, group_);
    load_queries(queries);
    set_queries(queries);
    while (unit_.shfl(item().exists, 0) != 0) {
      multiplied_ = unit_.same(multiplied_);
      ended_ = unit_.same(ended_);
      Unit unit = unit_.anew();
      result_.begin(unit);
      segment_ = item().first_unit / ops::kSegmentUnits;
      const int rows = item().result.num_rows;
      shares_ = unit.same(rows > kGroupRows ? 1u : 0u) != 0;
      const bool has_rows = unit_.same(group_ * kGroupRows < rows ? 1u : 0u) != 0;
      bool has_step = begin_step();
      for (; has_step && !has_rows; has_step = begin_step()) pass_step();
      if (has_step) {
        multiply(queries);
      } else {
        ++ended_;
        load_queries(queries);
      }
      set_queries(queries);
      const int last = item_at(1).index();
      finish(shared_.items[last]);
      unit_.sync_warp();  // nobody looks at the item any more
      if (unit_.lane == 0) unit_.barrier_arrive(shared_.item_empty[last]);
    }
  }

 private:
  static constexpr uint64_t kStep = 32 / 16;  // of 16 numbers along a row: of a descriptor
  using FlatScores = float[kStepBlocks * 16];
  using FlatValues = float[kColumns * 16];

  // Places in the rings, `back` before those at hand. All follow from two counts, as registers are
  // few.
  EFFINFER_DEVICE RingPlace<Shared::kStages / 2> stage_at(uint32_t back) const {
    return {multiplied_ - back};
  }
  EFFINFER_DEVICE RingPlace<Shared::kSteps> step_at(uint32_t back) const {
    return {multiplied_ + ended_ - back};  // an item's end is told as a step is
  }
  EFFINFER_DEVICE RingPlace<kItemPlaces> item_at(uint32_t back) const { return {ended_ - back}; }

  // Looked up in shared memory, and in no register between.
  EFFINFER_DEVICE const Item& item() const { return shared_.items[item_at(0).index()]; }

  EFFINFER_DEVICE void load_queries(typename Queries::Pieces& queries) {
    const auto at = item_at(0);
    unit_.barrier_wait(shared_.item_full[at.index()], at.parity());
    Unit unit = unit_.anew();
    Queries::load(unit, p_, item().tile, unit.warp * kTileRows, queries);
  }
  // And the rows that they are of.
  EFFINFER_DEVICE void set_queries(const typename Queries::Pieces& queries) {
    Unit unit = unit_.anew();
    const float power = Queries::template store<kType>(unit, p_, queries, unit.warp % kGroupWarps,
                                                       shared_.queries[group_]);
    if (unit.lane >= kTileRows) return;
    const int row = unit.warp * kTileRows + unit.lane;
    TileRow& to = shared_.rows[row];
    const int32_t first = item().position;
    to = chain_row_of(p_, item().tile, row, [&](int token) { return first + token; });
    to.scale *= power;
  }

  // Whether there is another step, of which it looks up the segment, not before the weights of the
  // step before are there.
  EFFINFER_DEVICE bool begin_step() {
    const auto at = step_at(0);
    unit_.barrier_wait(shared_.step_full[at.index()], at.parity() ^ softmax_.settled());
    const KeyStep& step = shared_.steps[at.index()];
    next_segment_ = unit_.shfl(step.segment, 0);
    return unit_.shfl(step.starts[0], 0) >= 0;
  }

  // All steps.
  EFFINFER_DEVICE void multiply(typename Queries::Pieces& queries) {
    typename Softmax::Scores scores;
    typename Softmax::Weights weights;
    uint64_t keys = wait_for_keys();
    Turns::take(unit_, group_, shares_);  // all of the warpgroup have set their queries
    add_keys(keys, scores);
    Turns::give(unit_, group_, shares_);
    look_up();
    unit_.template wgmma_wait<0>(flat(scores));
    for (bool is_first = true;; is_first = false) {
      free_keys();
      if (next_segment_ != segment_) {
        unit_.template wgmma_wait<0>(flat_values());
        end_segments(next_segment_);
      }
      add_step(scores);
      const bool is_last = !begin_step();
      // With the scores, so that no weight is rounded before.
      unit_.template wgmma_wait<0>(flat_values(), flat(scores));
      if (!is_first) free_values(2);
      softmax_.round(unit_, scores, weights);
      if (is_last) break;
      keys = wait_for_keys();
      Turns::take(unit_, group_, shares_);
      add_keys(keys, scores);
      add_values(weights);
      Turns::give(unit_, group_, shares_);
      look_up();
      unit_.template wgmma_wait<1>(flat(scores));
    }
    Turns::take(unit_, group_, shares_);
    add_values(weights);
    Turns::give(unit_, group_, shares_);
    ++ended_;
    load_queries(queries);
    unit_.template wgmma_wait<0>(flat_values());
    free_values(1);
  }

  // Of a tile of which the other warpgroup has all rows.
  EFFINFER_DEVICE void pass_step() {
    const auto place = stage_at(0);
    // Else it would be ahead by more than barriers tell apart.
    EFFINFER_UNROLL
    for (int i = 0; i < 2; ++i) {
      unit_.barrier_wait(shared_.full[2 * place.index() + i], place.parity());
    }
    unit_.sync_warp();
    free_keys();
    free_values(1);
  }

  EFFINFER_DEVICE FlatValues& flat_values() { return reinterpret_cast<FlatValues&>(values_); }
  EFFINFER_DEVICE static FlatScores& flat(typename Softmax::Scores& scores) {
    return reinterpret_cast<FlatScores&>(scores);
  }

  // Stages of keys and of values take turns.
  EFFINFER_DEVICE void free_keys() {
    if (unit_.lane == 0) unit_.barrier_arrive(shared_.empty[2 * stage_at(0).index()]);
    ++multiplied_;
  }
  EFFINFER_DEVICE void free_values(uint32_t back) {
    if (unit_.lane == 0) unit_.barrier_arrive(shared_.empty[2 * stage_at(back).index() + 1]);
  }

  template <int kSums, class A>
  EFFINFER_DEVICE void wgmma(float (&d)[kSums], A& a, uint64_t b, bool adds) {
    if constexpr (kType == DType::f16) {
      unit_.wgmma_f16(d, a, b, adds);
    } else {
      unit_.wgmma(d, a, b, adds);
    }
  }
  EFFINFER_DEVICE uint64_t tile_at(const uint8_t* first) const {
    return unit_.descriptor(first, 16, 8 * kSwizzledBytes, Swizzle::bytes128);
  }

  // The step's keys, before the turn, which others wait for.
  EFFINFER_DEVICE uint64_t wait_for_keys() {
    const auto place = stage_at(0);
    const int stage = 2 * place.index();
    const uint64_t tile = tile_at(shared_.ring[stage]);
    unit_.barrier_wait(shared_.full[stage], place.parity());
    return tile >> 32 << 32 | unit_.same(static_cast<uint32_t>(tile));
  }

  // Their scores, under way.
  EFFINFER_DEVICE void add_keys(uint64_t k, typename Softmax::Scores& scores) {
    FlatScores& sums = flat(scores);
    const uint64_t q = tile_at(shared_.queries[group_]);
    unit_.wgmma_fence(sums);
    EFFINFER_UNROLL
    for (int step = 0; step < 2 * kColumns; ++step) {
      const auto tile = static_cast<uint64_t>(step / 4);
      const uint64_t at = static_cast<uint64_t>(step % 4) * kStep;
      const uint64_t a = q + tile * (Queries::kTileBytes / 16) + at;
      wgmma(sums, a, k + tile * (Tiles::kKeyTile / 16) + at, step > 0);
    }
    unit_.wgmma_commit();
  }

  // Weights times the values of the step before, under way.
  EFFINFER_DEVICE void add_values(typename Softmax::Weights& weights) {
    const auto place = stage_at(1);
    const int stage = 2 * place.index() + 1;
    unit_.barrier_wait(shared_.full[stage], place.parity());
    softmax_.scale(values_);
    const uint64_t v = tile_at(shared_.ring[stage]);
    // At once, so that all weights are made before the first product.
    unit_.wgmma_fence(flat_values(), weights[0][0].words, weights[0][1].words, weights[1][0].words,
                      weights[1][1].words, weights[2][0].words, weights[2][1].words,
                      weights[3][0].words, weights[3][1].words);
    EFFINFER_UNROLL
    for (int step = 0; step < 2 * kStepBlocks; ++step) {
      uint32_t (&a)[4] = weights[step / 2][step % 2].words;
      const auto tile = static_cast<uint64_t>(step / 4);
      wgmma(flat_values(), a,
            v + tile * (Tiles::kValueTile / 16) + static_cast<uint64_t>(step % 4) * kStep, true);
    }
    unit_.wgmma_commit();
  }

  EFFINFER_DEVICE const TileRow* own_rows() const { return shared_.rows + unit_.warp * kTileRows; }

  EFFINFER_DEVICE RowSpan span() const {
    return span_of(shared_.rows, unit_.warp * kTileRows, item().result.num_rows);
  }

  // What the step's softmax asks of it, before its scores are there.
  EFFINFER_DEVICE void look_up() {
    is_plain_ =
        softmax_.is_plain(unit_, p_, item().visible, span(), shared_.steps[step_at(0).index()]);
  }
  EFFINFER_DEVICE void add_step(typename Softmax::Scores& scores) {
    const KeyStep& step = shared_.steps[step_at(1).index()];
    if (!is_plain_) {
      softmax_.set_logits(unit_, p_, item().visible, own_rows(), span(), step, scores);
    }
    softmax_.add(unit_, own_rows(), is_shaped(p_), scores);
  }

  // Up to segment `end`.
  EFFINFER_DEVICE void end_segments(int end) {
    Unit unit = unit_.anew();
    RowState rows[2];
    softmax_.take(unit, rows);
    result_.add(unit, item().result, segment_, end, rows, values_);
    segment_ = end;
  }

  EFFINFER_DEVICE void finish(const Item& item) {
    Unit unit = unit_.anew();
    RowState rows[2];
    softmax_.take(unit, rows);
    const int end = (item.end_unit - 1) / ops::kSegmentUnits + 1;
    result_.finish(unit, item.result, item.tile, segment_, end, rows, values_);
  }

  Unit& unit_;
  const ops::AttentionProblem& p_;
  Shared& shared_;
  const int group_;
  typename Shared::Result result_;
  Softmax softmax_;
  typename Softmax::Values values_ = {};
  int segment_ = 0;          // that is being summed
  int next_segment_ = 0;     // that of the step
  bool is_plain_ = false;    // see StepSoftmax
  bool shares_ = false;      // the item's tile with the other warpgroup
  uint32_t multiplied_ = 0;  // steps, with whose keys the warp is done
  uint32_t ended_ = 0;       // items
};

}  // namespace effinfer::cuda
