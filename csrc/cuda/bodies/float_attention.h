// Attention in float32 over keys and values of any float type as a caller has them: a block an
// item, of up to 16 (row, head) pairs. No tensor core has float32, so that threads multiply.
//
// The scores of a chunk's 256 tokens are there at once. Queries and keys go by 32 dims at a time,
// and behind the softmax the values, 32 dims of all of the chunk's tokens, whose sums are folded
// into what came before or stored for whoever ends the tile (plain_item.h). Thread 16 p + c of a
// block has rows 2 p and 2 p + 1, and of them tokens c, c + 16, ... and dims c and c + 16 of 32;
// with c = 0 it keeps their maxima and sums. Few loops are unrolled: code is a part of the wheel.
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
  FloatPiece queries[kPlainRows];
  FloatPiece rows[kPlainUnit];  // of keys, of values
  float weights[kPlainRows][ops::kChunkTokens];
  float totals[kPlainRows][ops::kGpuMostHeadDim];
  PlainRow who[kPlainRows];
  const uint8_t* query[kPlainRows];  // null: there is no such row
  // Of the rows' chunks so far, and how the chunk joins them.
  float max[kPlainRows];
  float sum[kPlainRows];
  PlainFold folds[kPlainRows];
  FloatTokens<ops::kChunkTokens> keys;
  FloatTokens<ops::kChunkTokens> values;
  ListTokens list[kPlainUnits];
  int32_t is_last;
};

template <class Unit>
class FloatTile {
 public:
  using Shared = FloatAttentionShared;
  static constexpr int kWarps = kPlainUnits;
  static constexpr int kColumns = 16;  // threads of a row
  static constexpr int kOwn = 2;       // rows of a thread, and dims of 32

  EFFINFER_DEVICE FloatTile(Unit& unit, const ops::AttentionProblem& p, Shared& shared)
      : unit_(unit),
        p_(p),
        shared_(shared),
        item_(p.work.items[unit.block]),
        tile_(p.work.tiles[item_.tile]),
        own_{item_, tile_},
        row_(unit.thread / kColumns * kOwn),
        column_(unit.thread % kColumns) {}

  EFFINFER_DEVICE void run() {
    if (unit_.thread < kPlainRows) {
      const int row = unit_.thread;
      shared_.who[row] = plain_row(p_, tile_, row);
      const bool exists = row < own_.num_rows();
      shared_.query[row] = exists ? query_at(p_.q, own_.token(row), own_.head(row)) : nullptr;
    }
    EFFINFER_NO_UNROLL
    for (int row = row_; row < row_ + kOwn; ++row) {
      if (column_ == 0) shared_.max[row] = kPlainNoScore;
      if (column_ == 0) shared_.sum[row] = 0.0f;
      each_dim([&](int at) { shared_.totals[row][at] = 0.0f; });
    }
    int32_t chunk = item_.first_unit / kPlainUnits - 1;
    while ((chunk = own_.next_chunk(chunk + 1)) >= 0) {
      find(chunk);
      unit_.sync();
      EFFINFER_NO_UNROLL
      for (int i = 0; i < kPlainUnits; ++i) multiply(chunk, i);
      EFFINFER_NO_UNROLL
      for (int row = row_; row < row_ + kOwn; ++row) set_weights(chunk, row);
      EFFINFER_NO_UNROLL
      for (int begin = 0; begin < p_.v.dims; begin += kPiece) add_values(chunk, begin);
      unit_.sync();
    }
    finish();
  }

 private:
  using Places = PlainRows<64>;

  // visit(dim) of a row's, those of the thread.
  template <class Visit>
  EFFINFER_DEVICE void each_dim(Visit&& visit) const {
    EFFINFER_NO_UNROLL
    for (int at = column_; at < p_.v.dims; at += kColumns) visit(at);
  }

  // Where the tokens of a chunk lie: a warp looks up a unit.
  EFFINFER_DEVICE void find(int32_t chunk) {
    const int32_t index = chunk * kPlainUnits + unit_.warp;
    const bool visited = own_.is_visited(index);
    const TokenPlaces places = Places::find(unit_, p_, p_.work.spans, tile_, index, visited);
    shared_.keys.store(unit_, p_.k, tile_.kv_head, unit_.warp * kPlainUnit, places);
    shared_.values.store(unit_, p_.v, tile_.kv_head, unit_.warp * kPlainUnit, places);
    if (tile_.first_span >= 0) {
      Places::store_tokens(unit_, p_, tile_, index, places, shared_.list[unit_.warp]);
    }
  }

