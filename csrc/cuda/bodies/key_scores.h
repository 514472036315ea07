// What keys of a caller get of attention (ops/attention_scores.h): a block has 256 keys of a KV
// head in shared memory, 64 of them or 32 a warp, and walks the query rows of the group's heads, 16
// at a time, whose sums are known. Each lane adds up the probabilities of its keys for two of the
// 16 rows; lanes of a key meet when a head's rows have gone by. So a key's sum has one order, that
// of the rows.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/plain_products.h"
#include "cuda/bodies/plain_rows.h"
#include "cuda/unit.h"
#include "ops/attention_scores.h"

namespace effinfer::cuda {

struct ScoreRow {
  int32_t position;  // -1: there is no such row
  float sum;         // natural logarithm
};

// An item's KV head and rows as a tile, which is what tokens are found by.
EFFINFER_DEVICE ops::AttentionTile scored_tile(const ops::AttentionScoresProblem& p,
                                               const ops::ScoreItem& item) {
  ops::AttentionTile tile = {};
  tile.sequence = item.sequence;
  tile.kv_head = item.kv_head;
  tile.first_span = -1;
  tile.num_tokens = p.batch.kv_len[item.sequence];
  tile.first_row = p.batch.qo_indptr[item.sequence];
  tile.num_rows = p.batch.qo_indptr[item.sequence + 1] - tile.first_row;
  return tile;
}

template <int kDims>
struct KeyScoresShared {
  using Rows = PlainRows<kDims>;
  typename Rows::Stage keys[kPlainUnits][Rows::kStages];
  Quad queries[2][kPlainRows][kDims / 8];
  ScoreRow rows[2][kPlainRows];
};

template <class Unit, DType kType, int kDims>
class KeyScores {
 public:
  using Rows = PlainRows<kDims>;
  using Products = PlainProducts<kType, kDims>;
  using Shared = KeyScoresShared<kDims>;
  static constexpr int kSums = 2 * Products::kBlocks;

  EFFINFER_DEVICE KeyScores(Unit& unit, const ops::AttentionScoresProblem& p, Shared& shared)
      : unit_(unit),
        p_(p),
        shared_(shared),
        item_(p.items[unit.block]),
        group_(p.num_qo_heads / p.num_kv_heads),
        tile_(scored_tile(p, item_)),
        first_row_(tile_.first_row),
        num_rows_(tile_.num_rows) {}

  EFFINFER_DEVICE void run() {
    const int32_t index = item_.first_unit + unit_.warp % kPlainUnits;
    const TokenPlaces places = Rows::find(unit_, p_, nullptr, tile_, index, index < item_.end_unit);
    EFFINFER_UNROLL
    for (int stage = 0; stage < Rows::kStages; ++stage) {
      Rows::fetch(unit_, p_.k, tile_.kv_head, places, stage,
                  shared_.keys[unit_.warp % kPlainUnits][stage]);
    }
    const int tiles = (num_rows_ + kPlainRows - 1) / kPlainRows;
    const int steps = tiles * group_;
    fetch_queries(0, tiles, steps);
    float sums[kSums] = {};
    for (int step = 0; step < steps; ++step) {
      fetch_queries(step + 1, tiles, steps);
      unit_.template wait<1>();
      if (step == 0 && is_narrow(p_.k.dtype)) widen_keys();
      unit_.sync();
      if (sees_any(step % tiles)) add(step % 2, sums);
      if (step % tiles == tiles - 1) store(step / tiles, sums);
      unit_.sync();
    }
  }

 private:
  // Keys come with the queries of the first step.
  EFFINFER_DEVICE void widen_keys() {
    for (auto& stage : shared_.keys[unit_.warp % kPlainUnits]) {
      Rows::template widen<kType>(unit_, p_.k, stage);
    }
  }

  EFFINFER_DEVICE int own_stage() const { return unit_.warp / kPlainUnits; }
  EFFINFER_DEVICE int32_t first_key() const {
    return (item_.first_unit + unit_.warp % kPlainUnits) * kPlainUnit + own_stage() * Rows::kStage;
  }
  EFFINFER_DEVICE int32_t key_of(int t) const {
    return first_key() + t / 2 * 8 + unit_.lane % 4 * 2 + t % 2;
  }

  // Rows whose positions follow each other: the last one sees the most.
  EFFINFER_DEVICE bool sees_any(int tile) const {
    if (!p_.causal || p_.positions != nullptr) return true;
    const int end = (tile + 1) * kPlainRows < num_rows_ ? (tile + 1) * kPlainRows : num_rows_;
    return tile_.num_tokens - num_rows_ + end > item_.first_unit * kPlainUnit;
  }

