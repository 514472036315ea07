// Attention in float32 over keys and values of any float type as a caller has them, latent ones
// among them: a block an item, of which it walks 16 (row, head) pairs and up to 256 dims of the
// values at a time. No tensor core has float32, so that threads multiply.
//
// The scores of a chunk's 256 tokens are there at once. Queries and keys go by 32 dims at a time,
// and behind the softmax the values, 32 dims of all of the chunk's tokens, whose sums are folded
// into what came before or stored for whoever ends the tile (plain_item.h). Thread 16 p + c of a
// block has rows 2 p and 2 p + 1, and of them tokens c, c + 16, ... and dims c and c + 16 of 32;
// with c = 0 it keeps their maxima and sums. Few loops are unrolled: code is a part of the wheel.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/float_result.h"
#include "cuda/bodies/float_rows.h"
#include "cuda/bodies/plain_item.h"
#include "cuda/bodies/plain_products.h"
#include "cuda/bodies/plain_rows.h"
#include "cuda/unit.h"
#include "ops/attention.h"
#include "ops/latent_tile.h"

namespace effinfer::cuda {

template <class Unit>
class FloatTile : FloatResult<Unit> {
 public:
  using Result = FloatResult<Unit>;
  using Shared = FloatAttentionShared;
  using Result::kColumns, Result::kOwn;
  static constexpr int kWarps = kPlainUnits;
  static constexpr int kUnitTokens = kPlainUnit / kColumns;  // of a thread

  EFFINFER_DEVICE FloatTile(Unit& unit, const ops::AttentionProblem& p, Shared& shared)
      : Result(unit, p, shared) {}

  // Whoever ends a divided tile folds its partial results once all are stored.
  EFFINFER_DEVICE void run() {
    const bool is_part = item_.partial >= 0;
    EFFINFER_NO_UNROLL
    for (int turn = 0; turn < 2; ++turn) {
      // Partial results were stored before the last chunk's barrier.
      const bool folds = turn == 1;
      if (folds && (!is_part || !ends_tile(unit_, p_, item_, shared_.is_last))) return;
      EFFINFER_NO_UNROLL
      for (first_pair_ = 0; first_pair_ < own_.num_rows(); first_pair_ += kPlainRows) {
        first_dim_ = 0;
        do {
          if (!folds) walk();
          if (folds == is_part) finish();
          first_dim_ += Shared::kDims;
        } while (first_dim_ < p_.v.dims);
      }
    }
  }

 private:
  using Places = PlainRows<64>;
  using Result::add, Result::exists, Result::finish, Result::last_dim, Result::place_of;
  using Result::first_dim_, Result::first_pair_, Result::row_, Result::column_, Result::start;
  using Result::unit_, Result::p_, Result::shared_, Result::item_, Result::tile_, Result::own_;

  EFFINFER_DEVICE void walk() {
    if (unit_.thread < kPlainRows) {
      const int pair = first_pair_ + unit_.thread;
      shared_.who[unit_.thread] = plain_row(p_, tile_, pair);
      EFFINFER_UNROLL
      for (int part = 0; part < 2; ++part) {
        const ops::QueryRows& q = part == 0 ? p_.q : p_.q_rope;
        shared_.query[part][unit_.thread] =
            exists(unit_.thread) ? query_at(q, own_.token(pair), own_.head(pair)) : nullptr;
      }
    }
    start();
    int32_t chunk = item_.first_unit / kPlainUnits - 1;
    while ((chunk = own_.next_chunk(chunk + 1)) >= 0) {
      find(chunk);
      unit_.sync();
      EFFINFER_NO_UNROLL
      for (int i = 0; i < kPlainUnits; ++i) multiply(chunk, i);
      EFFINFER_NO_UNROLL
      for (int row = row_; row < row_ + kOwn; ++row) set_weights(chunk, row);
      EFFINFER_NO_UNROLL
      for (int begin = first_dim_; begin < last_dim(); begin += kPiece) add_values(chunk, begin);
      unit_.sync();
    }
  }

