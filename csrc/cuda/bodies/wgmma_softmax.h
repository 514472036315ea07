// Softmax of a warp's 16 rows over the keys of a segment, 128 at a time: the maximum and the sum of
// weights of the keys so far, to which what was summed is scaled whenever the maximum grows.
//
// What a row does not see has weights of zero and changes no maximum: a row's bits depend on its
// own keys alone, in the order of steps, which depend on the rows' list of visits alone.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/attention_output.h"
#include "cuda/bodies/attention_rows.h"
#include "cuda/bodies/fragments.h"
#include "cuda/bodies/prefill_rows.h"
#include "cuda/bodies/seen_words.h"
#include "cuda/bodies/softmax.h"
#include "cuda/bodies/wgmma_stages.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

inline constexpr int kStepBlocks = kStepTokens / kBlock;

template <DType kType, int kColumns>
class StepSoftmax {
 public:
  using Multiply = Products<kType, 1>;
  using Scores = BlockScores[kStepBlocks];
  using Weights = Quad[kStepBlocks][2];  // A operands of the products with values
  using Values = LaneValues[kColumns];

  // Whether a step's scores are logits as they are: all rows see all of it, and nothing is added.
  template <class Unit>
  EFFINFER_DEVICE static bool is_plain(Unit& unit, const ops::AttentionProblem& p,
                                       const Visibility& visible, const RowSpan& span,
                                       const KeyStep& step) {
    const uint64_t words = step.words[0] & step.words[1];
    const bool plain = !is_shaped(p) && words == ~uint64_t{0} &&
                       sees_all(visible, span, step.starts[0], step.starts[1] + kUnitTokens);
    // What all lanes know alike they take from one, so that no compiler expects them to part.
    return unit.shfl(plain ? 1 : 0, 0) != 0;
  }

  // Else they become some. `rows` are the warp's, of which `span` are there.
  template <class Unit>
  EFFINFER_DEVICE static void set_logits(Unit& unit, const ops::AttentionProblem& p,
                                         const Visibility& visible, const TileRow* rows,
                                         const RowSpan& span, const KeyStep& step, Scores& scores) {
    const bool shaped = is_shaped(p);
    EFFINFER_UNROLL
    for (int b = 0; b < kStepBlocks; ++b) {
      const int32_t first = step.starts[b / 2] + b % 2 * kBlock;
      const auto word = static_cast<uint32_t>(step.words[b / 2] >> b % 2 * kBlock);
      const bool whole = word == ~0u && sees_all(visible, span, first, first + kBlock);
      if (whole && !shaped) continue;
      const int32_t start = first + unit.lane % 4 * 8;
      EFFINFER_UNROLL
      for (int r = 0; r < 2; ++r) {
        const TileRow row = rows[unit.lane / 4 + 8 * r];
        if (shaped) shape_scores(unit, scores[b], row, r, start, p.logits_soft_cap);
        const uint32_t visited = word >> unit.lane % 4 * 8 & 0xff;
        hide_unseen(scores[b], r, visited & seen_places(visible, row.position, start));
      }
    }
  }

  // Logits become weights, which are added to the sums so far.
  template <class Unit>
  EFFINFER_DEVICE void add(Unit& unit, const TileRow* rows, bool shaped, Scores& scores) {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float factor = factor_of(rows[unit.lane / 4 + 8 * r], shaped);
      const float before = rows_[r].max;
      rows_[r].max = fmaxf(before, reference_of(highest(unit, scores, r), factor));
      growth_[r] = unit.exp2(before - rows_[r].max);
      rows_[r].sum = rounded_product(rows_[r].sum, growth_[r]);
      EFFINFER_UNROLL
      for (int b = 0; b < kStepBlocks; ++b) {
        make_weights(unit, scores[b], r, factor, rows_[r].max, rows_[r].sum);
      }
    }
  }
  // 0, which depends on all weights so far: what is done with it waits for them. Without it ptxas
  // moves waits for products that are under way to before the powers of two.
  EFFINFER_DEVICE int settled() const { return rows_[0].sum < 0.0f || rows_[1].sum < 0.0f ? 1 : 0; }
  // As operands.
  template <class Unit>
  EFFINFER_DEVICE static void round(Unit& unit, Scores& scores, Weights& weights) {
    EFFINFER_UNROLL
    for (int b = 0; b < kStepBlocks; ++b) {
      EFFINFER_UNROLL
      for (int s = 0; s < 2; ++s) weights[b][s] = Multiply::weight_quad(unit, scores[b], s);
    }
  }
  // The values so far to the maximum of the step that was added.
  EFFINFER_DEVICE void scale(Values& values) const {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      EFFINFER_UNROLL
      for (int column = 0; column < kColumns; ++column) {
        EFFINFER_UNROLL
        for (int d = 0; d < 8; ++d) {
          float& value = value_at(values[column], d, r);
          value = rounded_product(value, growth_[r]);
        }
      }
    }
  }

  // What has been added; begins anew.
  template <class Unit>
  EFFINFER_DEVICE void take(Unit& unit, RowState (&rows)[2]) {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      rows[r] = {rows_[r].max, row_sum(unit, rows_[r].sum)};
      rows_[r] = RowState{};
    }
  }

 private:
  // Of a row's scores.
  template <class Unit>
  EFFINFER_DEVICE static float highest(Unit& unit, Scores& scores, int r) {
    // Two at a time, as neither waits for the other.
    float max[2] = {score_at(scores[0], 0, r), score_at(scores[0], 1, r)};
    EFFINFER_UNROLL
    for (int i = 2; i < 8 * kStepBlocks; ++i) {
      max[i % 2] = fmaxf(max[i % 2], score_at(scores[i / 8], i % 8, r));
    }
    return row_max(unit, fmaxf(max[0], max[1]));
  }

  RowState rows_[2];  // the sums are the lane's own
  float growth_[2];   // by which the last step made them smaller
};

}  // namespace effinfer::cuda
