// Attention of a tile of up to 128 (row, head) pairs over the pages of its sequence: a block an
// item. For the many rows of prompts; decoding's kernel is bodies/attention_tile.h.
//
// A warp has 16 rows, and of a chunk of 256 tokens all scores in registers; keys and values come to
// all warps together (bodies/prefill_ring.h):
//
//   scores of 256 tokens | maximum | weights, into A operands | values, 32 dims after the other,
//   each folded into what came before
//
// which is what decoding's kernel computes, in the same order, so that a row has the same bits in
// both: the maximum is the chunk's, sums of weights are added up by groups of tokens as its warps
// have them, and products of 32 dims start from zero in each chunk.
//
// A chunk that all rows see whole takes a path without a mask or a branch; at the edges (diagonal,
// window, lists of visits, last page) warps leave out the blocks of 32 tokens that they do not see.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/attention_output.h"
#include "cuda/bodies/attention_rows.h"
#include "cuda/bodies/fragments.h"
#include "cuda/bodies/lane_queries.h"
#include "cuda/bodies/prefill_result.h"
#include "cuda/bodies/prefill_ring.h"
#include "cuda/bodies/prefill_rows.h"
#include "cuda/bodies/prefill_shared.h"
#include "cuda/bodies/seen_words.h"
#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

template <class Unit, DType kType, int kColumns, int kWarps, int kDepth, int kHeld>
class PrefillTileRun {
 public:
  using Shared = PrefillShared<kType, kColumns, kWarps, kDepth, kHeld>;
  using Ring = PrefillRing<kType, kColumns, kWarps, kDepth>;
  using Stages = PrefillStages<kColumns>;
  using Result = PrefillResult<kColumns, kWarps, kHeld>;
  // int8 is bfloat16 by the time that it is multiplied.
  using Multiply = Products<kType == DType::f16 ? DType::f16 : DType::bf16, 1>;
  using Scores = BlockScores[kChunkBlocks];
  using Weights = Quad[kChunkBlocks][2];
  // Widening leaves no registers for a second path, and bounds the time anyway.
  static constexpr bool kHasInside = !KvBlock<kType>::kScaled;
  // Columns of keys without a loop. Edges beside another path are rare; one over 96 dims spills.
  static constexpr int kUnrolled = kColumns == 8 ? 2 : kColumns;
  static constexpr int kEdgeUnrolled = kHasInside && kColumns != 3 ? 1 : kUnrolled;
  // Warps of decoding's kernel.
  static constexpr int kGroups = kColumns <= 2 ? 2 : kColumns <= 4 ? 4 : 8;

  EFFINFER_DEVICE PrefillTileRun(Unit& unit, const AttentionParams& params, Shared& shared)
      : unit_(unit),
        p_(params.p),
        shared_(shared),
        ring_(unit, params.p, tile(), shared.ring),
        result_(unit, params, shared.result) {}

  EFFINFER_DEVICE void run() {
    if (unit_.warp == 0) find_first();
    for (int i = unit_.thread; i < kWarps * kTileRows; i += kWarps * kWarp) {
      shared_.rows[i] = row_of(p_, tile(), i);
    }
    unit_.sync();
    ring_.start(unit_);
    const ChunkPass* passes = shared_.ring.passes;
    for (int at = 0; passes[at].chunk >= 0; at ^= 1) {
      if (passes[at].queries != kSameQueries) set_queries(passes[at].queries);
      if (kHasInside && is_inside(passes[at])) {
        do_chunk<false>(at);
      } else {
        do_chunk<true>(at);
      }
      ring_.end_pass();
    }
    finish();
  }

 private:
  // Looked up before and after all chunks, and in no register between.
  EFFINFER_DEVICE const ops::AttentionItem& item() const { return p_.work.items[unit_.block]; }
  EFFINFER_DEVICE const ops::AttentionTile& tile() const { return p_.work.tiles[item().tile]; }

  EFFINFER_DEVICE TileRow* own_rows() { return shared_.rows + unit_.warp * kTileRows; }

  EFFINFER_DEVICE void find_first() {
    if (unit_.lane == 0) {
      shared_.units = units_of(p_, item(), tile());
      shared_.visible = visibility_of(p_, tile());
      Result::begin_item(item(), tile(), shared_.result);
    }
    unit_.sync_warp();
    ChunkWalk::first(unit_, shared_.units).store(unit_, shared_.units, shared_.ring.passes[0]);
  }

  // The warp's own, for keys at a distance_to().
  EFFINFER_DEVICE void set_queries(int distance) {
    set_lane_queries<kType>(unit_, p_, tile(), queries_for(p_, distance), unit_.warp * kTileRows,
                            own_rows(), 0, 1, shared_.queries[unit_.warp]);
    if constexpr (Multiply::kScalesQueries) unit_.sync_warp();  // what was scaled
  }

