// Attention of tiles of up to 128 (row, head) pairs of prompts on Hopper, an item after the other
// (bodies/wgmma_items.h).
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
// folded into what came before, which lies in shared memory, or are stored as partial results
// (bodies/wgmma_result.h): a row's bits depend neither on the rows beside it nor on how its tile is
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
    if (unit.thread == 0) start(unit, shared);
    unit.sync();
    if (unit.shfl(unit.warp, 0) >= kConsumerWarps) {
      unit.template give_registers<kProducerRegisters>();
      bring(unit, params.p, shared);
    } else {
      unit.template take_registers<kConsumerRegisters>();
      WgmmaAttentionRun<Unit, kType, kColumns>(unit, params, shared).run();
    }
  }

 private:
  // All items. Those whose pages are re-arranged are the first warp's alone: the others learn where
  // the ring goes on when they come to one that is not.
  template <class Unit>
  EFFINFER_DEVICE static void bring(Unit& thread, const ops::AttentionProblem& p, Shared& shared) {
    const bool takes = thread.shfl(thread.warp, 0) == kConsumerWarps;
    for (RingPlaces<Shared> at;; ++at.items) {
      Unit unit = thread.anew();
      Mbarrier& empty = shared.item_empty[at.item().index()];
      Mbarrier& full = shared.item_full[at.item().index()];
      BlockItem& item = shared.items[at.item().index()];
      if (takes) {
        unit.barrier_wait(empty, at.item().parity() ^ 1);
        ItemTaker<Unit>(unit, p).take(at.items, at.stages, item);
        if (unit.lane == 0) unit.barrier_arrive(full);
      }
      unit.barrier_wait(full, at.item().parity());
      if (unit.shfl(item.exists, 0) == 0) return;
      if (unit.shfl(item.tile.arranged, 0) == ops::kNotArranged) {
        at.stages = unit.shfl(item.stages, 0);
        StageProducer<Unit, Shared>(unit, p, item, at, shared).run();
      } else if (takes) {
        StageCopies<Unit, Shared>(unit, p, item, at, shared).run();
      }
      unit.sync_warp();  // nobody looks at the item any more
      if (!takes && unit.lane == 0) unit.barrier_arrive(empty);
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static void start(Unit& unit, Shared& shared) {
    EFFINFER_UNROLL
    for (int i = 0; i < Shared::kStages; ++i) {
      unit.barrier_init(shared.full[i], kGroupWarps);
      unit.barrier_init(shared.empty[i], kConsumerWarps);
    }
    EFFINFER_UNROLL
    for (int i = 0; i < Shared::kSteps; ++i) unit.barrier_init(shared.step_full[i], 1);
    EFFINFER_UNROLL
    for (int i = 0; i < kItemPlaces; ++i) {
      unit.barrier_init(shared.item_full[i], 1);
      unit.barrier_init(shared.item_empty[i], kConsumerWarps + kGroupWarps - 1);
    }
    unit.fence_async();  // for copies
  }
};

}  // namespace effinfer::cuda
