// A warp's part of attention over plain rows: 16 query rows with the tokens of a stage.
//
// Fragments of mma.m16n8k16, lane = 4 c + q: scores of rows c and c + 8, of tokens 8 n + 2 q and
// the next one of block n. As they lie, rounded in pairs, they are the A operand of the values.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/plain_rows.h"
#include "cuda/unit.h"
#include "effinfer/dtype.h"

namespace effinfer::cuda {

// What all lanes look up of a row.
struct PlainRow {
  int32_t position;  // -1: there is no such row
  float slope;       // ALiBi
  int64_t mask_bit;  // of the row's first token
};

// The maximum of no scores: finite, so that differences of maxima are never NaN.
inline constexpr float kPlainNoScore = -1e30f;

// e^(x - reference), for x up to the reference. The sum with zero keeps compilers from making the
// product a part of another sum.
EFFINFER_DEVICE float plain_weight(float x, float reference) {
  return exp2f(fmaf(x - reference, 1.44269504f, 0.0f));
}

// Of (row, head) pair `index` of a tile.
EFFINFER_DEVICE PlainRow plain_row(const ops::AttentionProblem& p, const ops::AttentionTile& tile,
                                   int index) {
  PlainRow row = {-1, 0.0f, 0};
  if (index >= tile.num_rows * tile.num_heads) return row;
  const int32_t place = tile.first_row + index / tile.num_heads;
  const int32_t token = place - p.batch.qo_indptr[tile.sequence];
  row.position =
      p.positions != nullptr ? p.positions[place] : p.batch.step_begin(tile.sequence) + token;
  if (p.alibi_slopes != nullptr) {
    row.slope = p.alibi_slopes[tile.first_head + index % tile.num_heads];
  }
  if (p.mask != nullptr) {
    const int64_t stride = p.mask_row_strides[tile.sequence];
    row.mask_bit = tile.first_span < 0 ? p.mask_starts[tile.sequence] + token * stride
                                       : (tile.list_row + index / tile.num_heads) * stride;
  }
  return row;
}

// Whether a row sees a token whose bit of the mask is `bit`.
EFFINFER_DEVICE bool plain_sees(const ops::AttentionProblem& p, const PlainRow& row, int32_t token,
                                int64_t bit) {
  bool seen = row.position >= 0;
  if (p.causal) seen = seen && token <= row.position;
  if (p.window_left >= 0) {
    seen = seen && (token >= row.position - p.window_left || token < p.sink_tokens);
  }
  if (p.mask != nullptr && seen) seen = (p.mask[bit / 8] >> bit % 8 & 1) != 0;
  return seen;
}

// A scaled product under the cap.
EFFINFER_DEVICE float plain_capped(const ops::AttentionLogits& p, float x) {
  return fmaf(tanhf(fmaf(x, 1.0f / p.logits_soft_cap, 0.0f)), p.logits_soft_cap, 0.0f);
}

// A query's product with a key, as a logit.
EFFINFER_DEVICE float plain_logit(const ops::AttentionLogits& p, float product) {
  const float x = fmaf(product, p.sm_scale, 0.0f);
  return p.logits_soft_cap <= 0.0f ? x : plain_capped(p, x);
}

// The same of a row and a token, ALiBi included.
EFFINFER_DEVICE float plain_logit(const ops::AttentionLogits& p, const PlainRow& row, int32_t token,
                                  float product) {
  const float x = plain_logit(p, product);
  return row.slope == 0.0f ? x : fmaf(row.slope, static_cast<float>(token - row.position), x);
}

template <DType kType, int kDims>
struct PlainProducts {
  using Rows = PlainRows<kDims>;
  static constexpr int kBlocks = Rows::kStage / 8;  // of 8 tokens
  using Queries = Quad[kPlainRows][Rows::kChunks];
  using Scores = float[kBlocks][4];
  static constexpr int kOwnChunks = Rows::kChunks / Rows::kSplit;
  using Values = float[kOwnChunks][4];

