// What keys of a caller get of attention (ops/attention_scores.h), in float32: of rows of any float
// type and any number of dims, by blocks of rows and of keys, and by the distance from a row back
// to its key. key_scores.h has what tensor cores do.
//
// A block has an item's keys, up to 256, and one query head. It walks the rows 64 at a time and the
// item's units: 64 x 64 probabilities lie in shared memory, where each result of a block of rows
// and keys is a thread's, and each distance, too. What is a result's of other tiles is the same
// block's, so that it adds them in order. Up to 128 rows meet a distance in two items at most:
// their sums, added to zero in any order, are the same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/float_rows.h"
#include "cuda/bodies/key_scores.h"
#include "cuda/bodies/plain_products.h"
#include "cuda/bodies/plain_rows.h"
#include "cuda/unit.h"
#include "effinfer/ops/attention_scores.h"
#include "ops/attention_scores.h"

namespace effinfer::cuda {

struct FloatScoresShared {
  static constexpr int kRows = 64;
  FloatPiece queries[kRows];
  FloatPiece keys[kPlainUnit];
  float weights[kRows][kPlainUnit + 1];
  ScoreRow rows[kRows];
  FloatTokens<kPlainUnit> tokens;
  const uint8_t* query[kRows];  // null: there is no such row
  float diagonals[ops::kChunkTokens + ops::kMaxDiagonalRows];
};

template <class Unit>
class FloatScores {
 public:
  using Shared = FloatScoresShared;
  static constexpr int kRows = Shared::kRows;
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int kSide = 16;  // threads of a row, and of a key
  static constexpr int kOwn = 4;    // rows and keys of a thread, kSide apart

  EFFINFER_DEVICE FloatScores(Unit& unit, const ops::AttentionScoresProblem& p, Shared& shared)
      : unit_(unit),
        p_(p),
        shared_(shared),
        item_(p.items[unit.block / (p.num_qo_heads / p.num_kv_heads)]),
        head_(item_.kv_head * (p.num_qo_heads / p.num_kv_heads) +
              unit.block % (p.num_qo_heads / p.num_kv_heads)),
        tile_(scored_tile(p, item_)),
        first_row_(tile_.first_row),
        num_rows_(tile_.num_rows) {}

  EFFINFER_DEVICE void run() {
    if (p_.diagonals != nullptr) {
      for (int i = unit_.thread; i < num_distances(); i += kThreads) shared_.diagonals[i] = 0.0f;
    }
    for (int first = 0; first < num_rows_; first += kRows) {
      if (unit_.thread < kRows) {
        const int row = first + unit_.thread;
        shared_.rows[unit_.thread] = row_of(row);
        shared_.query[unit_.thread] =
            row < num_rows_ ? query_at(p_.q, first_row_ + row, head_) : nullptr;
      }
      for (int32_t index = item_.first_unit; index < item_.end_unit; ++index) {
        if (!sees_any(first, index)) continue;
        find(index);
        unit_.sync();
        multiply(index);
        unit_.sync();
        reduce(first, index);
        if (p_.diagonals != nullptr) add_diagonals(first, index);
      }
    }
    if (p_.diagonals == nullptr) return;
    unit_.sync();
    store_diagonals();
  }

 private:
  // Of the sequence's first row, where its rows follow each other.
  EFFINFER_DEVICE int32_t position() const { return tile_.num_tokens - num_rows_; }

  EFFINFER_DEVICE ScoreRow row_of(int row) const {
    if (row >= num_rows_) return {-1, 0.0f};
    const int64_t place = first_row_ + row;
    const float sum = p_.lse[place * p_.num_qo_heads + head_] / p_.lse_factor;
    if (sum == -INFINITY) return {-1, sum};  // of a row that sees nothing
    return {p_.positions != nullptr ? p_.positions[place] : position() + row, sum};
  }

  EFFINFER_DEVICE bool sees_any(int first, int32_t index) const {
    if (p_.positions != nullptr) return true;
    const int end = first + kRows < num_rows_ ? first + kRows : num_rows_;
    if (p_.causal && position() + end <= index * kPlainUnit) return false;
    return p_.window_left < 0 || (index + 1) * kPlainUnit > position() + first - p_.window_left;
  }

  EFFINFER_DEVICE void find(int32_t index) {
    if (unit_.warp != 0) return;
    const TokenPlaces places = PlainRows<64>::find(unit_, p_, nullptr, tile_, index, true);
    shared_.tokens.store(unit_, p_.k, tile_.kv_head, 0, places);
  }

