// Attention of a tile of up to 16 (row, head) pairs over the pages of its sequence: a block an
// item.
//
// A chunk of 256 tokens is multiplied by the whole block at once. Of the queries' products each
// warp has 256 / kWarps tokens and all dims, of the products with values all tokens and 32 dims, so
// that nothing is added up between warps but maxima and sums of weights:
//
//   scores of own tokens   sync   weights from the chunk's maximum   sync   values of own dims
//
// Both parts are 8 blocks of 32 tokens x 32 dims for each warp, whatever the head's dimension. A
// warp's blocks come through a ring of its own in shared memory, without a barrier: the copies of
// the next 6 blocks (12 KB of 16-bit numbers, of which an SM has 8 to 16 warps) are under way while
// two are multiplied, over the ends of chunks and their barriers.
//
// A chunk's result is folded into what came before or, of a divided tile, stored for the kernel
// that merges it.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/attention_result.h"
#include "cuda/bodies/attention_ring.h"
#include "cuda/bodies/attention_rows.h"
#include "cuda/bodies/fragments.h"
#include "cuda/bodies/lane_queries.h"
#include "cuda/bodies/seen_words.h"
#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

template <class Unit, DType kType, int kWarps>
class AttentionTileRun {
 public:
  using Shared = AttentionShared<kType, kWarps>;
  using Multiply = Products<kType, kWarps>;
  using Softmax = ChunkSoftmax<kWarps>;
  using Scores = typename Softmax::Scores;
  using Ring = BlockRing<Unit, kType, kWarps>;
  // Of a pass: the warp's blocks of keys, then all of its values. Before the first pass parts are
  // sent for, and before it and those whose keys are for other queries these are set.
  static constexpr int kBlocks = Shared::kBlocks;
  static constexpr int kToSetQueries = -1;
  static constexpr int kToSendFor = -2;

  EFFINFER_DEVICE AttentionTileRun(Unit& unit, const AttentionParams& params, Shared& shared)
      : unit_(unit),
        p_(params.p),
        shared_(shared),
        result_(params, shared.tile),
        ring_(unit, shared, params.p.k.dims) {}

  // What is looked up is known before the kernel before has ended, but for lists of visits, and by
  // several warps at once. The first keys are on their way before the queries are looked at.
  EFFINFER_DEVICE void run() {
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
    int block = kToSendFor;
    for (int at = 0; shared_.passes[at].chunk >= 0; at ^= 1) {
      do_pass(shared_.passes[at], shared_.passes[at ^ 1], block);
      block = shared_.passes[at ^ 1].queries == kSameQueries ? 0 : kToSetQueries;
    }
    if (shared_.item.partial < 0) result_.store(unit_, rows_, values_);
  }

 private:
  EFFINFER_DEVICE void find_first(const ops::AttentionItem& item, const ops::AttentionTile& tile) {
    if (unit_.lane == 0) shared_.units = units_of(p_, item, tile);
    unit_.sync_warp();
    ChunkWalk::first(unit_, shared_.units).store(unit_, shared_.units, shared_.passes[0]);
  }

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