  // Where the tokens of a chunk lie: a warp looks up a unit.
  EFFINFER_DEVICE void find(int32_t chunk) {
    const int32_t index = chunk * kPlainUnits + unit_.warp;
    const bool visited = own_.is_visited(index);
    const TokenPlaces places = Places::find(unit_, p_, p_.work.spans, tile_, index, visited);
    const int begin = unit_.warp * kPlainUnit;
    EFFINFER_NO_UNROLL
    for (int part = 0; part < 3; ++part) {
      const ops::KvRows& rows = part == 0 ? p_.k : part == 1 ? p_.k_rope : p_.v;
      FloatTokens<ops::kChunkTokens>& to = part < 2 ? shared_.keys[part] : shared_.values;
      to.store(unit_, rows, tile_.kv_head, begin, places);
    }
    if (tile_.first_span >= 0) {
      Places::store_tokens(unit_, p_, tile_, index, places, shared_.list[unit_.warp]);
    }
  }

  // Products with the keys of a unit of the chunk.
  EFFINFER_DEVICE void multiply(int32_t chunk, int unit) {
    float sums[kOwn][kUnitTokens] = {};
    const bool visited = own_.is_visited(chunk * kPlainUnits + unit);
    EFFINFER_NO_UNROLL
    for (int part = 0; visited && part < 2; ++part) {
      const ops::QueryRows& q = part == 0 ? p_.q : p_.q_rope;
      const ops::KvRows& k = part == 0 ? p_.k : p_.k_rope;
      EFFINFER_NO_UNROLL
      for (int begin = 0; begin < k.dims; begin += kPiece) {
        fetch_piece<kPlainRows, kWarps>(unit_, q.dtype, begin, q.dims, shared_.queries,
                                        shared_.query[part]);
        fetch_piece<kPlainUnit, kWarps>(unit_, k.dtype, begin, k.dims, shared_.rows,
                                        shared_.keys[part].row + unit * kPlainUnit);
        unit_.sync();
        multiply_piece(sums);
        unit_.sync();
      }
    }
    EFFINFER_UNROLL
    for (int t = 0; t < kUnitTokens; ++t) {
      EFFINFER_UNROLL
      for (int r = 0; r < kOwn; ++r) {
        shared_.weights[row_ + r][unit * kPlainUnit + column_ + t * kColumns] = sums[r][t];
      }
    }
  }

  EFFINFER_DEVICE void multiply_piece(float (&sums)[kOwn][kUnitTokens]) const {
    constexpr int kAtOnce = 4;
    EFFINFER_NO_UNROLL
    for (int first = 0; first < kPiece; first += kAtOnce) {
      EFFINFER_UNROLL
      for (int d = first; d < first + kAtOnce; ++d) {
        const float query[kOwn] = {shared_.queries[row_][d], shared_.queries[row_ + 1][d]};
        EFFINFER_UNROLL
        for (int t = 0; t < kUnitTokens; ++t) {
          const float key = shared_.rows[column_ + t * kColumns][d];
          EFFINFER_UNROLL
          for (int r = 0; r < kOwn; ++r) sums[r][t] = fmaf(query[r], key, sums[r][t]);
        }
      }
    }
  }

  EFFINFER_DEVICE float logit(int32_t chunk, int row, int at, float product) {
    if (shared_.keys[0].row[at] == nullptr) return -INFINITY;
    const PlainRow& who = shared_.who[row];
    int32_t token = chunk * ops::kChunkTokens + at;
    int64_t bit = who.mask_bit + token;
    if (tile_.first_span >= 0) {
      const ListTokens& list = shared_.list[at / kPlainUnit];
      token = list.token[at % kPlainUnit];
      bit = who.mask_bit + list.mask_bit[at % kPlainUnit];
    }
    if (!plain_sees(p_, who, token, bit)) return -INFINITY;
    return plain_logit(p_, who, token, fmaf(product, shared_.keys[0].scale[at], 0.0f));
  }