  // The probabilities of 64 rows and a unit's keys; zeros where a row sees no key.
  EFFINFER_DEVICE void multiply(int32_t index) {
    const int y = unit_.thread / kSide;
    const int x = unit_.thread % kSide;
    float sums[kOwn][kOwn] = {};
    EFFINFER_NO_UNROLL
    for (int begin = 0; begin < p_.k.dims; begin += kPiece) {
      fetch_piece<kRows, kWarps>(unit_, p_.q.dtype, begin, p_.q.dims, shared_.queries,
                                 shared_.query);
      fetch_piece<kPlainUnit, kWarps>(unit_, p_.k.dtype, begin, p_.k.dims, shared_.keys,
                                      shared_.tokens.row);
      unit_.sync();
      EFFINFER_NO_UNROLL
      for (int d = 0; d < kPiece; ++d) {
        float query[kOwn], key[kOwn];
        EFFINFER_UNROLL
        for (int i = 0; i < kOwn; ++i) {
          query[i] = shared_.queries[y + i * kSide][d];
          key[i] = shared_.keys[x + i * kSide][d];
        }
        EFFINFER_UNROLL
        for (int i = 0; i < kOwn; ++i) {
          EFFINFER_UNROLL
          for (int j = 0; j < kOwn; ++j) sums[i][j] = fmaf(query[i], key[j], sums[i][j]);
        }
      }
      unit_.sync();
    }
    EFFINFER_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      EFFINFER_UNROLL
      for (int j = 0; j < kOwn; ++j) shared_.weights[y + i * kSide][x + j * kSide] = sums[i][j];
    }
    // Code for one of the thread's products is a third of the kernel's for all of them.
    EFFINFER_NO_UNROLL
    for (int i = 0; i < kOwn * kOwn; ++i) {
      const int row = y + i / kOwn * kSide;
      const int at = x + i % kOwn * kSide;
      float& weight = shared_.weights[row][at];
      const float product = fmaf(weight, shared_.tokens.scale[at], 0.0f);
      weight = weight_of(shared_.rows[row], index * kPlainUnit + at, product);
    }
  }

  EFFINFER_DEVICE float weight_of(const ScoreRow& row, int32_t key, float product) const {
    bool seen = row.position >= 0 && key < tile_.num_tokens;
    if (p_.causal) seen = seen && key <= row.position;
    if (p_.window_left >= 0) seen = seen && key >= row.position - p_.window_left;
    return seen ? plain_weight(plain_logit(p_, product), row.sum) : 0.0f;
  }

  // Each result of the tile: of a block of rows and a block of keys, or a part of them.
  EFFINFER_DEVICE void reduce(int first, int32_t index) {
    const int keys = p_.key_block < kPlainUnit ? p_.key_block : kPlainUnit;
    const int columns = kPlainUnit / keys;
    const int end = first + kRows < num_rows_ ? first + kRows : num_rows_;
    const int first_block = block_of(first);
    const int results = (block_of(end - 1) - first_block + 1) * columns;
    const ops::ScoreRows& rows = p_.rows[item_.sequence];
    float* out = p_.out + rows.first + head_ * rows.head_stride;
    EFFINFER_NO_UNROLL
    for (int i = unit_.thread; i < results; i += kThreads) {
      const int block = first_block + i / columns;
      const int key = i % columns * keys;
      const int32_t token = index * kPlainUnit + key;
      if (token >= tile_.num_tokens) continue;
      const int from = begin_of(block) > first ? begin_of(block) - first : 0;
      const int to = (begin_of(block + 1) < end ? begin_of(block + 1) : end) - first;
      float& result = out[(block - block_of(0)) * rows.block_stride + token / p_.key_block];
      float sum = 0.0f;
      EFFINFER_NO_UNROLL
      for (int row = from; row < to; ++row) {
        for (int at = key; at < key + keys; ++at) {
          const float weight = shared_.weights[row][at];
          sum = p_.maximum ? fmaxf(sum, weight) : sum + weight;
        }
      }
      result = p_.maximum ? fmaxf(result, sum) : result + sum;
    }
  }
  // Blocks of rows, by their positions, and the first row of one.
  EFFINFER_DEVICE int block_of(int row) const {
    return p_.row_block == 0 ? 0 : (position() + row) / p_.row_block;
  }
  EFFINFER_DEVICE int begin_of(int block) const {
    if (p_.row_block > 0) return block * p_.row_block - position();
    return block == 0 ? 0 : num_rows_;
  }

  // Distances that the item's keys and the sequence's rows may have, from the least one on.
  EFFINFER_DEVICE int num_distances() const {
    return (item_.end_unit - item_.first_unit) * kPlainUnit + num_rows_ - 1;
  }
  EFFINFER_DEVICE int32_t least_distance() const {
    return position() - (item_.end_unit * kPlainUnit - 1);
  }

  EFFINFER_DEVICE void add_diagonals(int first, int32_t index) {
    const int shift = unit_.thread - (kRows - 1);  // from a row to its key
    if (shift >= kPlainUnit) return;
    float sum = 0.0f;
    const int end = kRows < num_rows_ - first ? kRows : num_rows_ - first;
    for (int row = shift < 0 ? -shift : 0; row < end && row + shift < kPlainUnit; ++row) {
      sum += shared_.weights[row][row + shift];
    }
    const int at = position() + first - (index * kPlainUnit + shift) - least_distance();
    // Longer ones are of rows that are not there.
    if (at < num_distances()) shared_.diagonals[at] += sum;
  }

  EFFINFER_DEVICE void store_diagonals() {
    const ops::ScoreRows& rows = p_.rows[item_.sequence];
    float* out = p_.diagonals + rows.first + head_ * rows.head_stride;
    for (int i = unit_.thread; i < num_distances(); i += kThreads) {
      const int32_t distance = least_distance() + i;
      const float sum = shared_.diagonals[i];
      if (distance >= 0 && sum != 0.0f) unit_.atomic_add(out + distance, sum);
    }
  }

  Unit& unit_;
  const ops::AttentionScoresProblem& p_;
  Shared& shared_;
  const ops::ScoreItem& item_;
  const int head_;
  const ops::AttentionTile tile_;
  const int32_t first_row_;
  const int32_t num_rows_;
};

struct FloatScoresKernel {
  static constexpr const char* kName = "float_scores";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 3;
  using Params = ops::AttentionScoresProblem;
  using Shared = FloatScoresShared;

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    FloatScores<Unit>(unit, p, shared).run();
  }
};

}  // namespace effinfer::cuda
