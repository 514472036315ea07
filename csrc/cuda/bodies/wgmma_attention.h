// Attention of a tile of up to 128 (row, head) pairs of prompts on Hopper: a block an item.
//
// Two warpgroups have 64 rows each, a third one brings pages (bodies/wgmma_stages.h), by copies
// alone where they are re-arranged already (bodies/arrange_pages.h): the bits are the same. A step
// is 128 tokens: 64 registers of a thread are its scores, 32 its weights, 64 the values so far. In
// its turn a warpgroup asks for the products of the next step's keys, then for those of this one's
// values, and makes powers of two of the scores while its values and what the other one has asked
// for are multiplied:
//
//   tensor cores  | 0: q k   | 0: p v   | 1: q k   | 1: p v   | 0: q k   | 0: p v   |
//   warpgroup 0              | softmax             | weights  |          | softmax  ...
//   warpgroup 1    softmax   | weights  |          | softmax             | weights  ...
//
// Values go on in one accumulator for a segment of 32 units (bodies/stage_walk.h). Segments are
// folded into what came before, which lies in shared memory, or are stored as partial results for
// whoever ends the tile: a row's bits depend neither on the rows beside it nor on how its tile is
// divided into items. They are not decoding's, whose chunks have 256 tokens.
#pragma once

#include "cuda/bodies/wgmma_consumer.h"

namespace effinfer::cuda {

template <DType kType, int kColumns>
struct WgmmaAttention {
  static constexpr const char* kName = "wgmma_attention";
  static constexpr int kThreads = (kConsumerWarps + kGroupWarps) * kWarp;
  static constexpr int kMinBlocks = 1;
  static constexpr int kArch = 90;
  // Of a thread. Three warpgroups have 168 each at first.
  static constexpr int kConsumerRegisters = kColumns == 4 ? 208 : 192;
  static constexpr int kProducerRegisters = 3 * 168 - 2 * kConsumerRegisters;
  static constexpr int kRows = kConsumers * kGroupRows;  // of a tile
  using Params = AttentionParams;
  using Shared = WgmmaAttentionShared<kColumns>;
  static_assert(sizeof(Shared) <= 227 << 10);

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const ops::AttentionItem& item = params.p.work.items[unit.block];
    const ops::AttentionTile& tile = params.p.work.tiles[item.tile];
    start(unit, params.p, item, tile, shared);
    unit.sync();
    if (unit.shfl(unit.warp, 0) >= kConsumerWarps) {
      unit.template give_registers<kProducerRegisters>();
      bring(unit, params.p, tile, shared);
      // Its barriers are the whole block's.
      if (item.partial >= 0) ends_last_item(unit, params.p, item.merge, shared.is_last);
    } else {
      unit.template take_registers<kConsumerRegisters>();
      WgmmaAttentionRun<Unit, kType, kColumns>(unit, params, shared).run();
    }
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE static void bring(Unit& unit, const ops::AttentionProblem& p,
                                    const ops::AttentionTile& tile, Shared& shared) {
    if (unit.shfl(shared.is_arranged, 0) == 0) {
      StageProducer<Unit, Shared>(unit, p, tile, shared).run();
    } else if (unit.shfl(unit.warp, 0) == kConsumerWarps) {
      StageCopies<Unit, Shared>(unit, p, tile, shared).run();
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void start(Unit& unit, const ops::AttentionProblem& p,
                                    const ops::AttentionItem& item, const ops::AttentionTile& tile,
                                    Shared& shared) {
    for (int i = unit.thread; i < kRows; i += kThreads) shared.rows[i] = row_of(p, tile, i);
    if (unit.thread != kThreads - 1) return;
    shared.is_arranged = tile.arranged == ops::kNotArranged ? 0 : 1;
    const int producers = shared.is_arranged == 0 ? kGroupWarps : 1;  // warps
    EFFINFER_UNROLL
    for (int i = 0; i < Shared::kStages; ++i) {
      unit.barrier_init(shared.full[i], producers);
      unit.barrier_init(shared.empty[i], kConsumerWarps);
    }
    EFFINFER_UNROLL
    for (int i = 0; i < Shared::kSteps; ++i) unit.barrier_init(shared.step_full[i], 1);
    unit.fence_async();  // for copies
    shared.units = units_of(p, item, tile);
    shared.rule = segment_rule_of(p, tile, shared.units);
    shared.visible = visibility_of(p, tile);
    Shared::Result::begin_item(item, tile, shared.result, ops::kSegmentUnits);
  }
};

}  // namespace effinfer::cuda