  // From `block` on. One loop takes all parts, so that what brings them is in the kernel once.
  EFFINFER_DEVICE void do_pass(const ChunkPass& now, ChunkPass& next, int block) {
    ChunkWalk walk;
    if (unit_.warp == 0) walk = ChunkWalk::after(unit_, shared_.units, now);
    Scores scores = {};
    EFFINFER_NO_UNROLL
    for (; block <= kBlocks; ++block) {
      if (block == kBlocks) {
        set_logits(now, scores);
        Softmax::share_max(unit_, scores, shared_.softmax);
        unit_.sync();
        if (unit_.warp == 0) walk.store(unit_, shared_.units, next);
        set_weights(now, scores);
        unit_.sync();
      }
      if (block == kToSetQueries) {
        set_queries(now.queries);
        unit_.sync();
        continue;
      }
      const bool of_keys = block < kBlocks;
      const int takes = block == kToSendFor ? Ring::kFirst
                        : of_keys           ? ring_.key_takes()
                                            : Ring::kValueTakes;
      const uint32_t visited = visited_parts(now, block);
      EFFINFER_NO_UNROLL
      for (int part = 0; part < takes * Ring::kAtOnce; part += Ring::kAtOnce) {
        const auto* slots = ring_.take(now, next);
        if ((visited >> part & 1) == 0) continue;
        of_keys ? add_keys(slots, part, scores[0]) : add_values(slots, part);
      }
      if (of_keys && block != kToSendFor) turn(scores);
    }
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      chunk_rows_[r].sum += Softmax::sum_of(shared_.softmax, unit_.lane / 4 + 8 * r);
    }
    ring_.end_pass();
    if (next.chunk != now.chunk) end_chunk(now.chunk);
  }

  // Parts `part` on of those that came at once.
  EFFINFER_DEVICE void add_keys(const typename Ring::Slot* slots, int part, BlockScores& scores) {
    const int steps = p_.k.dims / 16 - 2 * part;
    if (steps >= 2 * Ring::kAtOnce) {
      EFFINFER_UNROLL
      for (int i = 0; i < Ring::kAtOnce; ++i) {
        Multiply::add_scores(unit_, shared_.operands, slots[i], 2 * (part + i), 2, scores);
      }
      return;
    }
    EFFINFER_NO_UNROLL
    for (int i = 0; 2 * i < steps; ++i) {
      Multiply::add_scores(unit_, shared_.operands, slots[i], 2 * (part + i), steps - 2 * i,
                           scores);
    }
  }
  EFFINFER_DEVICE void add_values(const typename Ring::Slot* slots, int part) {
    EFFINFER_UNROLL
    for (int i = 0; i < Ring::kAtOnce; ++i) {
      Multiply::add_values(unit_, shared_.operands, slots[i], part + i, chunk_values_);
    }
  }

  // A bit for each part of the warp's block of keys, or of its values, that is multiplied.
  EFFINFER_DEVICE uint32_t visited_parts(const ChunkPass& pass, int block) const {
    if (block == kToSendFor) return 0;
    if (block < kBlocks) {
      return Fetch<kType>::is_visited(pass, unit_.warp * kBlocks + block) ? ~0u : 0;
    }
    uint32_t parts = 0;
    EFFINFER_UNROLL
    for (int at = 0; at < kChunkUnits; ++at) parts |= (pass.units >> at & 1) * 3u << 2 * at;
    return unit_.warp * kBlock < p_.v.dims ? parts : 0;
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
    EFFINFER_NO_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      set_block_logits(pass, b, scores[0]);
      turn(scores);
    }
    if (unit_.warp == 0) add_first_logits(unit_, scores[0], shared_.units, pass.chunk, 0);
  }

  // Whether every row sees all of the chunk, and scores are only scaled.
  EFFINFER_DEVICE bool is_inside(const ChunkPass& pass) const {
    if constexpr (KvBlock<kType>::kScaled) return false;
    const int32_t start = pass.chunk * kChunkTokens;
    return pass.units == kAllUnits && start >= shared_.plain.begin &&
           start + kChunkTokens <= shared_.plain.end;
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
      if constexpr (KvBlock<kType>::kScaled) {
        EFFINFER_UNROLL
        for (int t = 0; t < 8; ++t) {
          float& x = score_at(scores, t, r);
          x = rounded_product(x, scale_of(b, t));
        }
      }
      if (shaped) shape_scores(unit_, scores, row, r, start, p_.logits_soft_cap);
      if (visited != 0) add_log_weights(unit_, scores, r, shared_.units.weights, start);
      hide_unseen(scores, r, seen);
    }
  }

  // Number t of 8 keys, 8 on of values. Behind what is visited they may be anything.
  EFFINFER_DEVICE float scale_of(int block, int t) const {
    if constexpr (KvBlock<kType>::kScaled) {
      return float_of(shared_.scales[unit_.warp][block][t / 4][unit_.lane].words[t % 4]);
    }
    return 1.0f;
  }

  EFFINFER_DEVICE void share_weights(const ChunkPass& pass, Scores& scores) {
    EFFINFER_NO_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      const int index = unit_.warp * kBlocks + b;
      if (Fetch<kType>::is_visited(pass, index)) {
        if constexpr (KvBlock<kType>::kScaled) {
          EFFINFER_UNROLL
          for (int t = 0; t < 8; ++t) {
            const float scale = scale_of(b, 8 + t);
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

  Unit& unit_;
  const ops::AttentionProblem& p_;
  Shared& shared_;
  const AttentionResult<kWarps> result_;
  Ring ring_;
  RowState rows_[2];  // of the chunks before
  LaneValues values_ = {};
  RowState chunk_rows_[2];
  LaneValues chunk_values_ = {};
};

}  // namespace effinfer::cuda