  template <class Unit>
  EFFINFER_DEVICE static void multiply(Unit& unit, float (&d)[4], const uint32_t (&a)[4],
                                       uint32_t low, uint32_t high) {
    const uint32_t b[2] = {low, high};
    if constexpr (kType == DType::f16) {
      unit.mma_f16(d, a, b);
    } else {
      unit.mma(d, a, b);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void add_scores(Unit& unit, const Queries& queries,
                                         const typename Rows::Stage& keys, int dims,
                                         Scores& scores) {
    const int row = unit.lane % 16;
    const int token = unit.lane / 16 * 8 + unit.lane % 8;
    for (int step = 0; step < Rows::read_chunks(dims) / 2; ++step) {
      uint32_t a[4];
      unit.ldmatrix(a, &queries[row][swizzled(row, 2 * step + unit.lane / 16)]);
      EFFINFER_UNROLL
      for (int pair = 0; pair < kBlocks / 2; ++pair) {
        const int from = pair * 16 + token;
        uint32_t b[4];
        unit.ldmatrix(b, &keys[from][swizzled(from, 2 * step + unit.lane / 8 % 2)]);
        multiply(unit, scores[2 * pair], a, b[0], b[1]);
        multiply(unit, scores[2 * pair + 1], a, b[2], b[3]);
      }
    }
  }

  // Of the values' dims that the warp has.
  template <class Unit>
  EFFINFER_DEVICE static int first_chunk(Unit& unit) {
    return unit.warp / kPlainUnits * kOwnChunks;
  }

  template <class Unit>
  EFFINFER_DEVICE static void add_values(Unit& unit, const Scores& weights,
                                         const typename Rows::Stage& values, int dims,
                                         Values& sums) {
    const auto rounded = [&](float low, float high) {
      return kType == DType::f16 ? unit.f16x2(low, high) : unit.bf16x2(low, high);
    };
    // Places of chunks differ in their lowest three bits, those of rows 16 apart in none: four
    // addresses are all that the loops need.
    constexpr int kPairs = 4;
    const int row = unit.lane % 16;
    const Quad* from[kPairs];
    EFFINFER_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      from[i] = &values[row][first_chunk(unit) + swizzled(row, 2 * i + unit.lane / 16)];
    }
    EFFINFER_UNROLL
    for (int step = 0; step < kBlocks / 2; ++step) {
      const float (&low)[4] = weights[2 * step];
      const float (&high)[4] = weights[2 * step + 1];
      const uint32_t a[4] = {rounded(low[0], low[1]), rounded(low[2], low[3]),
                             rounded(high[0], high[1]), rounded(high[2], high[3])};
      EFFINFER_UNROLL
      for (int pair = 0; pair < kOwnChunks / 2; ++pair) {
        if (first_chunk(unit) * 8 + 16 * pair >= dims) continue;
        uint32_t b[4];
        const int offset = step * 16 * Rows::kChunks + pair / kPairs * 8;
        unit.ldmatrix_transposed(b, from[pair % kPairs] + offset);
        multiply(unit, sums[2 * pair], a, b[0], b[1]);
        multiply(unit, sums[2 * pair + 1], a, b[2], b[3]);
      }
    }
  }

  // Numbers of a unit's tokens from `begin` on times the tokens' scales, of which each lane has
  // those of two tokens.
  template <class Unit>
  EFFINFER_DEVICE static void multiply_tokens(Unit& unit, const float (&scales)[2], int begin,
                                              Scores& numbers) {
    EFFINFER_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      const int at = place_of(unit, begin, t);
      const float scale = unit.shfl(scales[(begin + t / 2 * 8) / kWarp], at % kWarp);
      numbers[t / 2][t % 2] *= scale;
      numbers[t / 2][2 + t % 2] *= scale;
    }
  }

