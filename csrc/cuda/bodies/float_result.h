// The sums of attention in float32 (float_attention.h) and how they leave a block, as
// plain_result.h has it of the tensor cores': of 16 (row, head) pairs and up to 256 dims of the
// values at a time.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/float_rows.h"
#include "cuda/bodies/plain_item.h"
#include "cuda/bodies/plain_products.h"
#include "cuda/bodies/plain_rows.h"
#include "cuda/unit.h"
#include "ops/attention.h"
#include "ops/latent_tile.h"

namespace effinfer::cuda {

struct FloatAttentionShared {
  static constexpr int kDims = ops::kGpuMostHeadDim;
  FloatPiece queries[kPlainRows];
  FloatPiece rows[kPlainUnit];  // of keys, of values
  float weights[kPlainRows][ops::kChunkTokens];
  float totals[kPlainRows][kDims];
  PlainRow who[kPlainRows];
  const uint8_t* query[2][kPlainRows];  // of q and q_rope; null: there is no such row
  // Of the rows' chunks so far, and how the chunk joins them.
  float max[kPlainRows];
  float sum[kPlainRows];
  PlainFold folds[kPlainRows];
  FloatTokens<ops::kChunkTokens> keys[2];  // of k and k_rope
  FloatTokens<ops::kChunkTokens> values;
  ListTokens list[kPlainUnits];
  int32_t is_last;
};

template <class Unit>
class FloatResult {
 public:
  using Shared = FloatAttentionShared;
  static constexpr int kColumns = 16;  // threads of a row
  static constexpr int kOwn = 2;       // rows of a thread, and dims of 32

 protected:
  EFFINFER_DEVICE FloatResult(Unit& unit, const ops::AttentionProblem& p, Shared& shared)
      : unit_(unit),
        p_(p),
        shared_(shared),
        item_(p.work.items[unit.block]),
        tile_(p.work.tiles[item_.tile]),
        own_{item_, tile_},
        row_(unit.thread / kColumns * kOwn),
        column_(unit.thread % kColumns) {}

  // Behind the last dim at hand.
  EFFINFER_DEVICE int last_dim() const {
    const int last = first_dim_ + Shared::kDims;
    return last < p_.v.dims ? last : p_.v.dims;
  }
  // visit(dim) of a row's, those of the thread.
  template <class Visit>
  EFFINFER_DEVICE void each_dim(Visit&& visit) const {
    EFFINFER_NO_UNROLL
    for (int at = first_dim_ + column_; at < last_dim(); at += kColumns) visit(at);
  }
  EFFINFER_DEVICE float& total(int row, int at) { return shared_.totals[row][at - first_dim_]; }
  EFFINFER_DEVICE bool exists(int row) const { return first_pair_ + row < own_.num_rows(); }

  EFFINFER_DEVICE void start() {
    EFFINFER_NO_UNROLL
    for (int row = row_; row < row_ + kOwn; ++row) {
      if (column_ == 0) shared_.max[row] = kPlainNoScore;
      if (column_ == 0) shared_.sum[row] = 0.0f;
      each_dim([&](int at) { total(row, at) = 0.0f; });
    }
  }

  EFFINFER_DEVICE void add(int row, int at, const PlainFold& fold, float value) {
    total(row, at) = fold.add(total(row, at), value);
  }

  EFFINFER_DEVICE int64_t place_of(int64_t partial) const {
    return partial * ((p_.v.dims + 15) / 16 * 16);
  }

  EFFINFER_DEVICE void finish() {
    EFFINFER_NO_UNROLL
    for (int row = row_; row < row_ + kOwn; ++row) {
      // Who keeps them tells the others, of a row without keys, too.
      const int keeper = unit_.lane / kColumns * kColumns;
      float max = unit_.shfl(column_ == 0 ? shared_.max[row] : 0.0f, keeper);
      float sum = unit_.shfl(column_ == 0 ? shared_.sum[row] : 0.0f, keeper);
      if (!exists(row)) continue;
      if (item_.partial >= 0) add_partials(row, p_.work.merges[item_.merge], max, sum);
      store(row, max, sum);
    }
  }

  EFFINFER_DEVICE void add_partials(int row, const ops::AttentionMerge& merge, float& max,
                                    float& sum) {
    max = kPlainNoScore;
    sum = 0.0f;
    each_dim([&](int at) { total(row, at) = 0.0f; });
    EFFINFER_NO_UNROLL
    for (int i = 0; i < merge.num_partials; ++i) {
      const int64_t index = merge.first_partial + int64_t{i} * own_.num_rows() + first_pair_ + row;
      const PlainFold fold(max, sum, p_.partial_ms[2 * index], p_.partial_ms[2 * index + 1]);
      each_dim([&](int at) { add(row, at, fold, p_.partial_out[place_of(index) + at]); });
    }
  }

  EFFINFER_DEVICE void store(int row, float max, float sum) {
    const int64_t token = own_.token(first_pair_ + row);
    const int head = own_.head(first_pair_ + row);
    const PlainEnd end = plain_end(p_, head, max, sum);
    const bool tells = p_.lse != nullptr && column_ == 0 && first_dim_ == 0;
    if (tells) p_.lse[token * p_.num_qo_heads + head] = end.lse;
    const int64_t first = token * p_.out_stride + int64_t{head} * p_.v.dims;
    each_dim([&](int at) {
      write_float(unit_, p_.q.dtype, p_.out, first + at, total(row, at) * end.factor);
    });
  }

  Unit& unit_;
  const ops::AttentionProblem& p_;
  Shared& shared_;
  const ops::AttentionItem& item_;
  const ops::AttentionTile& tile_;
  const PlainItem own_;
  const int row_;
  const int column_;
  int first_pair_ = 0;
  int first_dim_ = 0;
};

}  // namespace effinfer::cuda
