// Pages that a block of query rows visits: a block of threads a list, by the scores of cells of
// `stride` rows and keys, whose antidiagonals are summed (ops/prefill_index.h).
//
// A cell's score is one product of matrices after the other, of the cells' rows and keys of one
// place: row stride - 1 - j of each row of cells times key j of each cell, summed over j.
//
//   A   16 rows of cells, of as many heads as have them: 64 / stride are a head's
//   B   8 cells: a dword of a page is two dims (i8: four) of one token, which is the column of a
//       register; a lane's 16 bytes are four j of its cell
//
// Means are cells of 64 rows and keys whose rows are all the mean query, or a weighted one. Scores
// exist twice, for the softmax's maxima and sums first; each page's sum is made by one warp, in a
// fixed order. Within a budget the heads' scores are added up, head by head.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/cell_scores.h"
#include "cuda/bodies/row_search.h"
#include "cuda/unit.h"
#include "ops/prefill_index.h"

namespace effinfer::cuda {

template <DType kType>
struct BlockIndexKernel {
  static constexpr const char* kName = "block_index";
  static constexpr int kThreads = kRowThreads;
  static constexpr int kMostSteps = 128;     // places x steps of 16 dims
  static constexpr int kMostScores = 12288;  // heads of 16 rows x pages
  static constexpr int kCells = 16;          // that a warp has at a time
  static constexpr int kMostProbeRows = ops::kVisitBlockRows;
  // Heads that share keys x dims, whose means and spreads lie where the queries come to be.
  static constexpr int kMostProbe = kMostSteps * kWarp * 4 / 2;
  using Keys = IndexKeys<kType>;
  using Params = BlockIndexParams;
  struct Shared {
    Quad queries[kMostSteps][kWarp];
    float scores[kMostScores];
    float max[kRowWarps][kTileRows];
    float sum[kRowWarps][kTileRows];
    float totals[RowList::kMost];  // over heads
    float weights[kMostProbeRows];
    uint8_t chosen[RowList::kMost];
    RowExchange exchange;
    int32_t found;
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const ops::BlockIndexProblem& p = params.problem;
    const int64_t kv_head = unit.block % p.in.kv.num_kv_heads;
    const int64_t index = unit.block / p.in.kv.num_kv_heads;
    if (p.in.heads[kv_head] == ops::IndexedHead::other) return;
    BlockIndex<Unit> block(unit, params, shared, index, kv_head);
    block.run();
  }

 private:
  // Of a number of rows: their mean, and one over the sum of squared distances from it.
  struct [[gnu::may_alias]] Spread {
    float mean;
    float share;
  };

  template <class Unit>
  class BlockIndex : public CellScores<kType, Unit, Shared> {
   public:
    using Base = CellScores<kType, Unit, Shared>;
    using typename Base::Cells;

    EFFINFER_DEVICE BlockIndex(Unit& unit, const Params& params, Shared& shared, int64_t index,
                               int64_t kv_head)
        : Base(unit, params, shared, index, kv_head),
          threads_(unit, shared.exchange),
          words_(params.problem.in.visits.list(index, kv_head)),
          kv_head_(static_cast<int>(kv_head)) {}

    EFFINFER_DEVICE void run() {
      bool all = visits_all(p_, rows_.sequence, kv_head_);
      int wanted = pages_;
      if (p_.has_budget()) {
        wanted = static_cast<int>(ops::chosen_pages(p_, pages_));
        all = all || wanted == pages_;
      }
      for (int i = unit_.thread; i < pages_; i += kThreads) shared_.chosen[i] = all ? 1 : 0;
      if (!all && wanted > 0) choose_all(wanted);
      const int words = (rows_.position + rows_.num_rows - 1) / 64 + 1;
      for (int i = unit_.thread; i < words; i += kThreads) {
        const int place = i - first_page_;
        const bool candidate = place >= 0 && place < pages_;
        const bool whole = all || (wanted > 0 && candidate && shared_.chosen[place] != 0);
        words_[i] = whole ? ~uint64_t{0} : always_visited(p_.in, rows_, i);
      }
    }