  // Scores to logits: of a unit's tokens from `begin` on, -infinity where a row does not see one.
  // Those of a list are in `list`.
  template <class Unit>
  EFFINFER_DEVICE static void set_logits(Unit& unit, const ops::AttentionProblem& p,
                                         const ops::AttentionTile& tile,
                                         const PlainRow (&rows)[kPlainRows], int32_t index,
                                         int begin, const ListTokens& list, Scores& scores) {
    const bool has_list = tile.first_span >= 0;
    const int32_t first = index * kPlainUnit;
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      const PlainRow row = rows[unit.lane / 4 + 8 * r];
      EFFINFER_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        float& x = scores[t / 2][2 * r + t % 2];
        x = fmaf(x, p.sm_scale, 0.0f);
      }
      if (p.logits_soft_cap > 0.0f) {
        EFFINFER_UNROLL
        for (int t = 0; t < kTokens; ++t) {
          float& x = scores[t / 2][2 * r + t % 2];
          x = plain_capped(p, x);
        }
      }
      if (row.slope != 0.0f) {
        EFFINFER_UNROLL
        for (int t = 0; t < kTokens; ++t) {
          const int at = place_of(unit, begin, t);
          const int32_t token = has_list ? list.token[at] : first + at;
          float& x = scores[t / 2][2 * r + t % 2];
          x = fmaf(row.slope, static_cast<float>(token - row.position), x);
        }
      }
      const uint32_t seen = seen_tokens(unit, p, tile, row, first, begin, list);
      EFFINFER_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        if ((seen >> t & 1) == 0) scores[t / 2][2 * r + t % 2] = -INFINITY;
      }
    }
  }

  // Logits to weights, under a maximum that may grow: what was summed before is scaled anew.
  template <class Unit>
  EFFINFER_DEVICE static void set_weights(Unit& unit, Scores& scores, float (&max)[2],
                                          float (&sum)[2], Values& values) {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      float highest = max[r];
      EFFINFER_UNROLL
      for (int t = 0; t < 2 * kBlocks; ++t) highest = fmaxf(highest, scores[t / 2][2 * r + t % 2]);
      highest = fmaxf(highest, unit.shfl_xor(highest, 1));
      highest = fmaxf(highest, unit.shfl_xor(highest, 2));
      if (Rows::kStages > 1) {
        const float kept = plain_weight(max[r], highest);
        sum[r] *= kept;
        EFFINFER_UNROLL
        for (int d = 0; d < kOwnChunks; ++d) {
          values[d][2 * r] *= kept;
          values[d][2 * r + 1] *= kept;
        }
      }
      max[r] = highest;
      float own = 0.0f;
      EFFINFER_UNROLL
      for (int t = 0; t < 2 * kBlocks; ++t) {
        float& x = scores[t / 2][2 * r + t % 2];
        x = plain_weight(x, highest);
        own += x;
      }
      own += unit.shfl_xor(own, 1);
      own += unit.shfl_xor(own, 2);
      sum[r] += own;
    }
  }

 private:
  static constexpr int kTokens = 2 * kBlocks;  // of a lane in a row

  // Of token t of a lane in the unit.
  template <class Unit>
  EFFINFER_DEVICE static int place_of(Unit& unit, int begin, int t) {
    return begin + t / 2 * 8 + unit.lane % 4 * 2 + t % 2;
  }

  // A bit for each of a lane's tokens that the row sees. Most units are seen whole; for the others
  // a loop is code enough.
  template <class Unit>
  EFFINFER_DEVICE static uint32_t seen_tokens(Unit& unit, const ops::AttentionProblem& p,
                                              const ops::AttentionTile& tile, const PlainRow& row,
                                              int32_t first, int begin, const ListTokens& list) {
    const bool has_list = tile.first_span >= 0;
    const int32_t end = first + begin + Rows::kStage;
    bool whole = !has_list && p.mask == nullptr && end <= tile.num_tokens && row.position >= 0;
    if (p.causal) whole = whole && end - 1 <= row.position;
    if (p.window_left >= 0) whole = whole && first + begin >= row.position - p.window_left;
    if (whole) return ~0u;
    uint32_t seen = 0;
    EFFINFER_NO_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      const int at = place_of(unit, begin, t);
      if (first + at >= tile.num_tokens) break;
      int32_t token = first + at;
      int64_t bit = row.mask_bit + token;
      if (has_list) {
        token = list.token[at];
        if (p.mask != nullptr) bit = row.mask_bit + list.mask_bit[at];
      }
      seen |= static_cast<uint32_t>(plain_sees(p, row, token, bit)) << t;
    }
    return seen;
  }
};

}  // namespace effinfer::cuda
