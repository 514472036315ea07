// What keys and distances get of the probabilities of asked rows, in two kernels: each row's
// maximum and sum by parts of the keys, then its probabilities, added up by key and by distance.
//
// A block of the second kernel owns the keys [begin, end) and the distances that lie there, of all
// rows of a tile; row r's probability of key t belongs to place t + its distance from the last row.
// So it multiplies the keys before `begin`, too, from where its last distances lead: 64 in the
// usual case. Nothing is added by two blocks, and sums have one order.
//
//        keys of the sequence      begin           end
//        last row                  [===============]
//        the row before             \===============\       a place is a diagonal
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/column_tile.h"

namespace effinfer::cuda {

inline constexpr int kMostColumnSteps = 16;  // of 16 dims

template <DType kType>
struct ColumnSumsKernel {
  static constexpr const char* kName = "column_sums";
  static constexpr int kThreads = kColumnWarps * kWarp;
  using Params = ColumnParams;
  struct Shared {
    Quad queries[kRowGroups * kMostColumnSteps][kWarp];
    float max[kColumnWarps][ops::kColumnRows];
    float sum[kColumnWarps][ops::kColumnRows];
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    Sums<Unit> sums(unit, params, shared);
    if (sums.has_work()) sums.run();
  }

 private:
  template <class Unit>
  class Sums : public ColumnTile<kType, Unit, Shared> {
   public:
    using Base = ColumnTile<kType, Unit, Shared>;
    using Base::Base;

    EFFINFER_DEVICE void run() {
      this->set_queries();
      unit_.sync();
      const int limit = end_ < this->position(0) + 1 ? end_ : this->position(0) + 1;
      for (int token = begin_ + kWarp * unit_.warp; token < limit; token += ops::kColumnKeys) {
        ColumnScores scores = {};
        this->multiply(token, scores);
        EFFINFER_UNROLL
        for (int g = 0; g < kRowGroups; ++g) {
          EFFINFER_UNROLL
          for (int r = 0; r < 2; ++r) add(scores[g], g, r, token);
        }
      }
      join();
    }

   private:
    EFFINFER_DEVICE void add(BlockScores& scores, int g, int r, int token) {
      const int seen = this->seen(16 * g + unit_.lane / 4 + 8 * r, token);
      float highest = max_[g][r];
      EFFINFER_UNROLL
      for (int t = 0; t < 8; ++t) {
        if (t < seen) highest = fmaxf(highest, score_at(scores, t, r));
      }
      float sum = unit_.mul(sum_[g][r], this->weight(max_[g][r], highest));
      EFFINFER_UNROLL
      for (int t = 0; t < 8; ++t) {
        if (t < seen) sum += this->weight(score_at(scores, t, r), highest);
      }
      max_[g][r] = highest;
      sum_[g][r] = sum;
    }

    // Lanes of a row, then warps, in order.
    EFFINFER_DEVICE void join() {
      EFFINFER_UNROLL
      for (int g = 0; g < kRowGroups; ++g) {
        EFFINFER_UNROLL
        for (int r = 0; r < 2; ++r) {
          EFFINFER_UNROLL
          for (int mask = 1; mask <= 2; mask *= 2) {
            const float highest = fmaxf(max_[g][r], unit_.shfl_xor(max_[g][r], mask));
            const float mine = unit_.mul(sum_[g][r], this->weight(max_[g][r], highest));
            sum_[g][r] = mine + unit_.shfl_xor(mine, mask);
            max_[g][r] = highest;
          }
          const int row = 16 * g + unit_.lane / 4 + 8 * r;
          if (unit_.lane % 4 == 0) {
            shared_.max[unit_.warp][row] = max_[g][r];
            shared_.sum[unit_.warp][row] = sum_[g][r];
          }
        }
      }
      unit_.sync();
      const int row = unit_.thread;
      if (row >= rows_) return;
      float highest = kNoScore;
      for (int w = 0; w < kColumnWarps; ++w) highest = fmaxf(highest, shared_.max[w][row]);
      float sum = 0.0f;
      for (int w = 0; w < kColumnWarps; ++w) {
        sum += unit_.mul(shared_.sum[w][row], this->weight(shared_.max[w][row], highest));
      }
      float* to = arrays_.sums + (part_ * ops::kColumnRows + row) * 2;
      to[0] = highest;
      to[1] = sum;
    }

    using Base::arrays_;
    using Base::begin_;
    using Base::end_;
    using Base::part_;
    using Base::rows_;
    using Base::shared_;
    using Base::unit_;

    float max_[kRowGroups][2] = {
        {kNoScore, kNoScore}, {kNoScore, kNoScore}, {kNoScore, kNoScore}, {kNoScore, kNoScore}};
    float sum_[kRowGroups][2] = {};
  };
};

template <DType kType>
struct ColumnScoresKernel {
  static constexpr const char* kName = "column_scores";
  static constexpr int kThreads = kColumnWarps * kWarp;
  static constexpr int kPitch = ops::kColumnKeys + 4;  // four rows' quads in different banks
  using Params = ColumnParams;
  struct Shared {
    Quad queries[kRowGroups * kMostColumnSteps][kWarp];
    alignas(16) float shares[ops::kColumnRows][kPitch];
    float diagonals[ops::kMostPartKeys];
    float reference[ops::kColumnRows];
    float factor[ops::kColumnRows];
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    Shares<Unit> shares(unit, params, shared);
    if (shares.has_work()) shares.run();
  }

