// What a warpgroup of wgmma_attention.h does that multiplies, and the block's shared memory.
#pragma once

#include <cstdint>

#include "cuda/bodies/attention_output.h"
#include "cuda/bodies/attention_rows.h"
#include "cuda/bodies/prefill_result.h"
#include "cuda/bodies/wgmma_queries.h"
#include "cuda/bodies/wgmma_softmax.h"
#include "cuda/bodies/wgmma_stages.h"
#include "cuda/bodies/wgmma_turns.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

inline constexpr int kGroupRows = 64;  // of a warpgroup
inline constexpr int kConsumers = 2;   // warpgroups
inline constexpr int kConsumerWarps = kConsumers * kGroupWarps;

template <int kColumns>
struct WgmmaAttentionShared {
  using Tiles = PageTiles<kColumns>;
  using Result = PrefillResult<kColumns, kConsumerWarps, 0>;
  static constexpr int kStages = kColumns == 4 ? 4 : 8;
  // One more than there are stages of values: who waits for a free stage need not wait for a free
  // step.
  static constexpr int kSteps = kStages / 2 + 1;

  alignas(1024) uint8_t queries[kConsumers][WgmmaQueries<kColumns>::kBytes];
  alignas(1024) uint8_t ring[kStages][Tiles::kStageBytes];
  typename Result::Shared result;
  Mbarrier full[kStages];
  Mbarrier empty[kStages];
  Mbarrier step_full[kSteps];
  KeyStep steps[kSteps];
  ItemUnits units;
  SegmentRule rule;
  Visibility visible;
  TileRow rows[kConsumers * kGroupRows];
  int32_t is_last;
  int32_t is_arranged;  // the pages of the tile's sequence
};

// A warpgroup that multiplies.
template <class Unit, DType kType, int kColumns>
class WgmmaAttentionRun {
 public:
  using Shared = WgmmaAttentionShared<kColumns>;
  using Tiles = typename Shared::Tiles;
  using Queries = WgmmaQueries<kColumns>;
  using Softmax = StepSoftmax<kType, kColumns>;

  EFFINFER_DEVICE WgmmaAttentionRun(Unit& unit, const AttentionParams& params, Shared& shared)
      : unit_(unit),
        p_(params.p),
        shared_(shared),
        group_(unit.shfl(unit.warp / kGroupWarps, 0)),
        result_(unit, params, shared.result) {}

  EFFINFER_DEVICE void run() {
    Queries::template set<kType>(unit_, p_, tile(), group_ * kGroupRows,
                                 shared_.rows + group_ * kGroupRows, shared_.queries[group_]);
    segment_ = item().first_unit / ops::kSegmentUnits;
    if (begin_step()) multiply();
    finish();
  }

 private:
  static constexpr uint64_t kStep = 32 / 16;  // of 16 numbers along a row: of a descriptor
  using FlatScores = float[kStepBlocks * 16];
  using FlatValues = float[kColumns * 16];
  using Place = RingPlace<Shared::kStages / 2>;  // stages of keys and of values take turns

  // Looked up before and after all steps, and in no register between.
  EFFINFER_DEVICE const ops::AttentionItem& item() const { return p_.work.items[unit_.block]; }
  EFFINFER_DEVICE const ops::AttentionTile& tile() const { return p_.work.tiles[item().tile]; }

  // Whether there is another step, of which it looks up the segment, not before the weights of the
  // step before are there.
  EFFINFER_DEVICE bool begin_step() {
    unit_.barrier_wait(shared_.step_full[step_.index], step_.parity ^ softmax_.settled());
    const KeyStep& step = shared_.steps[step_.index];
    next_segment_ = unit_.shfl(step.segment, 0);
    return unit_.shfl(step.starts[0], 0) >= 0;
  }