  // Whether every row of the tile sees all of the chunk, and scores are only scaled.
  EFFINFER_DEVICE bool is_inside(const ChunkPass& pass) const {
    if (p_.k.dims != kColumns * kBlock || is_shaped(p_) || !is_visited_whole(pass)) return false;
    const RowSpan rows = {shared_.rows[0].position, shared_.rows[result_.num_rows() - 1].position};
    const int32_t start = pass.chunk * kChunkTokens;
    return sees_all(shared_.visible, rows, start, start + kChunkTokens);
  }

  EFFINFER_DEVICE RowSpan own_span() const {
    return span_of(shared_.rows, unit_.warp * kTileRows, result_.num_rows());
  }

  template <bool kEdge>
  EFFINFER_DEVICE void do_chunk(int at) {
    const ChunkPass& pass = shared_.ring.passes[at];
    const uint32_t live = kEdge ? live_blocks(shared_.visible, own_span(), pass) : 0xff;
    Scores scores = {};
    add_scores<kEdge>(at, live, scores);
    if constexpr (kEdge) set_logits(pass, live, scores);
    const auto& first = ring_.take(unit_, at, Stages::kKeyStages);
    Weights weights;
    RowState chunk[2];
    set_weights<kEdge>(at, live, scores, weights, chunk);
    result_.begin_chunk(unit_, pass.chunk, chunk);
    add_values<kEdge, kHeld == 0>(first, 0, live, weights);
    EFFINFER_UNROLL
    for (int i = 1; i < kHeld; ++i) add_values<kEdge>(take_values(at, i), i, live, weights);
    EFFINFER_UNROLL_BY(kColumns == 8 ? 1 : kColumns)  // of wide heads once
    for (int i = kHeld > 0 ? kHeld : 1; i < kColumns; ++i) {
      add_values<kEdge, true>(take_values(at, i), i, live, weights);
    }
  }
  EFFINFER_DEVICE const PrefillStage& take_values(int at, int column) {
    return ring_.take(unit_, at, Stages::kKeyStages + column);
  }

