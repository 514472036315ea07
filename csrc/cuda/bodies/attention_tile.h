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
// On Hopper pages of 16-bit numbers and of int8 come in another way (bodies/attention_page_tile.h).
#pragma once

#include <cstdint>

#include "cuda/bodies/attention_pass.h"
#include "cuda/bodies/attention_ring.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

template <class Unit, DType kType, int kWarps>
class AttentionTileRun : AttentionPass<Unit, kType, kWarps, BlockRing<Unit, kType, kWarps>> {
  using Ring = BlockRing<Unit, kType, kWarps>;
  using Base = AttentionPass<Unit, kType, kWarps, Ring>;
  using Base::chunk_values_;
  using Base::feed_;
  using Base::kBlocks;
  using Base::p_;
  using Base::shared_;
  using Base::unit_;
  using typename Base::Multiply;
  using typename Base::Scores;
  using typename Base::Shared;
  // Of a pass: the warp's blocks of keys, then all of its values. Before the first pass parts are
  // sent for, and before it and those whose keys are for other queries these are set.
  static constexpr int kToSetQueries = -1;
  static constexpr int kToSendFor = -2;

 public:
  EFFINFER_DEVICE AttentionTileRun(Unit& unit, const AttentionParams& params, Shared& shared)
      : Base(unit, params, shared) {}

  // The first keys are on their way before the queries are looked at.
  EFFINFER_DEVICE void run() {
    this->begin();
    int block = kToSendFor;
    for (int at = 0; shared_.passes[at].chunk >= 0; at = Base::after(at)) {
      ChunkPass& next = shared_.passes[Base::after(at)];
      do_pass(shared_.passes[at], next, block);
      block = next.queries == kSameQueries ? 0 : kToSetQueries;
    }
    this->end();
  }

 private:
  // From `block` on. One loop takes all parts, so that what brings them is in the kernel once.
  EFFINFER_DEVICE void do_pass(const ChunkPass& now, ChunkPass& next, int block) {
    const ChunkWalk walk = this->walk_on(now);
    Scores scores = {};
    EFFINFER_NO_UNROLL
    for (; block <= kBlocks; ++block) {
      if (block == kBlocks) this->make_weights(now, next, walk, scores, [] {});
      if (block == kToSetQueries) {
        this->set_queries(now.queries);
        unit_.sync();
        continue;
      }
      const bool of_keys = block < kBlocks;
      const int takes = block == kToSendFor ? Ring::kFirst
                        : of_keys           ? feed_.key_takes()
                                            : Ring::kValueTakes;
      const uint32_t visited = visited_parts(now, block);
      EFFINFER_NO_UNROLL
      for (int part = 0; part < takes * Ring::kAtOnce; part += Ring::kAtOnce) {
        const auto* slots = feed_.take(now, next);
        if ((visited >> part & 1) == 0) continue;
        of_keys ? add_keys(slots, part, scores[0]) : add_values(slots, part);
      }
      if (of_keys && block != kToSendFor) turn(scores);
    }
    this->end_pass(now, next);
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
};

}  // namespace effinfer::cuda