  EFFINFER_DEVICE void multiply() {
    typename Softmax::Scores scores;
    typename Softmax::Weights weights;
    Turns::start(unit_, group_);
    Turns::take(unit_, group_);  // all of the warpgroup have set their queries
    add_keys(scores);
    Turns::give(unit_, group_, false);
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
      if (!is_first) free_values();
      softmax_.round(unit_, scores, weights);
      if (is_last) break;
      Turns::take(unit_, group_);
      add_keys(scores);
      add_values(weights);
      Turns::give(unit_, group_, false);
      look_up();
      unit_.template wgmma_wait<1>(flat(scores));
    }
    Turns::take(unit_, group_);
    add_values(weights);
    Turns::give(unit_, group_, true);
    unit_.template wgmma_wait<0>(flat_values());
  }

  EFFINFER_DEVICE FlatValues& flat_values() { return reinterpret_cast<FlatValues&>(values_); }
  EFFINFER_DEVICE static FlatScores& flat(typename Softmax::Scores& scores) {
    return reinterpret_cast<FlatScores&>(scores);
  }

  EFFINFER_DEVICE static int stage_of_keys(const Place& place) { return 2 * place.index; }
  EFFINFER_DEVICE static int stage_of_values(const Place& place) { return 2 * place.index + 1; }
  EFFINFER_DEVICE void free_keys() {
    if (unit_.lane == 0) unit_.barrier_arrive(shared_.empty[stage_of_keys(keys_at_)]);
    keys_at_.next();
  }
  EFFINFER_DEVICE void free_values() {
    if (unit_.lane == 0) unit_.barrier_arrive(shared_.empty[stage_of_values(values_at_)]);
    values_at_.next();
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

  // Scores of the step's keys, under way.
  EFFINFER_DEVICE void add_keys(typename Softmax::Scores& scores) {
    const int stage = stage_of_keys(keys_at_);
    unit_.barrier_wait(shared_.full[stage], keys_at_.parity);
    FlatScores& sums = flat(scores);
    const uint64_t q = tile_at(shared_.queries[group_]);
    const uint64_t k = tile_at(shared_.ring[stage]);
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
    const int stage = stage_of_values(values_at_);
    unit_.barrier_wait(shared_.full[stage], values_at_.parity);
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
    return span_of(shared_.rows, unit_.warp * kTileRows, result_.num_rows());
  }

  // What the step's softmax asks of it, before its scores are there.
  EFFINFER_DEVICE void look_up() {
    is_plain_ = softmax_.is_plain(unit_, p_, shared_.visible, span(), shared_.steps[step_.index]);
  }
  EFFINFER_DEVICE void add_step(typename Softmax::Scores& scores) {
    const KeyStep& step = shared_.steps[step_.index];
    if (!is_plain_) {
      softmax_.set_logits(unit_, p_, shared_.visible, own_rows(), span(), step, scores);
    }
    softmax_.add(unit_, own_rows(), is_shaped(p_), scores);
    step_.next();
  }

  // Up to segment `end`, of which those without a step matter to partial results only.
  EFFINFER_DEVICE void end_segments(int end) {
    while (segment_ < end) {
      RowState rows[2];
      softmax_.take(unit_, rows);
      result_.begin_chunk(unit_, segment_, rows);
      EFFINFER_UNROLL
      for (int column = 0; column < kColumns; ++column) {
        result_.add(unit_, column, values_[column]);
        clear(values_[column]);
      }
      segment_ = result_.is_partial() ? segment_ + 1 : end;
    }
  }

  EFFINFER_DEVICE void finish() {
    if (!result_.is_partial()) {
      RowState rows[2];
      softmax_.take(unit_, rows);
      return result_.store_with(unit_, tile(), rows, values_);
    }
    end_segments((item().end_unit - 1) / ops::kSegmentUnits + 1);
    const int32_t index = item().merge;
    if (!ends_last_item(unit_, p_, index, shared_.is_last)) return;
    result_.merge(unit_, tile(), p_.work.merges[index]);
  }

  Unit& unit_;
  const ops::AttentionProblem& p_;
  Shared& shared_;
  const int group_;
  typename Shared::Result result_;
  Softmax softmax_;
  typename Softmax::Values values_ = {};
  int segment_ = 0;        // that is being summed
  int next_segment_ = 0;   // that of the step
  bool is_plain_ = false;  // see StepSoftmax
  Place keys_at_;
  Place values_at_;
  RingPlace<Shared::kSteps> step_;
};

}  // namespace effinfer::cuda