  // Products with the keys of a unit of the chunk.
  EFFINFER_DEVICE void multiply(int32_t chunk, int unit) {
    constexpr int kTokens = kPlainUnit / kColumns;  // of a thread
    constexpr int kAtOnce = 4;
    float sums[kOwn][kTokens] = {};
    const bool visited = own_.is_visited(chunk * kPlainUnits + unit);
    EFFINFER_NO_UNROLL
    for (int begin = 0; visited && begin < p_.k.dims; begin += kPiece) {
      fetch_piece<kPlainRows, kWarps>(unit_, p_.q.dtype, begin, p_.q.dims, shared_.queries,
                                      shared_.query);
      fetch_piece<kPlainUnit, kWarps>(unit_, p_.k.dtype, begin, p_.k.dims, shared_.rows,
                                      shared_.keys.row + unit * kPlainUnit);
      unit_.sync();
      EFFINFER_NO_UNROLL
      for (int first = 0; first < kPiece; first += kAtOnce) {
        EFFINFER_UNROLL
        for (int d = first; d < first + kAtOnce; ++d) {
          const float query[kOwn] = {shared_.queries[row_][d], shared_.queries[row_ + 1][d]};
          EFFINFER_UNROLL
          for (int t = 0; t < kTokens; ++t) {
            const float key = shared_.rows[column_ + t * kColumns][d];
            EFFINFER_UNROLL
            for (int r = 0; r < kOwn; ++r) sums[r][t] = fmaf(query[r], key, sums[r][t]);
          }
        }
      }
      unit_.sync();
    }
    EFFINFER_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      EFFINFER_UNROLL
      for (int r = 0; r < kOwn; ++r) {
        shared_.weights[row_ + r][unit * kPlainUnit + column_ + t * kColumns] = sums[r][t];
      }
    }
  }

  EFFINFER_DEVICE float logit(int32_t chunk, int row, int at, float product) {
    if (shared_.keys.row[at] == nullptr) return -INFINITY;
    const PlainRow& who = shared_.who[row];
    int32_t token = chunk * ops::kChunkTokens + at;
    int64_t bit = who.mask_bit + token;
    if (tile_.first_span >= 0) {
      const ListTokens& list = shared_.list[at / kPlainUnit];
      token = list.token[at % kPlainUnit];
      bit = who.mask_bit + list.mask_bit[at % kPlainUnit];
    }
    if (!plain_sees(p_, who, token, bit)) return -INFINITY;
    return plain_logit(p_, who, token, fmaf(product, shared_.keys.scale[at], 0.0f));
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
    } else if (row < own_.num_rows()) {
      float* ms = p_.partial_ms + 2 * own_.partial(chunk, row);
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
        if (at >= p_.v.dims || row_ + r >= own_.num_rows()) continue;
        if (item_.partial < 0) {
          add(row_ + r, at, shared_.folds[row_ + r], values[r][d]);
        } else {
          p_.partial_out[place_of(own_.partial(chunk, row_ + r)) + at] = values[r][d];
        }
      }
    }
  }

  EFFINFER_DEVICE void add(int row, int at, const PlainFold& fold, float value) {
    float& total = shared_.totals[row][at];
    total = fold.add(total, value);
  }

  EFFINFER_DEVICE int64_t place_of(int64_t partial) const {
    return partial * ((p_.v.dims + 15) / 16 * 16);
  }

  EFFINFER_DEVICE void finish() {
    // Partial results were stored before the last chunk's barrier.
    if (item_.partial >= 0 && !ends_tile(unit_, p_, item_, shared_.is_last)) return;
    EFFINFER_NO_UNROLL
    for (int row = row_; row < row_ + kOwn; ++row) {
      // Who keeps them tells the others, of a row without keys, too.
      const int keeper = unit_.lane / kColumns * kColumns;
      float max = unit_.shfl(column_ == 0 ? shared_.max[row] : 0.0f, keeper);
      float sum = unit_.shfl(column_ == 0 ? shared_.sum[row] : 0.0f, keeper);
      if (row >= own_.num_rows()) continue;
      if (item_.partial >= 0) add_partials(row, p_.work.merges[item_.merge], max, sum);
      store(row, max, sum);
    }
  }

  EFFINFER_DEVICE void add_partials(int row, const ops::AttentionMerge& merge, float& max,
                                    float& sum) {
    EFFINFER_NO_UNROLL
    for (int i = 0; i < merge.num_partials; ++i) {
      const int64_t index = merge.first_partial + int64_t{i} * own_.num_rows() + row;
      const PlainFold fold(max, sum, p_.partial_ms[2 * index], p_.partial_ms[2 * index + 1]);
      each_dim([&](int at) { add(row, at, fold, p_.partial_out[place_of(index) + at]); });
    }
  }

  EFFINFER_DEVICE void store(int row, float max, float sum) {
    const int64_t token = own_.token(row);
    const int head = own_.head(row);
    const PlainEnd end = plain_end(p_, head, max, sum);
    if (p_.lse != nullptr && column_ == 0) p_.lse[token * p_.num_qo_heads + head] = end.lse;
    const int64_t first = token * p_.out_stride + int64_t{head} * p_.v.dims;
    each_dim([&](int at) {
      write_float(unit_, p_.q.dtype, p_.out, first + at, shared_.totals[row][at] * end.factor);
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
};

struct FloatAttentionKernel {
  static constexpr const char* kName = "float_attention";
  static constexpr int kThreads = kPlainUnits * kWarp;
  static constexpr int kMinBlocks = 3;  // as shared memory lets an A100 hold
  using Params = ops::AttentionProblem;
  using Shared = FloatAttentionShared;

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    if (p.work.items[unit.block].tile < 0) return;  // a block of a recording that has no item
    FloatTile<Unit>(unit, p, shared).run();
  }
};

}  // namespace effinfer::cuda
