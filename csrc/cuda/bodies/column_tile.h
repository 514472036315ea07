// Scores of some asked rows of a query head with the keys of a part of its sequence, on the tensor
// cores: what both kernels of column_scores.h start from.
//
// A tile has 64 rows, the last ones of the sequence in steps of a stride, the latest first. Blocks
// multiply them with 128 keys at a time, each of four warps with 32, whose 16 bytes a lane feed 16
// products of 16 rows: of 4 groups of rows and the columns 4 c + t of 32 keys (index_keys.h).
#pragma once

#include <cstdint>

#include "cuda/bodies/index_keys.h"
#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"
#include "ops/column_scratch.h"
#include "ops/prefill_index.h"

namespace effinfer::cuda {

inline constexpr int kColumnWarps = 4;
inline constexpr int kRowGroups = ops::kColumnRows / 16;

struct ColumnParams {
  ops::ColumnIndexProblem problem;
  int64_t head_bytes;  // of a KV head's page
  ops::ColumnScratch scratch;
  int64_t first;  // sequence with lists
  int32_t tile;   // of asked rows
};

// A sequence's memory of one head.
struct ColumnArrays {
  uint64_t* keys;
  uint64_t* distances;
  float* columns;
  float* diagonals;
  float* sums;  // [parts][kColumnRows][2]

  // `sequence` counts from params.first on.
  EFFINFER_DEVICE static ColumnArrays of(const ColumnParams& params, int64_t sequence,
                                         int64_t head) {
    const int64_t words = params.scratch.list_words;
    const int64_t index = sequence * params.problem.in.num_qo_heads + head;
    ColumnArrays a;
    a.keys = reinterpret_cast<uint64_t*>(params.problem.in.visits.scores +
                                         index * params.scratch.bytes());
    a.distances = a.keys + words;
    a.columns = reinterpret_cast<float*>(a.distances + words);
    a.diagonals = a.columns + words * 64;
    a.sums = a.diagonals + words * 64;
    return a;
  }
};

// Whether keys of a KV head's sequence are chosen here.
EFFINFER_DEVICE bool chooses_columns(const ops::ColumnIndexProblem& p, int64_t sequence,
                                     int64_t kv_head) {
  return p.in.heads[kv_head] == ops::IndexedHead::chosen && ops::chooses(p, sequence);
}

// 8 neighbouring keys' scores of a row: see score_at() of softmax.h.
using ColumnScores = float[kRowGroups][4][4];

// `Shared` has queries: A operands of each group and step of 16 dims.
template <DType kType, class Unit, class Shared>
class ColumnTile {
 public:
  using Keys = IndexKeys<kType>;

  EFFINFER_DEVICE ColumnTile(Unit& unit, const ColumnParams& params, Shared& shared)
      : unit_(unit), p_(params.problem), shared_(shared), part_keys_(params.scratch.part_keys) {
    const int64_t pair = unit.block / params.scratch.parts;
    part_ = static_cast<int>(unit.block % params.scratch.parts);
    head_ = static_cast<int>(pair % p_.in.num_qo_heads);
    const int64_t place = pair / p_.in.num_qo_heads;
    sequence_ = p_.in.visits.sequences[params.first + place].sequence;
    kv_head_ = head_ / (p_.in.num_qo_heads / p_.in.kv.num_kv_heads);
    arrays_ = ColumnArrays::of(params, place, head_);
    keys_ = Keys::of(p_.in, params.head_bytes, sequence_, kv_head_);
    length_ = p_.in.batch.kv_len[sequence_];
    stride_ = p_.row_stride > 0 ? p_.row_stride : 1;
    const int rows = static_cast<int>(ops::rows_of(p_.in, sequence_));
    int asked = (rows - 1) / stride_ + 1;
    if (p_.row_stride <= 0 && asked > p_.last_rows) asked = p_.last_rows;
    first_row_ = params.tile * ops::kColumnRows;
    rows_ = asked - first_row_ < ops::kColumnRows ? asked - first_row_ : ops::kColumnRows;
    begin_ = part_ * part_keys_;
    const int padded = (length_ + 63) / 64 * 64;
    end_ = begin_ + part_keys_ < padded ? begin_ + part_keys_ : padded;
  }

