// Attention over keys and values as a caller has them (plain_rows.h): a block an item, of up to 16
// (row, head) pairs.
//
// A chunk of 256 tokens is four units of 64, and a block four warps: each warp has a unit's tokens
// with all rows and all dims, by itself. (Of more than 128 dims it is two warps, plain_rows.h.) The
// copies of the next chunk's keys are under way from the moment on that this one's have been
// multiplied, those of its values behind the merge of the four warps' results, which go through the
// memory of the values:
//
//   scores, keys of the next chunk   weights, sums of values   sync   merge   sync   its values
//
// Tiles that have a list of spans visit its tokens one after the other: units and chunks are of the
// list then.
//
// A chunk's result is folded into what came before, or stored for whoever ends the tile, who folds
// in the same order (plain_result.h): a row's bits depend on its own keys alone.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/plain_products.h"
#include "cuda/bodies/plain_result.h"
#include "cuda/bodies/plain_rows.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

template <int kDims>
struct PlainShared {
  union Values {
    typename PlainRows<kDims>::Stage rows;
    float sums[kPlainRows][kDims];  // of the warp's unit
  };
  Quad queries[kPlainRows][kDims / 8];
  typename PlainRows<kDims>::Stage keys[kPlainUnits];
  Values values[kPlainUnits];
  float max[kPlainUnits][kPlainRows];
  float sum[kPlainUnits][kPlainRows];
  Quad totals[kDims * kPlainRows / (kWarp * PlainRows<kDims>::kWarps * 4)]
             [PlainRows<kDims>::kWarps * kWarp];  // plain_result.h
  PlainRow rows[kPlainRows];
  ListTokens list[kPlainUnits];
  int32_t is_last;
};

template <class Unit, DType kType, int kDims>
class PlainTile {
 public:
  using Rows = PlainRows<kDims>;
  using Products = PlainProducts<kType, kDims>;
  using Shared = PlainShared<kDims>;
  static constexpr int kOwn = PlainResult<Unit, kType, kDims>::kOwn;  // dims of a lane, merged

  EFFINFER_DEVICE PlainTile(Unit& unit, const ops::AttentionProblem& p, Shared& shared)
      : unit_(unit),
        p_(p),
        shared_(shared),
        item_(p.work.items[unit.block]),
        tile_(p.work.tiles[item_.tile]),
        own_{item_, tile_},
        result_(unit, p, own_, shared.totals) {}

  EFFINFER_DEVICE void run() {
    int32_t chunk = own_.next_chunk(item_.first_unit / kPlainUnits);
    TokenPlaces places = places_of(chunk);
    if (chunk >= 0) fetch_queries();
    fetch(p_.k, places, chunk < 0, 0, shared_.keys[own_unit()]);
    fetch(p_.v, places, chunk < 0, 0, shared_.values[own_unit()].rows);
    if (unit_.thread < kPlainRows) {
      shared_.rows[unit_.thread] = plain_row(p_, tile_, unit_.thread);
    }
    // Queries came with the first keys. Where warps share units they meet before the first one.
    if constexpr (Rows::kSplit == 1) {
      unit_.template wait<1>();
      unit_.sync();
    }
    while (chunk >= 0) {
      const int32_t next = own_.next_chunk(chunk + 1);
      const TokenPlaces next_places = places_of(next);
      multiply(chunk, places, next < 0, next_places);
      unit_.sync();
      merge(chunk);
      unit_.sync();
      fetch(p_.v, next_places, next < 0, 0, shared_.values[own_unit()].rows);
      chunk = next;
      places = next_places;
    }
    finish();
  }

 private:
  EFFINFER_DEVICE int own_unit() const { return unit_.warp % kPlainUnits; }

  // Of the warps that share a unit's memory.
  EFFINFER_DEVICE void sync_unit() {
    if constexpr (Rows::kSplit == 1) {
      unit_.sync_warp();
    } else {
      unit_.sync();
    }
  }

  EFFINFER_DEVICE TokenPlaces places_of(int32_t chunk) {
    const int32_t index = chunk * kPlainUnits + own_unit();
    return Rows::find(unit_, p_, p_.work.spans, tile_, index, chunk >= 0 && own_.is_visited(index));
  }

  // A group of copies, which behind the last chunk is empty.
  EFFINFER_DEVICE void fetch(const ops::KvRows& rows, const TokenPlaces& places, bool is_over,
                             int stage, typename Rows::Stage& to) {
    if (!is_over) Rows::fetch(unit_, rows, tile_.kv_head, places, stage, to);
    unit_.commit();
  }

  EFFINFER_DEVICE void fetch_queries() {
    for (int i = unit_.thread; i < kPlainRows * Rows::kChunks; i += Rows::kWarps * kWarp) {
      const int row = i / Rows::kChunks;
      const int chunk = i % Rows::kChunks;
      const bool valid = row < own_.num_rows() && chunk * 8 < p_.q.dims;
      const auto* from = reinterpret_cast<const uint16_t*>(p_.q.data);
      if (valid) {
        from += own_.token(row) * p_.q.row_stride + own_.head(row) * p_.q.head_stride + chunk * 8;
      }
      unit_.copy_async(&shared_.queries[row][swizzled(row, chunk)], from, valid);
    }
  }