  // A product of a step of 16 dims, or of 16 tokens, of a block.
  EFFINFER_DEVICE void multiply(float (&d)[4][4], const Quad& a, const PrefillBlock& block,
                                int step) {
    const Quad low = block[2 * step][unit_.lane];
    const Quad high = block[2 * step + 1][unit_.lane];
    EFFINFER_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t pairs[2] = {low.words[i], high.words[i]};
      Multiply::multiply(unit_, d[i], a, pairs);
    }
  }

  // The next pass is looked up while the first keys are multiplied.
  template <bool kEdge>
  EFFINFER_DEVICE void add_scores(int at, uint32_t live, Scores& scores) {
    ChunkWalk walk;
    EFFINFER_UNROLL
    for (int stage = 0; stage < Stages::kKeyStages; ++stage) {
      const PrefillStage& keys = ring_.take(unit_, at, stage);
      if (stage == 0 && unit_.warp == 0) {
        walk = ChunkWalk::after(unit_, shared_.units, shared_.ring.passes[at]);
      }
      EFFINFER_UNROLL_BY(kEdge ? kEdgeUnrolled : kUnrolled)
      for (int column = 0; column < kColumns; ++column) {
        EFFINFER_UNROLL
        for (int step = 2 * column; step < 2 * column + 2; ++step) {
          if (kEdge && 16 * step >= p_.k.dims) continue;
          const Quad a = shared_.queries[unit_.warp][step][unit_.lane];
          EFFINFER_UNROLL
          for (int b = 0; b < Stages::kTokenBlocks; ++b) {
            const int block = stage * Stages::kTokenBlocks + b;
            if (kEdge && (live >> block & 1) == 0) continue;
            multiply(scores[block], a, keys[b * kColumns + column], step % 2);
          }
        }
      }
      if (stage == 0 && unit_.warp == 0) {
        walk.store(unit_, shared_.units, shared_.ring.passes[at ^ 1]);
      }
    }
  }

  EFFINFER_DEVICE void scale_block(int at, int b, BlockScores& block, int of) {
    EFFINFER_UNROLL
    for (int t = 0; t < 8; ++t) {
      const float scale = ring_.scale_of(unit_, at, of, b, t);
      EFFINFER_UNROLL
      for (int r = 0; r < 2; ++r) {
        float& x = score_at(block, t, r);
        x = rounded_product(x, scale);
      }
    }
  }

  // At an edge: two blocks at a time.
  EFFINFER_DEVICE void set_logits(const ChunkPass& pass, uint32_t live, Scores& scores) {
    EFFINFER_NO_UNROLL
    for (int b = 0; b < kChunkBlocks; b += 2) {
      EFFINFER_UNROLL
      for (int i = 0; i < 2; ++i) {
        if ((live >> (b + i) & 1) != 0) set_block_logits(pass, b + i, scores[i]);
      }
      turn(scores);
      turn(scores);
    }
    add_first_logits(unit_, scores[0], shared_.units, pass.chunk, unit_.warp * kTileRows);
  }

  EFFINFER_DEVICE void set_block_logits(const ChunkPass& pass, int b, BlockScores& scores) {
    const bool shaped = is_shaped(p_);
    if constexpr (KvBlock<kType>::kScaled) scale_block(&pass != shared_.ring.passes, b, scores, 0);
    const int32_t first = pass.chunk * kChunkTokens + b * kBlock;
    const auto word = static_cast<uint32_t>(pass.words[b / 2] >> b % 2 * kBlock);
    const bool whole = word == ~0u && sees_all(shared_.visible, own_span(), first, first + kBlock);
    if (whole && !shaped) return;
    const int32_t start = first + unit_.lane % 4 * 8;
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      const TileRow row = own_rows()[unit_.lane / 4 + 8 * r];
      if (shaped) shape_scores(unit_, scores, row, r, start, p_.logits_soft_cap);
      const uint32_t visited = word >> unit_.lane % 4 * 8 & 0xff;
      if (visited != 0) add_log_weights(unit_, scores, r, shared_.units.weights, start);
      hide_unseen(scores, r, visited & seen_places(shared_.visible, row.position, start));
    }
  }

  // The chunk's maxima and sums; weights become operands of the products with values. What is not
  // live is selected away: around branches too much would be kept in registers.
  template <bool kEdge>
  EFFINFER_DEVICE void set_weights(int at, uint32_t live, Scores& scores, Weights& weights,
                                   RowState (&chunk)[2]) {
    const auto is_live = [&](int b) { return !kEdge || (live >> b & 1) != 0; };
    float factor[2];
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      float highest = -INFINITY;
      EFFINFER_UNROLL
      for (int b = 0; b < kChunkBlocks; ++b) {
        float max = score_at(scores[b], 0, r);
        EFFINFER_UNROLL
        for (int t = 1; t < 8; ++t) max = fmaxf(max, score_at(scores[b], t, r));
        highest = is_live(b) ? fmaxf(highest, max) : highest;
      }
      factor[r] = factor_of(own_rows()[unit_.lane / 4 + 8 * r], kEdge && is_shaped(p_));
      chunk[r].max = reference_of(row_max(unit_, highest), factor[r]);
    }
    float sums[2][kGroups] = {};
    EFFINFER_UNROLL
    for (int b = 0; b < kChunkBlocks; ++b) {
      EFFINFER_UNROLL
      for (int r = 0; r < 2; ++r) {
        float& sum = sums[r][b * kGroups / kChunkBlocks];
        float after = sum;
        make_weights(unit_, scores[b], r, factor[r], chunk[r].max, after);
        sum = is_live(b) ? after : sum;
      }
      if constexpr (KvBlock<kType>::kScaled) scale_block(at, b, scores[b], 1);
      EFFINFER_UNROLL
      for (int s = 0; s < 2; ++s) weights[b][s] = Multiply::weight_quad(unit_, scores[b], s);
    }
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      chunk[r].sum = row_sum(unit_, sums[r][0]);
      EFFINFER_UNROLL
      for (int g = 1; g < kGroups; ++g) chunk[r].sum += row_sum(unit_, sums[r][g]);
    }
  }

  // `kShared`: behind those of the result's columns that are in registers.
  template <bool kEdge, bool kShared = false>
  EFFINFER_DEVICE void add_values(const PrefillStage& values, int column, uint32_t live,
                                  const Weights& weights) {
    if (kEdge && column * kBlock >= p_.v.dims) return;
    LaneValues products = {};
    EFFINFER_UNROLL
    for (int b = 0; b < kChunkBlocks; ++b) {
      if (kEdge && (live >> b & 1) == 0) continue;
      EFFINFER_UNROLL
      for (int s = 0; s < 2; ++s) multiply(products, weights[b][s], values[b], s);
    }
    result_.template add<kShared>(unit_, column, products);
  }

  EFFINFER_DEVICE void finish() {
    if (shared_.result.partial < 0) return result_.store(unit_, tile());
    const int32_t index = item().merge;
    if (!ends_last_item(unit_, p_, index, shared_.is_last)) return;
    result_.merge(unit_, tile(), p_.work.merges[index]);
  }

  Unit& unit_;
  const ops::AttentionProblem& p_;
  Shared& shared_;
  Ring ring_;
  Result result_;
};

}  // namespace effinfer::cuda
