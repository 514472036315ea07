// The prefill kernel: of kColumns of 32 dims, kHeld of whose results are in registers, kWarps with
// 16 rows each, and a ring of kDepth stages (bodies/prefill_ring.h).
#pragma once

#include <type_traits>

#include "cuda/bodies/prefill_tile.h"

namespace effinfer::cuda {

// What blocks with 99 KB of shared memory have room for: Hopper's have 8 warps.
struct ForSmallBlocks {
  static constexpr int kReplacedOn = 90;
};
struct ForAllBlocks {};

template <DType kType, int kColumns, int kWarps, int kDepth, int kHeld>
struct PrefillKernel : std::conditional_t<kType == DType::i8 && kColumns <= 4 && kWarps == 4,
                                          ForSmallBlocks, ForAllBlocks> {
  static constexpr const char* kName = "prefill_attention";
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kRows = kWarps * kTileRows;  // of a tile
  using Params = AttentionParams;
  using Shared = PrefillShared<kType, kColumns, kWarps, kDepth, kHeld>;
  static_assert(sizeof(Shared) <= 163 << 10);  // of an A100's SM

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    PrefillTileRun<Unit, kType, kColumns, kWarps, kDepth, kHeld>(unit, params, shared).run();
  }
};

}  // namespace effinfer::cuda
