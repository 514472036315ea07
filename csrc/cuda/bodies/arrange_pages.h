// Re-arranges pages once for the tiles of prompts that read them on Hopper: a block a page of a KV
// head, whose bytes are then those of the stages of attention (bodies/wgmma_pages.h).
//
// Half the warps have the keys, half the values, 32 tokens each. All that a lane moves is under way
// at once, 32 KB of a block.
#pragma once

#include <cstdint>

#include "cuda/bodies/wgmma_pages.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

template <int kColumns>
struct ArrangePages {
  using Tiles = PageTiles<kColumns>;
  static constexpr const char* kName = "arrange_pages";
  static constexpr int kWarps = kUnitTokens / kBlock;  // of keys, and of values
  static constexpr int kThreads = 2 * kWarps * kWarp;
  static constexpr int kArch = 90;
  using Params = ops::AttentionProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const ops::ArrangedPage& page = p.work.arranged[unit.block];
    const Tiles tiles(unit.lane, unit.warp % kWarps, p, page.kv_head);
    const bool of_values = unit.warp >= kWarps;
    const uint8_t* from =
        tiles.begin(of_values, p.batch.kv_indices[p.batch.kv_indptr[page.sequence] + page.unit]);
    uint8_t* to = p.arranged + (2 * int64_t{unit.block} + (of_values ? 1 : 0)) * Tiles::kPageBytes;
    typename Tiles::Group groups[Tiles::kGroups];
    EFFINFER_UNROLL
    for (int group = 0; group < Tiles::kGroups; ++group) {
      Tiles::load(unit, of_values, from, group, groups[group]);
    }
    EFFINFER_UNROLL
    for (int group = 0; group < Tiles::kGroups; ++group) {
      tiles.store(of_values, groups[group], group, to, Tiles::kKeyTile / 2);
    }
  }
};

}  // namespace effinfer::cuda
