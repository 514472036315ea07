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
#include "cuda/bodies/attention_fetch.h"
#include "cuda/bodies/fragments.h"
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
    typename Fetch<kType>::Slot raw[kRaw][kStageBlocks];
    Quad scales[2][2][kChunkTokens / 4];  // of the passes: of keys, of values
  };
  struct Shared {
    PrefillStage stages[kWidens ? 2 : kDepth];
    std::conditional_t<kWidens, Widening, char> widening;
    Fetch<kType> fetch;
    ChunkPass passes[2];  // at hand, and next
  };

  EFFINFER_DEVICE explicit PrefillRing(Shared& shared) : shared_(shared) {}

  // The first pass is known, to all threads.
  template <class Unit>
  EFFINFER_DEVICE void start(Unit& unit) {
    for (int i = 0; i < (kWidens ? kRaw : kAhead); ++i) fetch(unit, 0);
    if constexpr (kWidens) bring(unit, 0);
  }

  // The next stage, of the pass at place `at`. The place of the one before is free.
  template <class Unit>
  EFFINFER_DEVICE const PrefillStage& take(Unit& unit, int at) {
    const int slot = slot_;
    if constexpr (kWidens) {
      unit.sync();
      slot_ ^= 1;
      bring(unit, at);
    } else {
      slot_ = slot_ + 1 == kDepth ? 0 : slot_ + 1;
      unit.template wait<kAhead - 1>();
      unit.sync();
      fetch(unit, at);
    }
    return shared_.stages[slot];
  }

  // What was ahead in the next pass is ahead in the one at hand.
  EFFINFER_DEVICE void end_pass() { ahead_.in_next = false; }

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

  // The next stage on its way.
  template <class Unit>
  EFFINFER_DEVICE void fetch(Unit& unit, int at) {
    const int place = ahead_.in_next ? at ^ 1 : at;
    const ChunkPass& pass = shared_.passes[place];
    if (pass.chunk >= 0) {
      EFFINFER_UNROLL
      for (int i = 0; i < kShare; ++i) {
        const int block = unit.warp + i * kWarps;
        fetch_block(unit, pass, block, slot_of(ahead_.slot, block));
      }
      if constexpr (kWidens) {
        if (ahead_.stage == 0) fetch_scales(unit, pass, shared_.widening.scales[place]);
      }
    }
    unit.commit();
    ahead_.slot = ahead_.slot + 1 == (kWidens ? kRaw : kDepth) ? 0 : ahead_.slot + 1;
    if (++ahead_.stage < Stages::kCount) return;
    ahead_.stage = 0;
    ahead_.in_next = true;
  }

  EFFINFER_DEVICE typename Fetch<kType>::Slot& slot_of(int slot, int block) {
    if constexpr (kWidens) {
      return shared_.widening.raw[slot][block];
    } else {
      return shared_.stages[slot][block];
    }
  }

  template <class Unit>
  EFFINFER_DEVICE void fetch_block(Unit& unit, const ChunkPass& pass, int block,
                                   typename Fetch<kType>::Slot& to) const {
    const int stage = ahead_.stage;
    if (stage >= Stages::kKeyStages) {
      return shared_.fetch.fetch_plain(unit, pass, true, block, stage - Stages::kKeyStages, to);
    }
    if (Stages::kKeyBlocks < kStageBlocks && block >= Stages::kKeyBlocks) return;
    const int tokens = stage * Stages::kTokenBlocks + block / kColumns;
    shared_.fetch.fetch_plain(unit, pass, false, tokens, block % kColumns, to);
  }

  // Of the pass's 256 tokens, by its threads: 4 keys' or values' each.
  template <class Unit>
  EFFINFER_DEVICE void fetch_scales(Unit& unit, const ChunkPass& pass,
                                    Quad (&to)[2][kChunkTokens / 4]) const {
    constexpr int kQuads = kChunkTokens / 4;
    const Fetch<kType>& from = shared_.fetch;
    for (int i = unit.thread; i < 2 * kQuads; i += kWarps * kWarp) {
      const bool of_values = i >= kQuads;
      const int tokens = i % kQuads * 4;
      const int at = tokens / kUnitTokens;
      if ((pass.units >> at & 1) == 0) continue;
      const int64_t page = pass.pages[at];
      const float* scales = of_values ? from.value_scales + page * from.value_scale_stride
                                      : from.key_scales + page * from.key_scale_stride;
      unit.copy_async(&to[of_values ? 1 : 0][i % kQuads], scales + tokens % kUnitTokens);
    }
  }

  // The oldest raw stage becomes a widened one, and a new one takes its place.
  template <class Unit>
  EFFINFER_DEVICE void bring(Unit& unit, int at) {
    unit.template wait<kRaw - 1>();
    EFFINFER_UNROLL
    for (int i = 0; i < kShare; ++i) {
      const int block = unit.warp + i * kWarps;
      EFFINFER_UNROLL
      for (int s = 0; s < 2; ++s) {
        const Quad raw = shared_.widening.raw[ahead_.slot][block][s][unit.lane];
        Quad low;
        Quad high;
        EFFINFER_UNROLL
        for (int d = 0; d < 4; ++d) {
          uint32_t pairs[2];
          widen(unit, raw.words[d], pairs);
          low.words[d] = pairs[0];
          high.words[d] = pairs[1];
        }
        shared_.stages[widened_][block][2 * s][unit.lane] = low;
        shared_.stages[widened_][block][2 * s + 1][unit.lane] = high;
      }
    }
    widened_ ^= 1;
    fetch(unit, at);
  }

  Shared& shared_;
  int slot_ = 0;     // the next stage to take
  int widened_ = 0;  // the next one to widen
  struct {
    int slot = 0;
    int stage = 0;  // of the pass at hand, or already of the next one
    bool in_next = false;
  } ahead_;
};

}  // namespace effinfer::cuda
