// Softmax of 16 rows over a chunk of 256 tokens, whose scores lie in the registers of the block's
// warps: 256 / kWarps tokens each, in blocks of 32 (bodies/fragments.h). The maximum is the
// chunk's, so nothing that was summed is ever scaled anew within it.
//
// Maxima and sums go over a lane's own tokens, over the four lanes of a row, then over the warps,
// each in a fixed order: a row's bits depend on its own scores and places alone. A kernel whose
// warps have whole chunks (bodies/prefill_tile.h) adds up in the same order.
//
// Weights are powers of two. A score is multiplied by the scale and by log2(e), and the maximum
// subtracted, in one multiply-add; only caps, slopes and scales of keys come before it.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/attention_chunks.h"
#include "cuda/bodies/seen_words.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

// The maximum of no scores: finite, so that differences of maxima are never NaN, and far below any
// score, so that exp() of the difference is 0.
inline constexpr float kNoScore = -1e30f;

// a b, rounded: as a sum with zero, so that no compiler makes it a part of a sum that follows,
// here and not there.
EFFINFER_DEVICE float rounded_product(float a, float b) {
  return fmaf(a, b, 0.0f);
}

// log2(e), which makes powers of two of powers of e.
inline constexpr float kLog2e = 1.44269504f;

// A row's maximum of binary logarithms, sum of weights, and weighted values as far as a lane has
// them: of the chunks that came before, together with one. The maximum's own side has a factor of
// exactly 1, a side without keys adds exact zeros.
struct RowState {
  float max = kNoScore;
  float sum = 0.0f;
};
struct Factors {
  float before;
  float chunk;
};
template <class Unit>
EFFINFER_DEVICE Factors factors_of(Unit& unit, const RowState& before, const RowState& chunk) {
  const float highest = fmaxf(before.max, chunk.max);
  return {unit.exp2(before.max - highest), unit.exp2(chunk.max - highest)};
}
EFFINFER_DEVICE float fold_value(float before, float chunk, const Factors& factors) {
  return fmaf(chunk, factors.chunk, rounded_product(before, factors.before));
}
template <class Unit>
EFFINFER_DEVICE Factors fold_row(Unit& unit, RowState& row, const RowState& chunk) {
  const Factors factors = factors_of(unit, row, chunk);
  row.max = fmaxf(row.max, chunk.max);
  row.sum = fold_value(row.sum, chunk.sum, factors);
  return factors;
}

// Whether scores are more than scaled: capped or sloped, or keys count as lists of them say, or a
// plane.
EFFINFER_DEVICE bool is_shaped(const ops::AttentionProblem& p) {
  return p.logits_soft_cap > 0.0f || p.alibi_slopes != nullptr || p.visits.has_weights() ||
         p.weighs_keys();
}
// What a row's scores, shaped or not, are multiplied by: TileRow::scale has done its part where
// they are.
EFFINFER_DEVICE float factor_of(const TileRow& row, bool shaped) {
  return shaped ? 1.0f : row.scale;
}

// A block of scores as a lane has it: rows lane / 4 and lane / 4 + 8, tokens 8 (lane % 4) on.
using BlockScores = float[4][4];
// Token 8 (lane % 4) + t of a block, row lane / 4 + 8 r.
EFFINFER_DEVICE float& score_at(BlockScores& block, int t, int r) {
  return block[t % 4][2 * r + t / 4];
}

// The first one becomes the last, the others move up. Registers have no index: code that takes what
// is first, and turns it as often as there are numbers or blocks, is there once, not for each.
template <int kCount>
EFFINFER_REGISTERS EFFINFER_DEVICE void turn(float (&x)[kCount]) {
  const float first = x[0];
  EFFINFER_UNROLL
  for (int i = 0; i + 1 < kCount; ++i) x[i] = x[i + 1];
  x[kCount - 1] = first;
}
template <int kCount>
EFFINFER_REGISTERS EFFINFER_DEVICE void turn(BlockScores (&blocks)[kCount]) {
  EFFINFER_UNROLL
  for (int i = 0; i < 16; ++i) {
    const float first = blocks[0][i / 4][i % 4];
    EFFINFER_UNROLL
    for (int b = 0; b + 1 < kCount; ++b) blocks[b][i / 4][i % 4] = blocks[b + 1][i / 4][i % 4];
    blocks[kCount - 1][i / 4][i % 4] = first;
  }
}

// Scaled, capped and sloped: binary logarithms. `start` is the place of token 0.
template <class Unit>
EFFINFER_DEVICE void shape_scores(Unit& unit, BlockScores& block, const TileRow& row, int r,
                                  int32_t start, float soft_cap) {
  EFFINFER_UNROLL
  for (int t = 0; t < 8; ++t) {
    float& x = score_at(block, t, r);
    x = rounded_product(x, row.scale);
  }
  if (soft_cap > 0.0f) {
    // cap * tanh(x) = cap - 2 cap / (e^2x + 1), for x in parts of the cap.
    // A division would be a call that is made whether there is a cap or not.
    const float twice = 2.0f * unit.reciprocal(soft_cap);
    const float cap = rounded_product(soft_cap, kLog2e);
    EFFINFER_UNROLL
    for (int t = 0; t < 8; ++t) {
      float& x = score_at(block, t, r);
      x = fmaf(-2.0f * cap, unit.reciprocal(unit.exp2(rounded_product(x, twice)) + 1.0f), cap);
    }
  }
  if (row.slope != 0.0f) {
    const float slope = rounded_product(row.slope, kLog2e);
    const auto distance = static_cast<float>(start - row.position);
    EFFINFER_UNROLL
    for (int t = 0; t < 8; ++t) {
      float& x = score_at(block, t, r);
      x = fmaf(slope, distance + static_cast<float>(t), x);
    }
  }
}

