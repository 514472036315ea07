// The items of a block of wgmma_attention.h, one after the other. There are no more blocks than a
// GPU holds: each begins with the item of its own number, and then has the next one that none has
// yet, so that blocks that have little to do have more items.
//
// A warp takes them and looks up what all must know of one, while those that multiply are at the
// item before: its pages are under way when that ends.
#pragma once

#include <cstdint>

#include "cuda/bodies/attention_chunks.h"
#include "cuda/bodies/attention_rows.h"
#include "cuda/bodies/seen_words.h"
#include "cuda/bodies/stage_walk.h"
#include "cuda/bodies/wgmma_pages.h"
#include "cuda/bodies/wgmma_result.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

// What is known of an item.
struct BlockItem {
  int32_t exists;  // 0: all items are taken, and the tile has no rows
  int32_t first_unit;
  int32_t end_unit;
  int32_t position;  // of the tile's first row
  ops::AttentionTile tile;
  ItemUnits units;
  SegmentRule rule;
  Visibility visible;
  ResultItem result;
  uint32_t stages;  // of those before
};

// By a warp.
template <class Unit>
class ItemTaker {
 public:
  EFFINFER_DEVICE ItemTaker(Unit& unit, const ops::AttentionProblem& p) : unit_(unit), p_(p) {}

  // The block's next item, before which it had so many and so many stages of them, if there is one.
  EFFINFER_DEVICE void take(uint32_t items, uint32_t stages, BlockItem& to) const {
    if (unit_.lane != 0) return;
    const auto all = static_cast<int>(p_.work.num_long_items);
    int index = unit_.block;
    if (items > 0) index = unit_.num_blocks + unit_.atomic_add(p_.done, 1);
    to.exists = index < all ? 1 : 0;
    to.stages = stages;
    if (index < all) return look_up(p_.work.items[index], to);
    to.tile.num_rows = to.tile.first_row = to.tile.first_head = 0;
    to.tile.num_heads = 1;
    // The last of all blocks that ask: for the next call.
    if (index == all + unit_.num_blocks - 1) unit_.atomic_add(p_.done, -all);
  }

 private:
  EFFINFER_DEVICE void look_up(const ops::AttentionItem& item, BlockItem& to) const {
    const ops::AttentionTile tile = p_.work.tiles[item.tile];
    to.first_unit = item.first_unit;
    to.end_unit = item.end_unit;
    to.position = slot_of(p_, tile, 0);
    to.tile = tile;
    to.units = units_of(p_, item, tile);
    to.rule = segment_rule_of(p_, tile, to.units);
    to.visible = visibility_of(p_, tile);
    to.result = result_item_of(item, tile);
  }

  Unit& unit_;
  const ops::AttentionProblem& p_;
};

}  // namespace effinfer::cuda