  // A row's products to weights, of which the thread has its own, times the scales of values; how
  // they are folded, or a partial result.
  EFFINFER_DEVICE void set_weights(int32_t chunk, int row) {
    float* weights = shared_.weights[row];
    float max = kPlainNoScore;
    EFFINFER_NO_UNROLL
    for (int at = column_; at < ops::kChunkTokens; at += kColumns) {
      weights[at] = logit(chunk, row, at, weights[at]);
      max = fmaxf(max, weights[at]);
    }
    EFFINFER_UNROLL
    for (int mask = 1; mask < kColumns; mask *= 2) max = fmaxf(max, unit_.shfl_xor(max, mask));
    float sum = 0.0f;
    EFFINFER_NO_UNROLL
    for (int at = column_; at < ops::kChunkTokens; at += kColumns) {
      const float weight = plain_weight(weights[at], max);
      sum += weight;
      weights[at] = fmaf(weight, shared_.values.scale[at], 0.0f);
    }
    EFFINFER_UNROLL
    for (int mask = 1; mask < kColumns; mask *= 2) sum += unit_.shfl_xor(sum, mask);
    if (column_ != 0) return;
    if (item_.partial < 0) {
      shared_.folds[row] = PlainFold(shared_.max[row], shared_.sum[row], max, sum);
    } else if (exists(row) && first_dim_ == 0) {
      float* ms = p_.partial_ms + 2 * own_.partial(chunk, first_pair_ + row);
      ms[0] = max;
      ms[1] = sum;
    }
  }

  // The chunk's weighted values, 32 dims of them, folded or stored.
  EFFINFER_DEVICE void add_values(int32_t chunk, int begin) {
    constexpr int kAtOnce = 4;
    float values[kOwn][kOwn] = {};
    EFFINFER_NO_UNROLL
    for (int unit = 0; unit < kPlainUnits; ++unit) {
      if (!own_.is_visited(chunk * kPlainUnits + unit)) continue;
      unit_.sync();
      fetch_piece<kPlainUnit, kWarps>(unit_, p_.v.dtype, begin, p_.v.dims, shared_.rows,
                                      shared_.values.row + unit * kPlainUnit);
      unit_.sync();
      EFFINFER_NO_UNROLL
      for (int first = 0; first < kPlainUnit; first += kAtOnce) {
        EFFINFER_UNROLL
        for (int t = first; t < first + kAtOnce; ++t) {
          EFFINFER_UNROLL
          for (int r = 0; r < kOwn; ++r) {
            const float weight = shared_.weights[row_ + r][unit * kPlainUnit + t];
            EFFINFER_UNROLL
            for (int d = 0; d < kOwn; ++d) {
              const float value = shared_.rows[t][column_ + d * kColumns];
              values[r][d] = fmaf(weight, value, values[r][d]);
            }
          }
        }
      }
    }
    EFFINFER_UNROLL
    for (int r = 0; r < kOwn; ++r) {
      EFFINFER_UNROLL
      for (int d = 0; d < kOwn; ++d) {
        const int at = begin + column_ + d * kColumns;
        if (at >= p_.v.dims || !exists(row_ + r)) continue;
        if (item_.partial < 0) {
          add(row_ + r, at, shared_.folds[row_ + r], values[r][d]);
        } else {
          p_.partial_out[place_of(own_.partial(chunk, first_pair_ + row_ + r)) + at] = values[r][d];
        }
      }
    }
  }
};

struct FloatAttentionKernel {
  static constexpr const char* kName = "float_attention";
  static constexpr int kThreads = kPlainUnits * kWarp;
  static constexpr int kMinBlocks = 2;  // as shared memory lets an A100 hold
  using Params = ops::AttentionProblem;
  using Shared = FloatAttentionShared;

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    if (p.work.items[unit.block].tile < 0) return;  // a block of a recording that has no item
    FloatTile<Unit>(unit, p, shared).run();
  }
};

}  // namespace effinfer::cuda
