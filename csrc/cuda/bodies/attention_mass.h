// What keys get of the probabilities of a sequence's last rows (ops/attention_mass.h), in two
// kernels: of each row and query head (a pair) the maximum and the sum over a part of the keys,
// then its probabilities, which are added to the plane. In float32, a key a thread: a block's
// threads read lines of a page, and 16 pairs share what is read.
//
//   block: (sequence, KV head, part of 1,024 keys)
//   thread t: keys t, t + 128, ... of the part; pair by pair, so that sums have one order
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/key_products.h"
#include "cuda/bodies/row_sum.h"
#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"
#include "ops/attention_mass.h"

namespace effinfer::cuda {

struct MassParams {
  ops::AttentionMassProblem p;
  int64_t head_bytes = 0;  // of a page
  int32_t parts = 0;
  int32_t first_pair = 0;  // of kMassPairs at most
};

inline constexpr int kMassThreads = 128;
inline constexpr int kMassTile = 16;  // pairs whose queries are in shared memory at a time

struct MassShared {
  alignas(16) float queries[ops::kMostMassDims][kMassTile];
  float partial[kMassTile][2][kMassThreads / kWarp];
  float reference[ops::kMassPairs];
  float factor[ops::kMassPairs];
  float decay[ops::kMassPairs];  // of numbers before what the pair gives
  float plane[ops::kMassKeys];   // each a thread's own
};

template <DType kType, class Unit>
class MassTile {
 public:
  EFFINFER_DEVICE MassTile(Unit& unit, const MassParams& params, MassShared& shared)
      : unit_(unit), params_(params), p_(params.p), shared_(shared) {
    const int kv_heads = p_.kv.num_kv_heads;
    part_ = unit.block % params.parts;
    index_ = unit.block / params.parts;
    kv_head_ = index_ % kv_heads;
    const ops::MassRows& rows = p_.rows[index_ / kv_heads];
    group_ = p_.num_qo_heads / kv_heads;
    length_ = p_.batch.kv_len[rows.sequence];
    num_rows_ = rows.count;
    end_row_ = p_.batch.qo_indptr[rows.sequence + 1];
    const int left = num_rows_ * group_ - params.first_pair;
    pairs_ = left < ops::kMassPairs ? left : ops::kMassPairs;
    begin_ = part_ * ops::kMassKeys;
    end_ = begin_ + ops::kMassKeys < length_ ? begin_ + ops::kMassKeys : length_;
    pages_ = p_.batch.kv_indices + p_.batch.kv_indptr[rows.sequence];
    const int64_t head = p_.first_head + kv_head_;
    plane_ = rows.plane + head * rows.plane_stride;
    noise_ = rows.noise == nullptr ? nullptr : rows.noise + head * rows.noise_stride;
  }

  // The same for all threads of a block.
  EFFINFER_DEVICE bool has_work() const { return pairs_ > 0 && begin_ < length_; }

  // Of each pair the maximum and the sum of this part, into p.sums.
  EFFINFER_DEVICE void sum() {
    for (int first = 0; first < pairs_; first += kMassTile) {
      set_queries(first);
      float highest[kMassTile];
      float sums[kMassTile];
      EFFINFER_UNROLL
      for (int i = 0; i < kMassTile; ++i) {
        highest[i] = kNoScore;
        sums[i] = 0.0f;
      }
      for (int key = begin_ + unit_.thread; key < end_; key += kMassThreads) {
        float x[kMassTile];
        scores(key, x);
        EFFINFER_UNROLL
        for (int i = 0; i < kMassTile; ++i) {
          if (!sees(first + i, key)) continue;
          const float before = highest[i];
          highest[i] = fmaxf(before, x[i]);
          sums[i] = rounded_product(sums[i], weight(before, highest[i])) + weight(x[i], highest[i]);
        }
      }
      EFFINFER_UNROLL
      for (int i = 0; i < kMassTile; ++i) join_warp(i, highest[i], sums[i]);
      unit_.sync();
      if (unit_.thread < kMassTile && first + unit_.thread < pairs_) join_warps(first);
    }
  }

  // Adds each pair's probabilities of this part to the plane, or what the rule makes of them.
  // Before a row's first pair the numbers of the keys that it sees decay.
  EFFINFER_DEVICE void add() {
    join_parts();
    for (int key = begin_ + unit_.thread; key < end_; key += kMassThreads) {
      shared_.plane[key - begin_] = plane_[key];
    }
    for (int first = 0; first < pairs_; first += kMassTile) {
      set_queries(first);
      for (int key = begin_ + unit_.thread; key < end_; key += kMassThreads) {
        float x[kMassTile];
        scores(key, x);
        float sum = shared_.plane[key - begin_];
        EFFINFER_UNROLL
        for (int i = 0; i < kMassTile; ++i) {
          if (!sees(first + i, key)) continue;
          const float given = rounded_product(weight(x[i], shared_.reference[first + i]),
                                              shared_.factor[first + i]);
          const float before = rounded_product(sum, shared_.decay[first + i]);
          sum = p_.rule.maximum ? fmaxf(before, given) : before + given;
        }
        shared_.plane[key - begin_] = sum;
      }
      unit_.sync();
    }
    for (int key = begin_ + unit_.thread; key < end_; key += kMassThreads) {
      plane_[key] = shared_.plane[key - begin_];
    }
  }

