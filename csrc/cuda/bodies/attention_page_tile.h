// Attention of a tile on Hopper, whose pages come whole (bodies/attention_pages.h): the same sums
// as in bodies/attention_tile.h, of which each warp multiplies the pages of its tokens' keys and 32
// dims of all pages of values.
#pragma once

#include <cstdint>

#include "cuda/bodies/attention_pages.h"
#include "cuda/bodies/attention_pass.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

template <class Unit, DType kType, int kWarps>
class PageTileRun : AttentionPass<Unit, kType, kWarps, PageFeed<Unit, kType, kWarps>> {
  using Feed = PageFeed<Unit, kType, kWarps>;
  using Base = AttentionPass<Unit, kType, kWarps, Feed>;
  using Base::chunk_values_;
  using Base::feed_;
  using Base::kBlocks;
  using Base::p_;
  using Base::shared_;
  using Base::unit_;
  using typename Base::Multiply;
  using typename Base::Scores;
  using typename Base::Shared;
  static constexpr int kStepLoads = KvBlock<kType>::kStepLoads;
  static constexpr int kMostDims = kWarps * kBlock;
  // A warp's blocks of keys lie in so many pages, and so many in each.
  static constexpr int kPages = kBlocks < 2 ? 1 : kBlocks / 2;
  static constexpr int kOfPage = kBlocks / kPages;
  // Steps of keys that are unrolled where heads are as wide as the kernel takes. To widen int8
  // numbers is more code than products, so there are fewer, and no values of such heads alone.
  static constexpr bool kScaled = KvBlock<kType>::kScaled;
  static constexpr int kUnrolled = kScaled ? 2 : kMostDims / 16;

 public:
  EFFINFER_DEVICE PageTileRun(Unit& unit, const AttentionParams& params, Shared& shared)
      : Base(unit, params, shared) {}

  // The first pages are on their way before the queries are looked at.
  EFFINFER_DEVICE void run() {
    feed_.init();
    this->begin();
    feed_.start(shared_.passes[0]);
    EFFINFER_NO_UNROLL
    for (int at = 0; shared_.passes[at].chunk >= 0; at = Base::after(at)) {
      const ChunkPass& now = shared_.passes[at];
      if (now.queries != kSameQueries) {
        this->set_queries(now.queries);
        unit_.sync();
      }
      do_pass(now, shared_.passes[Base::after(at)]);
    }
    this->end();
  }

 private:
  EFFINFER_DEVICE void do_pass(const ChunkPass& now, ChunkPass& next) {
    const ChunkWalk walk = this->walk_on(now);
    const uint32_t units = now.units;
    const bool may_gather = now.path != 0;
    Scores scores = {};
    EFFINFER_UNROLL
    for (int i = 0; i < kPages; ++i) {
      const int at = (unit_.warp * kBlocks + i * kOfPage) / 2;
      feed_.take_keys(now, at, may_gather);
      if ((units >> at & 1) == 0) continue;
      if (p_.k.dims == kMostDims) {
        add_keys<true>(at, scores, i * kOfPage);
      } else {
        add_keys<false>(at, scores, i * kOfPage);
      }
    }
    this->make_weights(now, next, walk, scores, [&] { feed_.ask_next_keys(next); });
    const bool has_dims = unit_.warp * kBlock < p_.v.dims;
    EFFINFER_NO_UNROLL
    for (int at = 0; at < kChunkUnits; ++at) {
      const uint8_t* const values = feed_.take_values(now, at, may_gather);
      if ((units >> at & 1) != 0 && has_dims) {
        if (!kScaled && p_.v.dims == kMostDims) {
          add_values<true>(values, at);
        } else {
          add_values<false>(values, at);
        }
      }
      feed_.end_values(now, next, at);
    }
    this->end_pass(now, next);
  }

  // Of unit `at`, whose first block is the warp's block `first`.
  template <bool kWhole>
  EFFINFER_DEVICE void add_keys(int at, Scores& scores, int first) {
    const int steps = (kWhole ? kMostDims : p_.k.dims) / 16;
    const uint8_t* keys[kOfPage];
    EFFINFER_UNROLL
    for (int b = 0; b < kOfPage; ++b) keys[b] = feed_.keys(at, (unit_.warp * kBlocks + b) % 2);
    EFFINFER_UNROLL_BY(kWhole ? kUnrolled : 1)
    for (int step = 0; step < steps; ++step) {
      const Quad a = shared_.operands.queries[step][unit_.lane];
      EFFINFER_UNROLL
      for (int b = 0; b < kOfPage; ++b) {
        Multiply::multiply_quads(unit_, scores[first + b], a,
                                 keys[b] + step * kStepLoads * Feed::kKeyBytes, Feed::kKeyBytes);
      }
    }
  }

  template <bool kWhole>
  EFFINFER_DEVICE void add_values(const uint8_t* values, int at) {
    const int dims = kWhole ? kMostDims : p_.v.dims;
    EFFINFER_UNROLL
    for (int b = 0; b < 2; ++b) {
      EFFINFER_UNROLL
      for (int s = 0; s < 2; ++s) {
        const Quad a = shared_.operands.weights[2 * (2 * at + b) + s][unit_.lane];
        const uint8_t* const loads =
            values + b * Feed::tokens_bytes(dims) + s * kStepLoads * Feed::load_bytes(dims);
        Multiply::multiply_quads(unit_, chunk_values_, a, loads, Feed::load_bytes(dims));
      }
    }
  }
};

}  // namespace effinfer::cuda