// How often 8 keys from `start` on count, a multiple of 8: added to logits that are shaped. Null:
// all of them once. In a tree of drafts places are taken for slots, as drafts are new and count
// once.
template <class Unit>
EFFINFER_DEVICE void add_log_weights(Unit& unit, BlockScores& block, int r, const float* weights,
                                     int32_t start) {
  if (weights == nullptr) return;
  EFFINFER_UNROLL
  for (int half = 0; half < 2; ++half) {
    const Quad four = unit.load(reinterpret_cast<const Quad*>(weights + start) + half);
    EFFINFER_UNROLL
    for (int t = 0; t < 4; ++t) {
      float& x = score_at(block, 4 * half + t, r);
      x = fmaf(float_of(four.words[t]), kLog2e, x);
    }
  }
}

// What the first key of a sequence has beside, to a chunk's first block. `first_row`: of the warp
// in its tile.
template <class Unit>
EFFINFER_DEVICE void add_first_logits(Unit& unit, BlockScores& block, const ItemUnits& item,
                                      int32_t chunk, int first_row) {
  if (chunk > 0 || item.firsts == nullptr || unit.lane % 4 != 0) return;
  EFFINFER_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + unit.lane / 4 + 8 * r;
    float& x = score_at(block, 0, r);
    x = fmaf(unit.load(item.firsts + row % item.num_heads), kLog2e, x);
  }
}

// -infinity where a row sees nothing: bit t of `seen` is token t.
EFFINFER_REGISTERS EFFINFER_DEVICE void hide_unseen(BlockScores& block, int r, uint32_t seen) {
  if (seen == 0xff) return;
  EFFINFER_UNROLL
  for (int t = 0; t < 8; ++t) {
    if ((seen >> t & 1) == 0) score_at(block, t, r) = -INFINITY;
  }
}

// Of the highest of a row's scores: the reference of its weights.
EFFINFER_DEVICE float reference_of(float highest, float factor) {
  return fmaxf(rounded_product(highest, factor), kNoScore);
}

// Scores become weights; the lane's `sum` goes on, token by token.
template <class Unit>
EFFINFER_REGISTERS EFFINFER_DEVICE void make_weights(Unit& unit, BlockScores& block, int r,
                                                     float factor, float reference, float& sum) {
  EFFINFER_UNROLL
  for (int t = 0; t < 8; ++t) {
    float& x = score_at(block, t, r);
    x = unit.exp2(fmaf(x, factor, -reference));
    sum += x;
  }
}

// Over the four lanes of a row.
template <class Unit>
EFFINFER_DEVICE float row_max(Unit& unit, float max) {
  max = fmaxf(max, unit.shfl_xor(max, 1));
  return fmaxf(max, unit.shfl_xor(max, 2));
}
template <class Unit>
EFFINFER_DEVICE float row_sum(Unit& unit, float sum) {
  sum += unit.shfl_xor(sum, 1);
  return sum + unit.shfl_xor(sum, 2);
}

// Of a block whose warps share a chunk.
template <int kWarps>
struct ChunkSoftmax {
  static constexpr int kBlocks = 8 / kWarps;  // of a warp
  using Scores = BlockScores[kBlocks];

  struct Shared {
    float max[kWarps][kTileRows];
    float sum[kWarps][kTileRows];
  };

  // The warp's maxima to shared memory.
  template <class Unit>
  EFFINFER_DEVICE static void share_max(Unit& unit, Scores& scores, Shared& shared) {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      float max = -INFINITY;
      EFFINFER_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        EFFINFER_UNROLL
        for (int t = 0; t < 8; ++t) max = fmaxf(max, score_at(scores[b], t, r));
      }
      max = row_max(unit, max);
      if (unit.lane % 4 == 0) shared.max[unit.warp][unit.lane / 4 + 8 * r] = max;
    }
  }

  // When all warps have shared theirs: the chunk's maxima of scores times `factor`; scores become
  // weights, and their sums go to shared memory.
  template <class Unit>
  EFFINFER_DEVICE static void set_weights(Unit& unit, Scores& scores, const float (&factor)[2],
                                          Shared& shared, float (&max)[2]) {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = unit.lane / 4 + 8 * r;
      float highest = shared.max[0][row];
      EFFINFER_UNROLL
      for (int w = 1; w < kWarps; ++w) highest = fmaxf(highest, shared.max[w][row]);
      max[r] = reference_of(highest, factor[r]);
      float sum = 0.0f;
      EFFINFER_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        make_weights(unit, scores[b], r, factor[r], max[r], sum);
      }
      sum = row_sum(unit, sum);
      if (unit.lane % 4 == 0) shared.sum[unit.warp][row] = sum;
    }
  }

  // When all warps have.
  EFFINFER_DEVICE static float sum_of(const Shared& shared, int row) {
    float sum = shared.sum[0][row];
    EFFINFER_UNROLL
    for (int w = 1; w < kWarps; ++w) sum += shared.sum[w][row];
    return sum;
  }
};

}  // namespace effinfer::cuda