  // A group of copies, which behind the last step is empty.
  EFFINFER_DEVICE void fetch_queries(int step, int tiles, int steps) {
    const int buffer = step % 2;
    if (step < steps) {
      const int head = tile_.kv_head * group_ + step / tiles;
      const int first = step % tiles * kPlainRows;
      const auto* data = reinterpret_cast<const uint16_t*>(p_.q.data);
      for (int i = unit_.thread; i < kPlainRows * Rows::kChunks; i += Rows::kWarps * kWarp) {
        const int row = i / Rows::kChunks;
        const int chunk = i % Rows::kChunks;
        const bool valid = first + row < num_rows_ && chunk * 8 < p_.q.dims;
        const uint16_t* from = data;
        if (valid) {
          from +=
              (first_row_ + first + row) * p_.q.row_stride + head * p_.q.head_stride + chunk * 8;
        }
        unit_.copy_async(&shared_.queries[buffer][row][swizzled(row, chunk)], from, valid);
      }
      if (unit_.thread < kPlainRows) {
        shared_.rows[buffer][unit_.thread] = row_of(first + unit_.thread, head);
      }
    }
    unit_.commit();
  }

  EFFINFER_DEVICE ScoreRow row_of(int row, int head) const {
    if (row >= num_rows_) return {-1, 0.0f};
    const int64_t place = first_row_ + row;
    const float sum = p_.lse[place * p_.num_qo_heads + head] / p_.lse_factor;
    if (sum == -INFINITY) return {-1, sum};  // of a row that sees nothing
    if (p_.positions != nullptr) return {p_.positions[place], sum};
    return {tile_.num_tokens - num_rows_ + row, sum};
  }

  // Probabilities of the warp's keys for 16 rows.
  EFFINFER_DEVICE void add(int buffer, float (&sums)[kSums]) {
    typename Products::Scores scores = {};
    Products::add_scores(unit_, shared_.queries[buffer],
                         shared_.keys[unit_.warp % kPlainUnits][own_stage()], p_.k.dims, scores);
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      const ScoreRow row = shared_.rows[buffer][unit_.lane / 4 + 8 * r];
      EFFINFER_UNROLL
      for (int t = 0; t < kSums; ++t) {
        const int32_t key = key_of(t);
        bool seen = row.position >= 0 && key < tile_.num_tokens;
        if (p_.causal) seen = seen && key <= row.position;
        if (p_.window_left >= 0) seen = seen && key >= row.position - p_.window_left;
        if (!seen) continue;
        const float x = plain_logit(p_, scores[t / 2][2 * r + t % 2]);
        const float weight = plain_weight(x, row.sum);
        sums[t] = p_.maximum ? fmaxf(sums[t], weight) : sums[t] + weight;
      }
    }
  }

  // A head's results, and a start for the next one.
  EFFINFER_DEVICE void store(int head, float (&sums)[kSums]) {
    const ops::ScoreRows& rows = p_.rows[item_.sequence];
    float* out = p_.out + rows.first + (tile_.kv_head * group_ + head) * rows.head_stride;
    EFFINFER_UNROLL
    for (int t = 0; t < kSums; ++t) {
      float sum = sums[t];
      EFFINFER_UNROLL
      for (int mask = 4; mask < kWarp; mask *= 2) {
        const float other = unit_.shfl_xor(sum, mask);
        sum = p_.maximum ? fmaxf(sum, other) : sum + other;
      }
      if (unit_.lane < 4 && key_of(t) < tile_.num_tokens) out[key_of(t)] = sum;
      sums[t] = 0.0f;
    }
  }

  Unit& unit_;
  const ops::AttentionScoresProblem& p_;
  Shared& shared_;
  const ops::ScoreItem& item_;
  const int group_;  // query heads of the KV head
  const ops::AttentionTile tile_;
  const int32_t first_row_;
  const int32_t num_rows_;
};

template <DType kType, int kDims>
struct KeyScoresKernel {
  static constexpr const char* kName = "attention_scores";
  static constexpr int kThreads = PlainRows<kDims>::kWarps * kWarp;
  using Params = ops::AttentionScoresProblem;
  using Shared = KeyScoresShared<kDims>;

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    KeyScores<Unit, kType, kDims>(unit, p, shared).run();
  }
};

}  // namespace effinfer::cuda
