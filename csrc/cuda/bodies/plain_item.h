// A block's item of attention over a caller's rows: what it visits, who ends its tile, and how a
// row's sum becomes a result.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/plain_products.h"
#include "cuda/bodies/plain_rows.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

struct PlainItem {
  const ops::AttentionItem& item;
  const ops::AttentionTile& tile;

  EFFINFER_DEVICE int num_rows() const { return tile.num_rows * tile.num_heads; }
  EFFINFER_DEVICE int64_t token(int row) const { return tile.first_row + row / tile.num_heads; }
  EFFINFER_DEVICE int head(int row) const { return tile.first_head + row % tile.num_heads; }

  EFFINFER_DEVICE bool is_visited(int32_t index) const {
    return index >= item.first_unit && index < item.end_unit &&
           (index < tile.sink_units || index >= tile.first_unit);
  }

  // From `chunk` on; -1: there is none. A partial result is wanted of every chunk.
  EFFINFER_DEVICE int32_t next_chunk(int32_t chunk) const {
    for (; chunk * kPlainUnits < item.end_unit; ++chunk) {
      bool any = item.partial >= 0;
      EFFINFER_NO_UNROLL
      for (int i = 0; i < kPlainUnits; ++i) any = any || is_visited(chunk * kPlainUnits + i);
      if (any) return chunk;
    }
    return -1;
  }

  // Of a chunk's result of a row.
  EFFINFER_DEVICE int64_t partial(int32_t chunk, int row) const {
    const int64_t before = chunk - item.first_unit / ops::kChunkUnits;
    return item.partial + before * num_rows() + row;
  }
};

// Whether the block is the last of its tile's to come here, and so folds all partial results: those
// of its own threads were stored before a barrier. `flag` is shared.
template <class Unit>
EFFINFER_DEVICE bool ends_tile(Unit& unit, const ops::AttentionProblem& p,
                               const ops::AttentionItem& item, int32_t& flag) {
  if (unit.thread == 0) {
    unit.fence();
    const int32_t before = unit.atomic_add(p.done + item.merge, 1);
    flag = before + 1 == p.work.merges[item.merge].num_items ? 1 : 0;
    if (flag != 0) p.done[item.merge] = 0;
    unit.fence();
  }
  unit.sync();
  return flag != 0;
}

// A chunk's maximum and sum of weights join those of the chunks before it: what sums of weighted
// values are times, those before and the chunk's.
struct PlainFold {
  EFFINFER_DEVICE PlainFold(float& max, float& sum, float chunk_max, float chunk_sum) {
    const float highest = fmaxf(max, chunk_max);
    before = plain_weight(max, highest);
    factor = plain_weight(chunk_max, highest);
    max = highest;
    sum = fmaf(chunk_sum, factor, fmaf(sum, before, 0.0f));
  }
  EFFINFER_DEVICE float add(float total, float value) const {
    return fmaf(value, factor, fmaf(total, before, 0.0f));
  }

  float before;
  float factor;
};

// What sums of weighted values are times, and the logarithm of the sum of weights: a row that sees
// no key is zeros, and minus infinity.
struct PlainEnd {
  float factor;
  float lse;
};

EFFINFER_DEVICE PlainEnd plain_end(const ops::AttentionProblem& p, int head, float max, float sum) {
  float scale = p.v_scale;
  if (p.sink_logits != nullptr) {
    const float sink = p.sink_logits[head];
    const float highest = fmaxf(sink, max);
    const float kept = plain_weight(max, highest);
    sum = fmaf(sum, kept, plain_weight(sink, highest));
    max = highest;
    scale *= kept;
  }
  if (sum == 0.0f) return {0.0f, -INFINITY};
  return {scale / sum, (max + logf(sum)) * p.lse_factor};
}

}  // namespace effinfer::cuda
