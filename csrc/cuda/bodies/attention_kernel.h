// The kernel of decoding's attention: a block an item of the plan.
#pragma once

#include <cstddef>

#include "cuda/bodies/attention_page_tile.h"
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
  static constexpr bool kAdapts = true;
  // Whether pages come whole where the GPU has bulk copies. Those of float32 are bound by
  // multiply-adds, and places for six of int8 and 256 dims would leave room for one block.
  static constexpr bool kTakesPages = kType != DType::f32 && !(kType == DType::i8 && kWarps == 8);
  using Params = AttentionParams;
  using Shared = AttentionShared<kType, kWarps>;
  static_assert(sizeof(Shared) <= 99 << 10);  // of a block of the GPUs that have least

  // Of a block whose pages come whole.
  static constexpr size_t page_bytes(int dims, int value_places) {
    return offsetof(Shared, rings) +
           static_cast<size_t>(PagePlaces<kType>::all(dims, value_places));
  }
  // With two for values, which there must be for any head, as many blocks fit; of two warps three,
  // with 144 KB of copies under way.
  static constexpr int kPageBlocks = kWarps == 2 ? 3 : kMinBlocks;
  static_assert(!kTakesPages || kPageBlocks * (page_bytes(kWarps * kBlock, 2) + 1024) <= 228 << 10);

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    if (params.p.work.items[unit.block].tile < 0) return unit.wait_for_inputs();
    Shared& kept = *unit.kept_shared(&shared);
    if constexpr (kTakesPages) {
      if (unit.has_bulk_copies()) return PageTileRun<Unit, kType, kWarps>(unit, params, kept).run();
    }
    AttentionTileRun<Unit, kType, kWarps>(unit, params, kept).run();
  }
};

}  // namespace effinfer::cuda
