// The shared memory of a block of wgmma_attention.h.
#pragma once

#include <cstdint>

#include "cuda/bodies/attention_rows.h"
#include "cuda/bodies/wgmma_items.h"
#include "cuda/bodies/wgmma_queries.h"
#include "cuda/bodies/wgmma_result.h"
#include "cuda/bodies/wgmma_stages.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

inline constexpr int kGroupRows = 64;  // of a warpgroup
inline constexpr int kConsumers = 2;   // warpgroups
inline constexpr int kConsumerWarps = kConsumers * kGroupWarps;

template <int kColumns>
struct WgmmaAttentionShared {
  using Tiles = PageTiles<kColumns>;
  using Result = WgmmaResult<kColumns, kConsumerWarps>;
  using Item = BlockItem;
  static constexpr int kStages = kColumns == 4 ? 4 : 8;
  // Steps have no barrier that says when they are done: when the values of one have come, those
  // whose values had the same stage are, and so are all that were before the last kItemPlaces
  // items. What is not done then are as many steps as there are stages of values, the one that is
  // told of, and the end of the item before, or the ends of both.
  static constexpr int kSteps = kStages;
  static_assert(kSteps >= kStages / 2 + kItemPlaces);

  alignas(1024) uint8_t queries[kConsumers][WgmmaQueries<kColumns>::kBytes];
  alignas(1024) uint8_t ring[kStages][Tiles::kStageBytes];
  typename Result::Shared result;
  Mbarrier full[kStages];
  Mbarrier empty[kStages];
  Mbarrier step_full[kSteps];
  Mbarrier item_full[kItemPlaces];
  Mbarrier item_empty[kItemPlaces];
  KeyStep steps[kSteps];
  Item items[kItemPlaces];
  TileRow rows[kConsumers * kGroupRows];
};

}  // namespace effinfer::cuda