  // The same for all threads of a block.
  EFFINFER_DEVICE bool has_work() const {
    return rows_ > 0 && begin_ < length_ && chooses_columns(p_, sequence_, kv_head_);
  }

 protected:
  EFFINFER_DEVICE int position(int row) const { return length_ - 1 - (first_row_ + row) * stride_; }

  EFFINFER_DEVICE float query(int row, int dim) const {
    if (row >= rows_) return 0.0f;
    const int64_t token =
        p_.in.batch.qo_indptr[sequence_ + 1] - 1 - int64_t{first_row_ + row} * stride_;
    return p_.in.q[token * p_.in.q_stride + head_ * keys_.dims + dim] * p_.in.sm_scale;
  }
  EFFINFER_DEVICE void set_queries() {
    const int steps = keys_.dims / 16;
    for (int i = unit_.thread; i < kRowGroups * steps * kWarp * 4; i += kColumnWarps * kWarp) {
      const int lane = i / 4 % kWarp;
      const int place = i / (4 * kWarp);
      const int row = place / steps * 16 + lane / 4 + i % 2 * 8;
      const int dim = place % steps * 16 + Keys::dim_of(lane, i % 4);
      shared_.queries[place][lane].words[i % 4] =
          Keys::rounded(unit_, query(row, dim), query(row, dim + 1));
    }
  }

  // Scores of the warp's 32 keys from `token` on, of which some are the sequence's.
  EFFINFER_DEVICE void multiply(int token, ColumnScores& scores) {
    const int steps = keys_.dims / 16;
    const int64_t page_id = unit_.load(keys_.pages + token / 64);
    const uint8_t* page = keys_.keys + page_id * keys_.page_bytes;
    const int four = token % 64 + 4 * (unit_.lane / 4);
    Quad next[Keys::kLoads];
    keys_.load(unit_, page, four, 0, next);
    for (int step = 0; step < steps; ++step) {
      uint32_t b[4][2];
      EFFINFER_UNROLL
      for (int t = 0; t < 4; ++t) Keys::operand(unit_, next, t, b[t]);
      if (step + 1 < steps) keys_.load(unit_, page, four, step + 1, next);
      EFFINFER_UNROLL
      for (int g = 0; g < kRowGroups; ++g) {
        const Quad a = shared_.queries[g * steps + step][unit_.lane];
        EFFINFER_UNROLL
        for (int t = 0; t < 4; ++t) Keys::multiply(unit_, scores[g][t], a, b[t]);
      }
    }
    if constexpr (Keys::kScaled) scale(page_id, token, scores);
  }

  // By the scales of 8 neighbouring keys.
  EFFINFER_DEVICE void scale(int64_t page_id, int token, ColumnScores& scores) {
    const float* scales =
        keys_.scales + page_id * keys_.page_scales + token % 64 + 8 * (unit_.lane % 4);
    EFFINFER_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Quad four = unit_.load(reinterpret_cast<const Quad*>(scales) + half);
      EFFINFER_UNROLL
      for (int t = 0; t < 4; ++t) {
        EFFINFER_UNROLL
        for (int g = 0; g < kRowGroups; ++g) {
          EFFINFER_UNROLL
          for (int r = 0; r < 2; ++r) {
            float& x = scores[g][t][2 * r + half];
            x = unit_.mul(x, float_of(four.words[t]));
          }
        }
      }
    }
  }

  // How many of the lane's 8 keys from `token` + 8 (lane % 4) on a row sees, or more than 8.
  EFFINFER_DEVICE int seen(int row, int token) const {
    return row < rows_ ? position(row) - token - 8 * (unit_.lane % 4) + 1 : 0;
  }
  EFFINFER_DEVICE float weight(float x, float reference) {
    return unit_.exp2(rounded_product(x - reference, kLog2e));
  }

  Unit& unit_;
  const ops::ColumnIndexProblem& p_;
  Shared& shared_;
  const int part_keys_;
  int part_;
  int head_;
  int kv_head_;
  int sequence_;
  ColumnArrays arrays_;
  Keys keys_;
  int length_;
  int stride_;
  int first_row_;
  int rows_;   // of this tile, <= 0: none
  int begin_;  // keys of this part
  int end_;    // up to the end of a page
};

}  // namespace effinfer::cuda
