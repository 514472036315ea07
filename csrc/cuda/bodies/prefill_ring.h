// How a block's keys and values pass by when a prompt's rows are multiplied
// (bodies/prefill_tile.h).
//
// A chunk of 256 tokens comes in stages of up to 8 blocks of 32 tokens x 32 dims, 16 KB of 16-bit
// numbers: first keys, all dims of some tokens, then values, all tokens of 32 dims each:
//
//   head_dim          stages of keys      stages of values
//   64                2 of 128 tokens     2
//   96, 128           4 of 64 tokens      3, 4
//   256               8 of 32 tokens      8
//
// All warps read all of a stage, and each brings a share of the next ones. A block lies as its
// lanes read it (bodies/fragments.h): 16 bytes a lane, without conflicts of banks. One barrier a
// stage says both that it has come and that the stage before has been read, whose place the newest
// copies take.
//
// int8 numbers are widened once for all warps, by the lane that copied them, a stage ahead:
//
//   copies ->  raw, 2 stages, of each thread its own  ->  widened, 2 stages  ->  barrier, products
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/bodies/attention_chunks.h"
#include "cuda/bodies/fragments.h"
#include "cuda/bodies/prefill_fetch.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

inline constexpr int kStageBlocks = 8;

// `kColumns` of 32 dims: 2, 3, 4 or 8.
template <int kColumns>
struct PrefillStages {
  static constexpr int kTokenBlocks = kColumns == 8 ? 1 : kColumns == 2 ? 4 : 2;  // of keys
  static constexpr int kKeyStages = kChunkBlocks / kTokenBlocks;
  static constexpr int kKeyBlocks = kTokenBlocks * kColumns;  // of a stage
  static constexpr int kCount = kKeyStages + kColumns;
};

// A stage's blocks as 16-bit fragments.
using PrefillBlock = Quad[4][kWarp];
using PrefillStage = PrefillBlock[kStageBlocks];

template <DType kType, int kColumns, int kWarps, int kDepth>
class PrefillRing {
 public:
  using Block = KvBlock<kType>;
  using Stages = PrefillStages<kColumns>;
  static constexpr bool kWidens = Block::kScaled;
  static constexpr int kRaw = 2;  // stages
  // Stages that are under way while one is multiplied.
  static constexpr int kAhead = kWidens ? kRaw + 1 : kDepth - 1;
  static_assert(kAhead < Stages::kCount);  // the pass after the next one is not known yet

  struct Widening {
    typename PrefillFetch<kType>::Slot raw[kRaw][kStageBlocks];
    typename PrefillFetch<kType>::Scales scales[2];  // of the passes
  };
  struct Shared {
    PrefillStage stages[kWidens ? 2 : kDepth];
    std::conditional_t<kWidens, Widening, char> widening;
    ChunkPass passes[2];  // at hand, and next
  };

  template <class Unit>
  EFFINFER_DEVICE PrefillRing(Unit& unit, const ops::AttentionProblem& p,
                              const ops::AttentionTile& tile, Shared& shared)
      : fetch_(unit, p, tile), shared_(shared) {}

  // The first pass is known, to all threads.
  template <class Unit>
  EFFINFER_DEVICE void start(Unit& unit) {
    EFFINFER_UNROLL
    for (int stage = 0; stage < (kWidens ? kRaw : kAhead); ++stage) fetch(unit, 0, stage);
    if constexpr (kWidens) bring(unit, 0, 0);
  }

  // Stage `stage` of the pass at place `at`: they are taken in their order, and known when this is
  // compiled, as is most of what follows from them. The place of the one before is free.
  template <class Unit>
  EFFINFER_DEVICE const PrefillStage& take(Unit& unit, int at, int stage) {
    if constexpr (kWidens) {
      unit.sync();
      bring(unit, at, stage + 1);
    } else {
      unit.template wait<kAhead - 1>();
      unit.sync();
      fetch(unit, at, stage + kAhead);
    }
    return shared_.stages[place_of(stage, kPlaces)];
  }