   private:
    // Pages of all heads; of a budget `wanted` ones.
    EFFINFER_DEVICE void choose_all(int wanted) {
      if (p_.probe) weigh_rows();
      const TopScores top = p_.has_budget() ? TopScores{wanted, 0.0f} : p_.pages;
      for (int first = 0; first < shape_.rows; first += kTileRows) choose(first, top);
      if (p_.has_budget()) unit_.sync();
    }

    // By the heads of 16 rows of cells.
    EFFINFER_DEVICE void choose(int first, const TopScores& top) {
      set_queries(first);
      unit_.sync();
      float max[2] = {kNoScore, kNoScore};
      float sum[2] = {};
      visit_cells(first,
                  [&](const Cells& cells, int cell) { this->add_cells(cells, cell, max, sum); });
      this->join_sums(max, sum);
      visit_cells(first,
                  [&](Cells& cells, int cell) { this->write_scores(cells, cell, max, sum); });
      unit_.sync();
      const int left = (shape_.rows - first) / shape_.head_rows;
      const int heads = left < kTileRows / shape_.head_rows ? left : kTileRows / shape_.head_rows;
      const bool is_last = first + kTileRows >= shape_.rows;
      // Of a budget all heads' together, behind the last.
      const int end = p_.has_budget() && is_last ? heads + 1 : heads;
      EFFINFER_NO_UNROLL
      for (int head = 0; head < end; ++head) {
        const float* scores = head < heads ? shared_.scores + head * pages_ : shared_.totals;
        if (p_.has_budget() && head < heads) {
          add_pages(scores, first + head == 0);
        } else {
          choose_pages(scores, top);
        }
      }
    }

    // Number `dim` of the query that multiplies key `place` of cells, in a row of these.
    EFFINFER_DEVICE float query(int row, int place, int dim) const {
      if (row >= shape_.rows) return 0.0f;
      const int head =
          kv_head_ * (p_.in.num_qo_heads / p_.in.kv.num_kv_heads) + row / shape_.head_rows;
      const float* q = p_.in.q + rows_.first_row * p_.in.q_stride + head * keys_.dims + dim;
      if (p_.stride == 0) {
        float sum = 0.0f;
        if (p_.probe) {
          for (int i = 0; i < rows_.num_rows; ++i) {
            sum = fmaf(q[i * p_.in.q_stride], shared_.weights[i], sum);
          }
          return sum * p_.in.sm_scale;
        }
        for (int i = 0; i < rows_.num_rows; ++i) sum += q[i * p_.in.q_stride];
        return sum * (p_.in.sm_scale / static_cast<float>(rows_.num_rows));
      }
      const int token = (row % shape_.head_rows + 1) * shape_.stride - 1 - place;
      if (token >= rows_.num_rows) return 0.0f;
      return q[token * p_.in.q_stride] * (p_.in.sm_scale / static_cast<float>(shape_.stride));
    }

    EFFINFER_DEVICE void set_queries(int first) {
      const int steps = keys_.dims / 16;
      for (int i = unit_.thread; i < shape_.places * steps * kWarp * 4; i += kThreads) {
        const int lane = i / 4 % kWarp;
        const int step = i / (4 * kWarp);
        const int row = first + lane / 4 + i % 2 * 8;
        const int dim = step % steps * 16 + Keys::dim_of(lane, i % 4);
        const int place = step / steps;
        shared_.queries[step][lane].words[i % 4] =
            Keys::rounded(unit_, query(row, place, dim), query(row, place, dim + 1));
      }
    }

    // visit(cells, first cell) for those of the warp.
    template <class Visit>
    EFFINFER_DEVICE void visit_cells(int first, Visit&& each) {
      first_ = first;
      const int count = (pages_ * 64 / shape_.stride + kCells - 1) / kCells;
      for (int i = unit_.warp; i < count; i += kRowWarps) {
        Cells cells = {};
        this->multiply(i * kCells, cells);
        each(cells, i * kCells);
      }
    }

