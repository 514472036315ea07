// The kernel of decoding's attention: a block an item of the plan.
#pragma once

#include "cuda/bodies/attention_tile.h"

namespace effinfer::cuda {

template <DType kType, int kWarps>
struct AttentionKernel {
  static constexpr const char* kName = "attention";
  static constexpr int kThreads = kWarps * kWarp;
  // As many as an H100's shared memory and registers hold: 8 warps or more, each with 12 KB of
  // copies under way, where 25 KB an SM keep its memory busy.
  static constexpr int kMinBlocks = kWarps == 2   ? 4
                                    : kWarps == 4 ? (kType == DType::i8 ? 3 : 2)
                                                  : (kType == DType::i8 ? 2 : 1);
  static constexpr bool kWaitsItself = true;
  using Params = AttentionParams;
  using Shared = AttentionShared<kType, kWarps>;
  static_assert(sizeof(Shared) <= 99 << 10);  // of a block of the GPUs that have least

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    if (params.p.work.items[unit.block].tile < 0) return unit.wait_for_inputs();
    AttentionTileRun<Unit, kType, kWarps>(unit, params, *unit.kept_shared(&shared)).run();
  }
};

}  // namespace effinfer::cuda