 private:
  // Of a pair of this launch: its row, from the first that counts on.
  EFFINFER_DEVICE int row_of(int pair) const { return (params_.first_pair + pair) / group_; }
  EFFINFER_DEVICE bool sees(int pair, int key) const {
    return pair < pairs_ && key < length_ - num_rows_ + row_of(pair) + 1;
  }
  EFFINFER_DEVICE float weight(float x, float reference) {
    return unit_.exp2(rounded_product(x - reference, kLog2e));
  }
  EFFINFER_DEVICE float* sums_of(int part) const {
    return p_.sums + (int64_t{index_} * params_.parts + part) * ops::kMassPairs * 2;
  }

  EFFINFER_DEVICE void set_queries(int first) {
    const int dims = p_.kv.head_dim;
    for (int i = unit_.thread; i < dims * kMassTile; i += kMassThreads) {
      const int pair = first + i / dims;
      const int dim = i % dims;
      float x = 0.0f;
      if (pair < pairs_) {
        const int64_t token = end_row_ - num_rows_ + row_of(pair);
        const int head = kv_head_ * group_ + (params_.first_pair + pair) % group_;
        x = unit_.load(p_.q + token * p_.q_stride + head * dims + dim);
      }
      shared_.queries[dim][i / dims] = x;
    }
    unit_.sync();
  }

  // Scaled, of all pairs of the tile.
  EFFINFER_DEVICE void scores(int key, float (&x)[kMassTile]) {
    EFFINFER_UNROLL
    for (int i = 0; i < kMassTile; ++i) x[i] = 0.0f;
    const int page = unit_.load(pages_ + key / int{ops::kPageSize});
    const int token = key % int{ops::kPageSize};
    const int64_t head = int64_t{page} * p_.kv.num_kv_heads + kv_head_;
    const int lines = p_.kv.head_dim / KeyLine<kType>::P;
    const uint32_t* from =
        KeyLine<kType>::first(p_.kv.k + head * params_.head_bytes, p_.kv.head_dim, token);
    for (int line = 0; line < lines; ++line) {
      KeyLine<kType>::template add<kMassTile>(unit_, from, line, shared_.queries, x);
    }
    float scale = p_.sm_scale;
    if constexpr (kType == DType::i8) {
      scale = unit_.mul(scale, unit_.load(p_.kv.k_scale + head * ops::kPageSize + token));
    }
    const float noise = noise_ == nullptr ? 0.0f : unit_.mul(p_.noise, noise_[key]);
    EFFINFER_UNROLL
    for (int i = 0; i < kMassTile; ++i) x[i] = fmaf(x[i], scale, noise);
  }

  EFFINFER_DEVICE void join_warp(int i, float highest, float sum) {
    EFFINFER_UNROLL
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
      const float both = fmaxf(highest, unit_.shfl_xor(highest, mask));
      const float mine = rounded_product(sum, weight(highest, both));
      sum = mine + unit_.shfl_xor(mine, mask);
      highest = both;
    }
    if (unit_.lane > 0) return;
    shared_.partial[i][0][unit_.warp] = highest;
    shared_.partial[i][1][unit_.warp] = sum;
  }
  // By the thread of a pair.
  EFFINFER_DEVICE void join_warps(int first) {
    const auto& partial = shared_.partial[unit_.thread];
    float highest = partial[0][0];
    for (int w = 1; w < kMassThreads / kWarp; ++w) highest = fmaxf(highest, partial[0][w]);
    float sum = 0.0f;
    for (int w = 0; w < kMassThreads / kWarp; ++w) {
      sum += rounded_product(partial[1][w], weight(partial[0][w], highest));
    }
    float* to = sums_of(part_) + (first + unit_.thread) * 2;
    to[0] = highest;
    to[1] = sum;
  }

  // Before the first tile's queries are set, after which all threads have met.
  EFFINFER_DEVICE void join_parts() {
    const int pair = unit_.thread;
    if (pair >= pairs_) return;
    const int parts = (length_ - 1) / ops::kMassKeys + 1;
    float highest = kNoScore;
    for (int part = 0; part < parts; ++part) {
      highest = fmaxf(highest, unit_.load(sums_of(part) + 2 * pair));
    }
    float sum = 0.0f;
    for (int part = 0; part < parts; ++part) {
      const float* of_part = sums_of(part) + 2 * pair;
      sum += rounded_product(unit_.load(of_part + 1), weight(unit_.load(of_part), highest));
    }
    shared_.reference[pair] = highest;
    shared_.factor[pair] = 1.0f / sum;
    shared_.decay[pair] = (params_.first_pair + pair) % group_ == 0 ? p_.rule.decay : 1.0f;
  }

  Unit& unit_;
  const MassParams& params_;
  const ops::AttentionMassProblem& p_;
  MassShared& shared_;
  int part_;
  int index_;  // of (sequence, KV head)
  int kv_head_;
  int group_;
  int length_;
  int num_rows_;
  int end_row_;  // behind the sequence's last
  int pairs_;    // of this launch, <= 0: none
  int begin_;    // keys of this part
  int end_;
  const int32_t* pages_;
  float* plane_;
  const float* noise_;
};

template <DType kType, bool kAdds>
struct AttentionMassKernel {
  static constexpr const char* kName = kAdds ? "attention_mass" : "attention_mass_sums";
  static constexpr int kThreads = kMassThreads;
  using Params = MassParams;
  using Shared = MassShared;

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    MassTile<kType, Unit> tile(unit, params, shared);
    if (!tile.has_work()) return;
    if constexpr (kAdds) {
      tile.add();
    } else {
      tile.sum();
    }
  }
};

}  // namespace effinfer::cuda
