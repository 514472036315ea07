// What an item begins and ends with, and a pass over a chunk, however keys and values come: scores
// become logits and then weights, and a chunk's result is folded into what came before or, of a
// divided tile, stored for the kernel that merges it.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/attention_result.h"
#include "cuda/bodies/attention_rows.h"
#include "cuda/bodies/attention_shared.h"
#include "cuda/bodies/fragments.h"
#include "cuda/bodies/lane_queries.h"
#include "cuda/bodies/seen_words.h"
#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

// A Feed is a BlockRing or a PageFeed, which know where scales of keys and values have come.
template <class Unit, DType kType, int kWarps, class Feed>
class AttentionPass {
 protected:
  using Shared = AttentionShared<kType, kWarps>;
  using Multiply = Products<kType, kWarps>;
  using Softmax = ChunkSoftmax<kWarps>;
  using Scores = typename Softmax::Scores;
  static constexpr int kBlocks = Shared::kBlocks;
  static constexpr bool kScaled = KvBlock<kType>::kScaled;

  EFFINFER_DEVICE AttentionPass(Unit& unit, const AttentionParams& params, Shared& shared)
      : unit_(unit),
        p_(params.p),
        shared_(shared),
        result_(params, shared.tile),
        feed_(unit, shared, params) {}

  // What is looked up is known before the kernel before has ended, but for lists of visits, and by
  // several warps at once.
  EFFINFER_DEVICE void begin() {
    if (p_.visits.has_lists()) unit_.wait_for_inputs();
    const ops::AttentionItem& item = p_.work.items[unit_.block];
    const ops::AttentionTile& tile = p_.work.tiles[item.tile];
    if (unit_.warp == 0) find_first(item, tile);
    if (unit_.warp == 1 && unit_.lane < kTileRows) {
      shared_.rows[unit_.lane] = row_of(p_, tile, unit_.lane);
    }
    if (unit_.warp == kWarps - 1 && unit_.lane == 0) {
      shared_.visible = visibility_of(p_, tile);
      shared_.plain = plain_places(p_, tile, shared_.visible);
      shared_.fetch = Fetch<kType>::of(p_, tile);
    }
    // Loads behind keys that are on their way take as long as these.
    if (unit_.warp == kWarps / 2 && unit_.lane == kTileRows) {
      shared_.item = item;
      shared_.tile = tile;
    }
    unit_.wait_for_inputs();
    unit_.sync();
  }

  // The index of the pass that follows the one with index `at`.
  EFFINFER_DEVICE static int after(int at) { return at == Shared::kPasses - 1 ? 0 : at + 1; }

  // Those for keys at a distance_to(), when no warp multiplies any.
  EFFINFER_DEVICE void set_queries(int distance) {
    const uint8_t* const queries = queries_for(p_, distance);
    if constexpr (kType == DType::f32) {
      Multiply::set_queries(unit_, shared_.operands, p_.k.dims, [&](int row, int dim) {
        return query_of(p_, shared_.tile, queries, row, dim) * query_sign(p_);
      });
    } else {
      TileRow* const rows = unit_.warp == 0 ? shared_.rows : nullptr;
      set_lane_queries<kType>(unit_, p_, shared_.tile, queries, 0, rows, unit_.warp, kWarps,
                              shared_.operands.queries);
    }
  }

  EFFINFER_DEVICE ChunkWalk walk_on(const ChunkPass& now) {
    if (unit_.warp != 0) return {};
    return ChunkWalk::after(unit_, shared_.units, now);
  }

  // Scores become weights, which all warps then have. Between its two barriers, when all know the
  // next pass and have multiplied their keys, is what `ask` does.
  template <class Ask>
  EFFINFER_DEVICE void make_weights(const ChunkPass& now, ChunkPass& next, const ChunkWalk& walk,
                                    Scores& scores, Ask&& ask) {
    set_logits(now, scores);
    Softmax::share_max(unit_, scores, shared_.softmax);
    if (unit_.warp == 0) walk.store(unit_, shared_.units, next);
    unit_.sync();
    ask();
    set_weights(now, scores);
    unit_.sync();
  }