    // The highest of a head's pages join those that are chosen.
    EFFINFER_DEVICE void choose_pages(const float* scores, const TopScores& top) {
      RowHead head;
      if (top.mass > 0.0f) {
        double total[1] = {};
        for (int i = unit_.thread; i < pages_; i += kThreads) {
          total[0] += static_cast<double>(scores[i]);
        }
        threads_.sum(total);
        const double wanted = static_cast<double>(top.mass) * total[0];
        if (!(wanted > 0.0)) return;
        head = head_of<true>(scores, wanted);
      } else {
        if (top.count <= 0) return;
        if (top.count < pages_) head = head_of<false>(scores, top.count);
      }
      mark(head, scores);
    }

    // A head's scores join those of the heads before.
    EFFINFER_DEVICE void add_pages(const float* scores, bool is_first) {
      EFFINFER_NO_UNROLL
      for (int i = unit_.thread; i < pages_; i += kThreads) {
        shared_.totals[i] = is_first ? scores[i] : shared_.totals[i] + scores[i];
      }
    }

    EFFINFER_DEVICE void mark(const RowHead& head, const float* scores) {
      EFFINFER_NO_UNROLL
      for (int i = unit_.thread; i < pages_; i += kThreads) {
        if (head.has(scores[i], i)) shared_.chosen[i] = 1;
      }
    }

    // What rows count in a probe query: by how far they lie from their mean, over the spread of
    // each number.
    EFFINFER_DEVICE void weigh_rows() {
      const int numbers = p_.in.num_qo_heads / p_.in.kv.num_kv_heads * keys_.dims;
      auto* const centre = reinterpret_cast<Spread*>(shared_.queries);
      const float* q = p_.in.q + rows_.first_row * p_.in.q_stride + kv_head_ * numbers;
      const int rows = rows_.num_rows;
      EFFINFER_NO_UNROLL
      for (int d = unit_.thread; d < numbers; d += kThreads) {
        float sum = 0.0f;
        EFFINFER_NO_UNROLL
        for (int row = 0; row < rows; ++row) sum += unit_.load(q + row * p_.in.q_stride + d);
        const float mean = unit_.mul(sum, 1.0f / static_cast<float>(rows));
        float squares = 0.0f;
        EFFINFER_NO_UNROLL
        for (int row = 0; row < rows; ++row) {
          const float from = unit_.load(q + row * p_.in.q_stride + d) - mean;
          squares = fmaf(from, from, squares);
        }
        constexpr float kLeast = 0x1p-126f;
        centre[d] = {mean, squares > kLeast ? 1.0f / squares : 0.0f};
      }
      unit_.sync();
      EFFINFER_NO_UNROLL
      for (int row = unit_.warp; row < rows; row += kRowWarps) {
        float sum = 0.0f;
        EFFINFER_NO_UNROLL
        for (int d = unit_.lane; d < numbers; d += kWarp) {
          const float from = unit_.load(q + row * p_.in.q_stride + d) - centre[d].mean;
          sum = fmaf(unit_.mul(from, from), centre[d].share, sum);
        }
        sum = threads_.warp_sum(sum);
        if (unit_.lane == 0) shared_.weights[row] = sum;
      }
      unit_.sync();
      float all = 0.0f;
      EFFINFER_NO_UNROLL
      for (int row = 0; row < rows; ++row) all += shared_.weights[row];
      unit_.sync();
      const float equal = 1.0f / static_cast<float>(rows);
      EFFINFER_NO_UNROLL
      for (int row = unit_.thread; row < rows; row += kThreads) {
        shared_.weights[row] = all == 0.0f ? equal : shared_.weights[row] / all;
      }
      unit_.sync();
    }

    template <bool kWeights>
    EFFINFER_DEVICE RowHead head_of(const float* scores, double goal) {
      // No sum of shares of 16 rows is above 16 but for rounding; those of heads are more.
      const float most = p_.has_budget() ? INFINITY : 32.0f;
      const KeyRange range{key_of(kWeights ? 0x1p-149f : 0.0f), key_of(most)};
      return RowList::head<kWeights>(threads_, scores, pages_, goal, range, shared_.found);
    }

    using Base::first_;
    using Base::first_page_;
    using Base::keys_;
    using Base::p_;
    using Base::pages_;
    using Base::rows_;
    using Base::shape_;
    using Base::shared_;
    using Base::unit_;

    RowBlock<Unit> threads_;
    uint64_t* const words_;
    const int kv_head_;
  };
};

}  // namespace effinfer::cuda
