// What a block looks up about its item before it begins: what is visited, and the tile's rows.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/float16.h"
#include "cuda/bodies/attention_chunks.h"
#include "cuda/bodies/seen_words.h"
#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

// Ancestors of the tile's tokens; null: a chain.
EFFINFER_DEVICE const uint64_t* paths_of(const ops::BatchLayout& batch,
                                         const ops::AttentionTile& tile) {
  return batch.is_tree(tile.sequence) ? batch.ancestors + tile.first_row : nullptr;
}

// Of a row's token in its sequence.
EFFINFER_DEVICE int32_t slot_of(const ops::AttentionProblem& p, const ops::AttentionTile& tile,
                                int token) {
  return p.batch.step_begin(tile.sequence) + tile.first_row + token -
         p.batch.qo_indptr[tile.sequence];
}

EFFINFER_DEVICE ItemUnits units_of(const ops::AttentionProblem& p, const ops::AttentionItem& item,
                                   const ops::AttentionTile& tile) {
  ItemUnits units;
  units.first = item.first_unit;
  units.end = item.end_unit;
  units.sinks = tile.sink_units;
  units.first_seen = tile.first_unit;
  units.all_chunks = item.partial >= 0;
  units.words = p.visits.of_rows(p.batch, tile.sequence, tile.first_row, tile.kv_head);
  // Lists with weights and planes are not of one problem.
  units.weights = p.visits.weights_of_rows(p.batch, tile.sequence, tile.first_row, tile.kv_head);
  if (p.weighs_keys()) units.weights = p.plane_weights(tile.sequence, tile.kv_head);
  const bool has_first = p.first_logits != nullptr && units.weights != nullptr;
  units.firsts = has_first ? p.first_logits + tile.first_head : nullptr;
  units.num_heads = tile.num_heads;
  units.pages = p.batch.kv_indices + p.batch.kv_indptr[tile.sequence];
  units.paths = paths_of(p.batch, tile);
  units.tree_start = units.paths != nullptr ? p.batch.tree_begin(tile.sequence) : INT32_MAX;
  units.num_displaced = 0;
  for (int token = 0; units.paths != nullptr && token < tile.num_rows; ++token) {
    units.num_displaced += is_displaced(units.paths[token]) ? 1 : 0;
  }
  units.first_rank = units.num_displaced == tile.num_rows ? 1 : 0;
  units.last_chunk = (item.end_unit - 1) / kChunkUnits;
  units.key_chunk = units.own_chunk = 0;
  if (p.chunk > 0 && !p.batch.is_unchunked(tile.sequence)) {
    units.key_chunk = p.chunk / kChunkTokens;
    units.own_chunk = slot_of(p, tile, 0) / p.chunk;
  }
  return units;
}

EFFINFER_DEVICE Visibility visibility_of(const ops::AttentionProblem& p,
                                         const ops::AttentionTile& tile) {
  return {tile.num_tokens, p.window_left, p.sink_tokens,
          p.causal || p.batch.is_tree(tile.sequence)};
}

// Places [begin, end) that all rows of a tile see, and whose scores are only scaled; lists and
// trees have none.
struct PlainPlaces {
  int32_t begin;
  int32_t end;
  bool others_are_hidden;  // each row sees the places from one to another, and none is more than
                           // scaled
};
EFFINFER_DEVICE PlainPlaces plain_places(const ops::AttentionProblem& p,
                                         const ops::AttentionTile& tile, const Visibility& all) {
  if (is_shaped(p) || p.visits.has_lists() || p.batch.is_tree(tile.sequence)) return {0, 0, false};
  const int32_t first = slot_of(p, tile, 0);
  const int32_t last = first + tile.num_rows - 1;
  return {all.window_left < 0 ? 0 : last - all.window_left,
          all.causal && first < all.num_tokens ? first + 1 : all.num_tokens,
          all.window_left < 0 || all.sink_tokens == 0};
}

// The scale of scores, log2(e) with it, is above 0, so that it may be applied after the maximum; a
// query's factor has the rest.
EFFINFER_DEVICE float row_scale(const ops::AttentionProblem& p) {
  return p.sm_scale == 0.0f ? 1.0f : rounded_product(fabsf(p.sm_scale), kLog2e);
}
EFFINFER_DEVICE float query_sign(const ops::AttentionProblem& p) {
  return p.sm_scale == 0.0f ? 0.0f : p.sm_scale < 0.0f ? -1.0f : 1.0f;
}

// Of a chain, where the tile's tokens are at position_of(token).
template <class PositionOf>
EFFINFER_DEVICE TileRow chain_row_of(const ops::AttentionProblem& p, const ops::AttentionTile& tile,
                                     int index, PositionOf&& position_of) {
  const int token = index / tile.num_heads;
  TileRow row = {0, -1, row_scale(p), 0.0f};
  if (token >= tile.num_rows) return row;
  row.rank = 0;
  if (p.alibi_slopes != nullptr) {
    row.slope = p.alibi_slopes[tile.first_head + index % tile.num_heads];
  }
  row.position = position_of(token);
  return row;
}
EFFINFER_DEVICE TileRow row_of(const ops::AttentionProblem& p, const ops::AttentionTile& tile,
                               int index) {
  const int token = index / tile.num_heads;
  TileRow row = chain_row_of(p, tile, index, [&](int of) { return slot_of(p, tile, of); });
  const uint64_t* paths = paths_of(p.batch, tile);
  if (row.rank < 0 || paths == nullptr) return row;
  row.position = p.batch.tree_begin(tile.sequence) + path_length(paths[token]) - 1;
  if (!is_displaced(paths[token])) return row;
  for (int t = 0; t <= token; ++t) row.rank += is_displaced(paths[t]) ? 1 : 0;
  return row;
}

// The queries for keys at a distance_to(); all have the same strides.
EFFINFER_DEVICE const uint8_t* queries_for(const ops::AttentionProblem& p, int distance) {
  if (distance == 0) return p.q.data;
  return distance == 1 ? p.q_before.data : p.q_far.data;
}

// 0 of a row that is not there.
EFFINFER_DEVICE float query_of(const ops::AttentionProblem& p, const ops::AttentionTile& tile,
                               const uint8_t* queries, int row, int dim) {
  if (row >= tile.num_rows * tile.num_heads) return 0.0f;
  const int64_t at = (tile.first_row + row / tile.num_heads) * p.q.row_stride +
                     (tile.first_head + row % tile.num_heads) * p.q.head_stride + dim;
  if (p.q.dtype == DType::f32) return reinterpret_cast<const float*>(queries)[at];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(queries)[at];
  return p.q.dtype == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

}  // namespace effinfer::cuda