  // When all values of a pass have been multiplied.
  EFFINFER_DEVICE void end_pass(const ChunkPass& now, const ChunkPass& next) {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      chunk_rows_[r].sum += Softmax::sum_of(shared_.softmax, unit_.lane / 4 + 8 * r);
    }
    feed_.end_pass();
    if (next.chunk != now.chunk) end_chunk(now.chunk);
  }

  EFFINFER_DEVICE void end() {
    if (shared_.item.partial < 0) result_.store(unit_, rows_, values_);
  }

 private:
  EFFINFER_DEVICE void find_first(const ops::AttentionItem& item, const ops::AttentionTile& tile) {
    if (unit_.lane == 0) shared_.units = units_of(p_, item, tile);
    unit_.sync_warp();
    ChunkWalk::first(unit_, shared_.units).store(unit_, shared_.units, shared_.passes[0]);
  }

  // When all warps have shared their maxima.
  EFFINFER_DEVICE void set_weights(const ChunkPass& pass, Scores& scores) {
    const bool shaped = is_shaped(p_);
    const int row = unit_.lane / 4;
    const float factor[2] = {factor_of(shared_.rows[row], shaped),
                             factor_of(shared_.rows[row + 8], shaped)};
    float max[2];
    Softmax::set_weights(unit_, scores, factor, shared_.softmax, max);
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      // Of a chunk's passes one at most has something of a row.
      chunk_rows_[r].max = fmaxf(chunk_rows_[r].max, max[r]);
    }
    share_weights(pass, scores);
  }

  EFFINFER_DEVICE void set_logits(const ChunkPass& pass, Scores& scores) {
    if (is_inside(pass)) return;
    if (!kScaled && shared_.plain.others_are_hidden) return hide_others(pass, scores);
    EFFINFER_NO_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      set_block_logits(pass, b, scores[0]);
      turn(scores);
    }
    if (unit_.warp == 0) add_first_logits(unit_, scores[0], shared_.units, pass.chunk, 0);
  }

  // Whether every row sees all of the chunk, and scores are only scaled.
  EFFINFER_DEVICE bool is_inside(const ChunkPass& pass) const {
    if constexpr (kScaled) return false;
    const int32_t start = pass.chunk * kChunkTokens;
    return pass.units == kAllUnits && start >= shared_.plain.begin &&
           start + kChunkTokens <= shared_.plain.end;
  }

  // The last chunk of a chain, or the first of a window: places that a row does not see.
  EFFINFER_DEVICE void hide_others(const ChunkPass& pass, Scores& scores) const {
    const Visibility all = shared_.visible;
    const int32_t start =
        pass.chunk * kChunkTokens + unit_.warp * kBlocks * kBlock + unit_.lane % 4 * 8;
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int32_t position = shared_.rows[unit_.lane / 4 + 8 * r].position;
      const bool is_last = all.causal && position < all.num_tokens;
      const int32_t end = (is_last ? position + 1 : all.num_tokens) - start;
      const int32_t begin = all.window_left < 0 ? 0 : position - all.window_left - start;
      EFFINFER_UNROLL
      for (int i = 0; i < 8 * kBlocks; ++i) {
        const int place = i / 8 * kBlock + i % 8;
        float& x = score_at(scores[i / 8], i % 8, r);
        if (place < begin || place >= end) x = -INFINITY;
      }
    }
  }

  EFFINFER_DEVICE void set_block_logits(const ChunkPass& pass, int b, BlockScores& scores) {
    const bool shaped = is_shaped(p_);
    const int index = unit_.warp * kBlocks + b;
    const int32_t start = pass.chunk * kChunkTokens + index * kBlock + unit_.lane % 4 * 8;
    uint32_t visited = 0;
    if (Fetch<kType>::is_visited(pass, index)) {
      const int shift = index % 2 * kBlock + unit_.lane % 4 * 8;
      visited = static_cast<uint32_t>(pass.words[index / 2] >> shift) & 0xff;
    }
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      const TileRow row = shared_.rows[unit_.lane / 4 + 8 * r];
      uint32_t seen = 0;
      if (is_active(row, pass.rank)) {
        seen = visited & seen_places(shared_.visible, row.position, start);
      }
      if constexpr (kScaled) {
        EFFINFER_UNROLL
        for (int t = 0; t < 8; ++t) {
          float& x = score_at(scores, t, r);
          x = rounded_product(x, feed_.scale(b, t));
        }
      }
      if (shaped) shape_scores(unit_, scores, row, r, start, p_.logits_soft_cap);
      if (visited != 0) add_log_weights(unit_, scores, r, shared_.units.weights, start);
      hide_unseen(scores, r, seen);
    }
  }

  EFFINFER_DEVICE void share_weights(const ChunkPass& pass, Scores& scores) {
    EFFINFER_UNROLL_BY(kScaled || kBlocks > 2 ? 1 : kBlocks)
    for (int b = 0; b < kBlocks; ++b) {
      const int index = unit_.warp * kBlocks + b;
      if (Fetch<kType>::is_visited(pass, index)) {
        if constexpr (kScaled) {
          EFFINFER_UNROLL
          for (int t = 0; t < 8; ++t) {
            const float scale = feed_.scale(b, 8 + t);
            EFFINFER_UNROLL
            for (int r = 0; r < 2; ++r) {
              float& weight = score_at(scores[0], t, r);
              weight = rounded_product(weight, scale);
            }
          }
        }
        Multiply::set_weights(unit_, shared_.operands, index, scores[0]);
      }
      turn(scores);
    }
  }

  EFFINFER_DEVICE void end_chunk(int32_t chunk) {
    const ops::AttentionItem& item = shared_.item;
    if (item.partial >= 0) {
      const int64_t before = chunk - item.first_unit / kChunkUnits;
      result_.store_partial(unit_, item.partial + before * result_.num_rows(), chunk_rows_,
                            chunk_values_);
    } else {
      result_.fold(unit_, rows_, values_, chunk_rows_, chunk_values_);
    }
    clear(chunk_values_);
    chunk_rows_[0] = chunk_rows_[1] = RowState{};
  }

 protected:
  Unit& unit_;
  const ops::AttentionProblem& p_;
  Shared& shared_;
  const AttentionResult<kWarps> result_;
  Feed feed_;
  RowState rows_[2];  // of the chunks before
  LaneValues values_ = {};
  RowState chunk_rows_[2];
  LaneValues chunk_values_ = {};
};

}  // namespace effinfer::cuda