  EFFINFER_DEVICE void end_pass() { taken_ += Stages::kCount; }

  // Tokens 8 (lane % 4) + t of a block of 32: of keys, of values.
  template <class Unit>
  EFFINFER_DEVICE float scale_of(Unit& unit, int at, int of, int block, int t) const {
    if constexpr (kWidens) {
      const Quad& quad = shared_.widening.scales[at][of][block * 8 + unit.lane % 4 * 2 + t / 4];
      return float_of(quad.words[t % 4]);
    }
    return 1.0f;
  }

 private:
  static constexpr int kShare = kStageBlocks / kWarps;  // blocks of a stage that a warp brings

  static constexpr int kPlaces = kWidens ? 2 : kDepth;

  // Of a ring of `count`: where the stage lies.
  EFFINFER_DEVICE int place_of(int stage, int count) const {
    return Stages::kCount % count == 0 ? stage % count : (taken_ + stage) % count;
  }

  // A stage on its way: of the pass at hand, or of the next one behind its last.
  template <class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit, int at, int index) {
    const bool in_next = index >= Stages::kCount;
    const int stage = in_next ? index - Stages::kCount : index;
    const int pass_at = in_next ? at ^ 1 : at;
    const ChunkPass& pass = shared_.passes[pass_at];
    EFFINFER_UNROLL
    for (int i = 0; i < kShare; ++i) {
      const int block = unit.warp + i * kWarps;
      if constexpr (kWidens) {
        auto& raw = shared_.widening.raw[place_of(index, kRaw)][block];
        fetch_block(unit, pass, stage, block, raw);
      } else {
        fetch_block(unit, pass, stage, block, shared_.stages[place_of(index, kDepth)][block]);
      }
    }
    if constexpr (kWidens) {
      if (stage == 0) fetch_.scales(unit, pass, kWarps * kWarp, shared_.widening.scales[pass_at]);
    }
    unit.commit();
  }

  template <class Unit>
  EFFINFER_DEVICE void fetch_block(Unit& unit, const ChunkPass& pass, int stage, int block,
                                   typename PrefillFetch<kType>::Slot& to) const {
    // What depends on the warp is the same in each stage.
    if (stage >= Stages::kKeyStages) {
      return fetch_.values(unit, pass, block / 2, block % 2, stage - Stages::kKeyStages, to);
    }
    if constexpr (Stages::kTokenBlocks == 1) {
      fetch_.keys(unit, pass, stage / 2, stage % 2, block, to);
    } else {
      if (Stages::kKeyBlocks < kStageBlocks && block >= Stages::kKeyBlocks) return;
      const int tokens = block / kColumns;
      const int page = stage * (Stages::kTokenBlocks / 2) + tokens / 2;
      fetch_.keys(unit, pass, page, tokens % 2, block % kColumns, to);
    }
  }

  // A raw stage becomes a widened one, and a new one takes its place.
  template <class Unit>
  EFFINFER_DEVICE void bring(Unit& unit, int at, int index) {
    unit.template wait<kRaw - 1>();
    EFFINFER_UNROLL
    for (int i = 0; i < kShare; ++i) {
      const int block = unit.warp + i * kWarps;
      EFFINFER_UNROLL
      for (int s = 0; s < 2; ++s) {
        const Quad raw = shared_.widening.raw[place_of(index, kRaw)][block][s][unit.lane];
        Quad low;
        Quad high;
        EFFINFER_UNROLL
        for (int d = 0; d < 4; ++d) {
          uint32_t pairs[2];
          widen(unit, raw.words[d], pairs);
          low.words[d] = pairs[0];
          high.words[d] = pairs[1];
        }
        PrefillBlock& to = shared_.stages[place_of(index, kPlaces)][block];
        to[2 * s][unit.lane] = low;
        to[2 * s + 1][unit.lane] = high;
      }
    }
    fetch(unit, at, index + kRaw);
  }

  const PrefillFetch<kType> fetch_;
  Shared& shared_;
  int taken_ = 0;  // stages of the passes before
};

}  // namespace effinfer::cuda
