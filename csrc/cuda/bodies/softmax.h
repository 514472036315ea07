// Softmax of 16 rows over a chunk of 256 tokens, whose scores lie in the registers of the block's
// warps: 256 / kWarps tokens each, in blocks of 32 (bodies/fragments.h). The maximum is the
// chunk's, so nothing that was summed is ever scaled anew within it.
//
// Maxima and sums go over a lane's own tokens, over the four lanes of a row, then over the warps,
// each in a fixed order: a row's bits depend on its own scores and places alone.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/attention_chunks.h"
#include "cuda/bodies/seen_words.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

// The maximum of no scores: finite, so that differences of maxima are never NaN, and far below any
// score, so that exp() of the difference is 0.
inline constexpr float kNoScore = -1e30f;

// a b, rounded: as a sum with zero, so that no compiler makes it a part of a sum that follows,
// here and not there.
EFFINFER_DEVICE float rounded_product(float a, float b) {
  return fmaf(a, b, 0.0f);
}

// e^(x - reference), for x up to the reference.
EFFINFER_DEVICE float weight_of(float x, float reference) {
  return exp2f(rounded_product(x - reference, 1.44269504f));
}

// A row's maximum, sum of weights, and weighted values as far as a lane has them: of the chunks
// that came before, together with one. The maximum's own side has a factor of exactly 1, a side
// without keys adds exact zeros.
struct RowState {
  float max = kNoScore;
  float sum = 0.0f;
};
struct Factors {
  float before;
  float chunk;
};
EFFINFER_DEVICE Factors factors_of(const RowState& before, const RowState& chunk) {
  const float highest = fmaxf(before.max, chunk.max);
  return {weight_of(before.max, highest), weight_of(chunk.max, highest)};
}
EFFINFER_DEVICE float fold_value(float before, float chunk, const Factors& factors) {
  return fmaf(chunk, factors.chunk, rounded_product(before, factors.before));
}
EFFINFER_DEVICE Factors fold_row(RowState& row, const RowState& chunk) {
  const Factors factors = factors_of(row, chunk);
  row.max = fmaxf(row.max, chunk.max);
  row.sum = fold_value(row.sum, chunk.sum, factors);
  return factors;
}

// A lane's part of a warp's blocks: rows lane / 4 and lane / 4 + 8, tokens 8 (lane % 4) on.
template <int kWarps>
struct ChunkSoftmax {
  static constexpr int kBlocks = 8 / kWarps;  // of a warp
  using Scores = float[kBlocks][4][4];

  struct Shared {
    float max[kWarps][kTileRows];
    float sum[kWarps][kTileRows];
  };

  // Token 8 (lane % 4) + t of a block, row lane / 4 + 8 r.
  EFFINFER_DEVICE static float& at(float (&block)[4][4], int t, int r) {
    return block[t % 4][2 * r + t / 4];
  }

  // Of logits: scores times `row.scale`, and -infinity where a row sees nothing.
  template <class Scale>
  EFFINFER_DEVICE static void set_logits(float (&block)[4][4], const TileRow& row, int r,
                                         uint32_t seen, int32_t start, float soft_cap,
                                         Scale&& scale) {
    EFFINFER_UNROLL
    for (int t = 0; t < 8; ++t) {
      float& x = at(block, t, r);
      x = scale(rounded_product(x, row.scale), t);
    }
    if (soft_cap > 0.0f) {
      const float inverse = 1.0f / soft_cap;
      EFFINFER_UNROLL
      for (int t = 0; t < 8; ++t) {
        float& x = at(block, t, r);
        x = rounded_product(tanhf(rounded_product(x, inverse)), soft_cap);
      }
    }
    if (row.slope != 0.0f) {
      EFFINFER_UNROLL
      for (int t = 0; t < 8; ++t) {
        float& x = at(block, t, r);
        x = fmaf(row.slope, static_cast<float>(start + t - row.position), x);
      }
    }
    if (seen == 0xff) return;
    EFFINFER_UNROLL
    for (int t = 0; t < 8; ++t) {
      if ((seen >> t & 1) == 0) at(block, t, r) = -INFINITY;
    }
  }

  // The warp's maxima to shared memory.
  template <class Unit>
  EFFINFER_DEVICE static void share_max(Unit& unit, Scores& scores, Shared& shared) {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      float max = kNoScore;
      EFFINFER_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        EFFINFER_UNROLL
        for (int t = 0; t < 8; ++t) max = fmaxf(max, at(scores[b], t, r));
      }
      max = fmaxf(max, unit.shfl_xor(max, 1));
      max = fmaxf(max, unit.shfl_xor(max, 2));
      if (unit.lane % 4 == 0) shared.max[unit.warp][unit.lane / 4 + 8 * r] = max;
    }
  }

  // When all warps have shared theirs: the chunk's maxima; scores become weights, and their sums
  // go to shared memory.
  template <class Unit>
  EFFINFER_DEVICE static void set_weights(Unit& unit, Scores& scores, Shared& shared,
                                          float (&max)[2]) {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = unit.lane / 4 + 8 * r;
      max[r] = kNoScore;
      EFFINFER_UNROLL
      for (int w = 0; w < kWarps; ++w) max[r] = fmaxf(max[r], shared.max[w][row]);
      float sum = 0.0f;
      EFFINFER_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        EFFINFER_UNROLL
        for (int t = 0; t < 8; ++t) {
          float& x = at(scores[b], t, r);
          x = weight_of(x, max[r]);
          sum += x;
        }
      }
      sum += unit.shfl_xor(sum, 1);
      sum += unit.shfl_xor(sum, 2);
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