  // The warp's unit: its maximum, sum of weights and weighted values, in shared memory. Nothing is
  // multiplied of a unit that is not visited, whose maximum is that of no scores.
  EFFINFER_DEVICE void multiply(int32_t chunk, const TokenPlaces& places, bool is_last,
                                const TokenPlaces& next_places) {
    auto& keys = shared_.keys[own_unit()];
    auto& values = shared_.values[own_unit()];
    const int32_t index = chunk * kPlainUnits + own_unit();
    const bool visited = own_.is_visited(index);
    float max[2] = {kPlainNoScore, kPlainNoScore};
    float sum[2] = {};
    typename Products::Values sums = {};
    float key_scales[2] = {};
    float value_scales[2] = {};
    Rows::find_scales(unit_, p_.k, tile_.kv_head, places, key_scales);
    Rows::find_scales(unit_, p_.v, tile_.kv_head, places, value_scales);
    // For the logits, behind the first stage's barrier.
    if (visited && tile_.first_span >= 0 && unit_.warp < kPlainUnits) {
      Rows::store_tokens(unit_, p_, tile_, index, places, shared_.list[own_unit()]);
    }
    EFFINFER_UNROLL
    for (int stage = 0; stage < Rows::kStages; ++stage) {
      const bool last = stage + 1 == Rows::kStages;
      typename Products::Scores scores = {};
      unit_.template wait<1>();
      if (visited && is_narrow(p_.k.dtype)) Rows::template widen<kType>(unit_, p_.k, keys);
      sync_unit();
      if (visited) Products::add_scores(unit_, shared_.queries, keys, p_.k.dims, scores);
      sync_unit();
      fetch(p_.k, last ? next_places : places, last && is_last, last ? 0 : stage + 1, keys);
      if (visited) {
        const int begin = stage * Rows::kStage;
        if (p_.k.scales != nullptr) Products::multiply_tokens(unit_, key_scales, begin, scores);
        Products::set_logits(unit_, p_, tile_, shared_.rows, index, begin, shared_.list[own_unit()],
                             scores);
        Products::set_weights(unit_, scores, max, sum, sums);
        if (p_.v.scales != nullptr) Products::multiply_tokens(unit_, value_scales, begin, scores);
      }
      unit_.template wait<1>();
      if (visited && is_narrow(p_.v.dtype)) Rows::template widen<kType>(unit_, p_.v, values.rows);
      sync_unit();
      if (visited) Products::add_values(unit_, scores, values.rows, p_.v.dims, sums);
      sync_unit();
      if (!last) fetch(p_.v, places, false, stage + 1, values.rows);
    }
    share(max, sum, sums, values);
  }

  // Place of a number of a row: chunks of 4 in an order that spreads rows over banks.
  EFFINFER_DEVICE static int place_of(int row, int dim) {
    return swizzled(row, dim / 4) * 4 + dim % 4;
  }

  EFFINFER_DEVICE void share(const float (&max)[2], const float (&sum)[2],
                             const typename Products::Values& sums, typename Shared::Values& to) {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = unit_.lane / 4 + 8 * r;
      EFFINFER_UNROLL
      for (int d = 0; d < Products::kOwnChunks; ++d) {
        const int dim = (Products::first_chunk(unit_) + d) * 8 + unit_.lane % 4 * 2;
        float* pair = &to.sums[row][place_of(row, dim)];
        pair[0] = sums[d][2 * r];
        pair[1] = sums[d][2 * r + 1];
      }
      if (unit_.lane % 4 == 0 && unit_.warp < kPlainUnits) {
        shared_.max[own_unit()][row] = max[r];
        shared_.sum[own_unit()][row] = sum[r];
      }
    }
  }

  // A chunk's result, of the lane's own row and dims: that of its units, from left to right.
  EFFINFER_DEVICE void merge(int32_t chunk) {
    const int row = result_.row();
    float max = kPlainNoScore;
    EFFINFER_UNROLL
    for (int w = 0; w < kPlainUnits; ++w) max = fmaxf(max, shared_.max[w][row]);
    float sum = 0.0f;
    float values[kOwn] = {};
    EFFINFER_UNROLL
    for (int w = 0; w < kPlainUnits; ++w) {
      const float factor = plain_weight(shared_.max[w][row], max);
      sum = fmaf(shared_.sum[w][row], factor, sum);
      EFFINFER_UNROLL
      for (int d = 0; d < kOwn; ++d) {
        const float value = shared_.values[w].sums[row][place_of(row, result_.dim() + d)];
        values[d] = fmaf(value, factor, values[d]);
      }
    }
    result_.add(chunk, max, sum, values);
  }

  // Whoever ends a tile's last item folds its partial results, in the order of the keys.
  EFFINFER_DEVICE void finish() {
    if (item_.partial < 0) return result_.store();
    // All threads' partial results were stored before the last chunk's barrier.
    const bool is_last = ends_tile(unit_, p_, item_, shared_.is_last);
    if (!is_last || result_.row() >= own_.num_rows()) return;
    result_.add_partials(p_.work.merges[item_.merge]);
    result_.store();
  }

  Unit& unit_;
  const ops::AttentionProblem& p_;
  Shared& shared_;
  const ops::AttentionItem& item_;
  const ops::AttentionTile& tile_;
  const PlainItem own_;
  PlainResult<Unit, kType, kDims> result_;
};

template <DType kType, int kDims>
struct PlainAttentionKernel {
  static constexpr const char* kName = "plain_attention";
  static constexpr int kThreads = PlainRows<kDims>::kWarps * kWarp;
  static constexpr int kMinBlocks = kDims <= 64 ? 3 : 1;  // as shared memory lets an H100 hold
  using Params = ops::AttentionProblem;
  using Shared = PlainShared<kDims>;
  static_assert(sizeof(Shared) <= 163 << 10);  // of an A100's SM

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    if (p.work.items[unit.block].tile < 0) return;  // a block of a recording that has no item
    PlainTile<Unit, kType, kDims>(unit, p, shared).run();
  }
};

}  // namespace effinfer::cuda