 private:
  template <class Unit>
  class Shares : public ColumnTile<kType, Unit, Shared> {
   public:
    using Base = ColumnTile<kType, Unit, Shared>;
    using Base::Base;

    EFFINFER_DEVICE void run() {
      this->set_queries();
      join_parts();
      for (int i = unit_.thread; i < part_keys_; i += kThreads) shared_.diagonals[i] = 0.0f;
      const bool columns = ops::chooses_any(p_.columns);
      const bool diagonals = ops::chooses_any(p_.slashes);
      const int nearest = first_row_ * stride_;
      const int farthest = (first_row_ + rows_ - 1) * stride_;
      int first = begin_;
      if (diagonals && farthest > 0) {
        const int before = begin_ > farthest ? begin_ - farthest : 0;
        first = before / ops::kColumnKeys * ops::kColumnKeys;
      }
      for (int chunk = first; chunk < end_; chunk += ops::kColumnKeys) {
        const bool by_key = columns && chunk >= begin_;
        const bool by_distance = diagonals && chunk < end_ - nearest;
        if (!by_key && !by_distance) continue;
        unit_.sync();
        set_shares(chunk);
        unit_.sync();
        if (by_key) add_columns(chunk);
        if (by_distance) add_diagonals(chunk, nearest, farthest);
      }
      if (!diagonals) return;
      unit_.sync();
      for (int i = unit_.thread; i < end_ - begin_; i += kThreads) {
        put(arrays_.diagonals + begin_ + i, shared_.diagonals[i]);
      }
    }

   private:
    EFFINFER_DEVICE void put(float* to, float sum) { *to = first_row_ > 0 ? *to + sum : sum; }

    EFFINFER_DEVICE void join_parts() {
      const int row = unit_.thread;
      if (row >= rows_) return;
      const int parts = (length_ - 1) / part_keys_ + 1;
      const float* sums = arrays_.sums + 2 * row;
      float highest = kNoScore;
      for (int i = 0; i < parts; ++i) {
        highest = fmaxf(highest, unit_.load(sums + i * 2 * ops::kColumnRows));
      }
      float sum = 0.0f;
      for (int i = 0; i < parts; ++i) {
        const float* part = sums + i * 2 * ops::kColumnRows;
        sum += unit_.mul(unit_.load(part + 1), this->weight(unit_.load(part), highest));
      }
      shared_.reference[row] = highest;
      shared_.factor[row] = 1.0f / sum;
    }

    // Zeros for what a row does not see.
    EFFINFER_DEVICE void set_shares(int chunk) {
      const int token = chunk + kWarp * unit_.warp;
      ColumnScores scores = {};
      if (token < length_) this->multiply(token, scores);
      EFFINFER_UNROLL
      for (int g = 0; g < kRowGroups; ++g) {
        EFFINFER_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int row = 16 * g + unit_.lane / 4 + 8 * r;
          const int seen = this->seen(row, token);
          const float reference = row < rows_ ? shared_.reference[row] : 0.0f;
          const float factor = row < rows_ ? shared_.factor[row] : 0.0f;
          EFFINFER_UNROLL
          for (int half = 0; half < 2; ++half) {
            Quad out;
            EFFINFER_UNROLL
            for (int t = 0; t < 4; ++t) {
              const float x = score_at(scores[g], 4 * half + t, r);
              const float share =
                  4 * half + t < seen ? unit_.mul(this->weight(x, reference), factor) : 0.0f;
              out.words[t] = bits_of(share);
            }
            const int place = kWarp * unit_.warp + 8 * (unit_.lane % 4) + 4 * half;
            *reinterpret_cast<Quad*>(&shared_.shares[row][place]) = out;
          }
        }
      }
    }

    EFFINFER_DEVICE void add_columns(int chunk) {
      const int key = chunk + unit_.thread;
      if (key >= end_) return;
      float sum = 0.0f;
      for (int row = 0; row < rows_; ++row) sum += shared_.shares[row][unit_.thread];
      put(arrays_.columns + key, sum);
    }

    EFFINFER_DEVICE void add_diagonals(int chunk, int nearest, int farthest) {
      const int low = chunk + nearest > begin_ ? chunk + nearest : begin_;
      const int past = chunk + ops::kColumnKeys + farthest;
      const int high = past < end_ ? past : end_;
      for (int place = low + unit_.thread; place < high; place += kThreads) {
        const int behind = place - chunk - nearest;  // from the tile's first row's key
        const int over = behind - (ops::kColumnKeys - 1);
        int row = over > 0 ? (over + stride_ - 1) / stride_ : 0;
        const int last = behind / stride_;
        float sum = 0.0f;
        for (; row <= last && row < rows_; ++row) {
          sum += shared_.shares[row][behind - row * stride_];
        }
        shared_.diagonals[place - begin_] += sum;
      }
    }

    using Base::arrays_;
    using Base::begin_;
    using Base::end_;
    using Base::first_row_;
    using Base::length_;
    using Base::p_;
    using Base::part_keys_;
    using Base::rows_;
    using Base::shared_;
    using Base::stride_;
    using Base::unit_;
  };
};

}  // namespace effinfer::cuda
