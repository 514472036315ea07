// What a generated row visits by what earlier rows gave pages (ops/history_index.h): a block of
// threads has the rows of a sequence and KV head, one after the other, and the history in memory
// that the host sees, too. Of pages to choose from a warp has one at a time, a lane a channel of
// the network and half of the rows; what pages get is in history_scores.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/history_scores.h"
#include "cuda/bodies/index_keys.h"
#include "cuda/bodies/row_search.h"
#include "cuda/bodies/sequence_planes.h"
#include "cuda/bodies/tiled_queries.h"
#include "cuda/unit.h"
#include "ops/history_index.h"
#include "ops/row_scores.h"

namespace effinfer::cuda {

struct HistoryIndexParams {
  ops::HistoryIndexProblem problem;
  int64_t head_bytes;  // of a KV head's page
  int64_t first_row;   // sequences whose first row is one of these
  int64_t num_rows;
};

struct HistoryIndexKernel {
  static constexpr const char* kName = "history_index";
  static constexpr int kThreads = kRowThreads;
  static constexpr int kMinBlocks = 1;
  static constexpr uint64_t kWhole = ~uint64_t{0};
  using Params = HistoryIndexParams;
  struct Shared {
    TiledQueries queries;
    float network[ops::kHistoryWeights];
    float scores[RowList::kMost];
    float log_sums[TiledQueries::kMostHeads];
    RowExchange exchange;
    int32_t found;
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const ops::PageIndexProblem& p = params.problem.pages;
    const int32_t kv_head = unit.block % p.kv.num_kv_heads;
    const int64_t sequence = unit.block / p.kv.num_kv_heads;
    const int32_t first = p.visits.first_block[sequence];
    const int64_t place = first - p.visits.num_blocks - params.first_row;
    if (first < 0 || place < 0 || place >= params.num_rows) return;
    if (!ops::has_row_lists(p.batch, sequence) || p.heads[kv_head] == ops::IndexedHead::other) {
      return;
    }
    History<Unit>(unit, params, shared, sequence, kv_head, place).run();
  }

 private:
  template <class Unit>
  class History {
   public:
    EFFINFER_DEVICE History(Unit& unit, const Params& params, Shared& shared, int64_t sequence,
                            int32_t kv_head, int64_t place)
        : unit_(unit),
          params_(params),
          all_(params.problem),
          p_(params.problem.pages),
          shared_(shared),
          sequence_(sequence),
          kv_head_(kv_head),
          place_(place),
          threads_(unit, shared.exchange) {}

    EFFINFER_DEVICE void run() {
      const bool tree = p_.batch.is_tree(sequence_);
      history_ = tree ? nullptr : plane_of(p_.planes, sequence_, kv_head_);
      const int32_t rows = p_.batch.qo_indptr[sequence_ + 1] - p_.batch.qo_indptr[sequence_];
      EFFINFER_NO_UNROLL
      for (int32_t i = 0; i < rows; ++i) {
        const int64_t block = p_.visits.first_block[sequence_] + i;
        const ops::VisitBlock row = p_.visits.blocks[block];
        words_ = p_.visits.list(block, kv_head_);
        // A tree's tokens lie behind each other, whatever their positions are.
        num_words_ = (p_.batch.step_begin(sequence_) + i) / ops::kPageSize + 1;
        const bool chooses =
            p_.heads[kv_head_] == ops::IndexedHead::chosen && !ops::visits_all(p_, row);
        if (history_ == nullptr || !chooses) {
          add_all();
          continue;
        }
        run_row(row);
        unit_.sync();
      }
    }

   private:
    EFFINFER_DEVICE void add_all() {
      EFFINFER_NO_UNROLL
      for (int64_t i = unit_.thread; i < num_words_; i += kThreads) words_[i] = kWhole;
    }

    EFFINFER_DEVICE void run_row(const ops::VisitBlock& row) {
      const auto place = static_cast<float>(row.position);
      const bool follows = history_[ops::kHistoryNext] == place;
      if (follows) clear_new_pages(row);
      const bool sees_all =
          !follows || place - history_[ops::kHistoryAll] >= static_cast<float>(all_.every);
      set_queries(row);
      unit_.sync();
      if (sees_all) {
        add_all();
        if (unit_.thread == 0) history_[ops::kHistoryAll] = place;
      } else {
        write_chosen(row);
      }
      unit_.sync();
      add_to_history(row, follows);
    }

    // Pages that are whole since the row before: of rows before that they have nothing.
    EFFINFER_DEVICE void clear_new_pages(const ops::VisitBlock& row) {
      const int64_t whole = row.position / ops::kPageSize;
      const auto first = static_cast<int64_t>(history_[ops::kHistoryWhole]);
      EFFINFER_NO_UNROLL
      for (int64_t i = unit_.thread; i < (whole - first) * ops::kHistoryRows; i += kThreads) {
        const int64_t page = first + i / ops::kHistoryRows;
        history_[page * ops::kPageSize + i % ops::kHistoryRows] = 0.0f;
      }
    }

    EFFINFER_DEVICE void set_queries(const ops::VisitBlock& row) {
      const int dims = p_.kv.head_dim;
      const int group = p_.group();
      const float* q = p_.q + row.first_row * p_.q_stride + int64_t{kv_head_} * group * dims;
      shared_.queries.set(unit_, q, group, dims, p_.sm_scale, kThreads);
    }
    EFFINFER_DEVICE HistoryPages pages() const {
      const int64_t stride = ops::row_score_stride(p_.visits.list_words, ops::kHistoryPageScores);
      const int64_t head = place_ * p_.kv.num_kv_heads + kv_head_;
      return {p_,
              params_.head_bytes,
              p_.batch.kv_indices + p_.batch.kv_indptr[sequence_],
              kv_head_,
              shared_.queries,
              shared_.log_sums,
              p_.visits.row_scores + head * p_.group() * stride,
              stride};
    }

    EFFINFER_DEVICE void write_chosen(const ops::VisitBlock& row) {
      const ops::PageCandidates pages = ops::candidates_of(p_, row);
      const auto count = static_cast<int>(pages.count());
      const auto kept = static_cast<int>(ops::chosen_units(p_, count));
      RowHead head = {INFINITY, 0};
      if (kept > 0) {
        turn_network(row.position);
        unit_.sync();
        const int64_t num_pages = row.position / ops::kPageSize;
        EFFINFER_NO_UNROLL
        for (int i = unit_.warp; i < count; i += kRowWarps) predict(pages.first + i, num_pages, i);
        unit_.sync();
        const KeyRange range{key_of(-INFINITY), key_of(INFINITY)};
        head = RowList::head<false>(threads_, shared_.scores, count, kept, range, shared_.found);
      }
      EFFINFER_NO_UNROLL
      for (int64_t i = unit_.thread; i < num_words_; i += kThreads) {
        const int64_t place = i - pages.first;
        const bool chosen =
            place >= 0 && place < count && head.has(shared_.scores[place], static_cast<int>(place));
        const int64_t own = row.position / ops::kPageSize;
        words_[i] = chosen ? kWhole
                           : always_visited(p_.sink_tokens, p_.local_tokens, row, i) |
                                 bits_of_word(i, (own - 1) * ops::kPageSize, row.position + 1);
      }
    }

    // What the network has of a row so many before this one goes to where pages have that row.
    EFFINFER_DEVICE void turn_network(int32_t position) {
      constexpr int kRow = ops::kHistoryChannels;
      constexpr int kRows = ops::kHistoryRows;
      constexpr int kFilter = static_cast<int>(ops::kHistoryFilter);
      constexpr int kDirect = kFilter + 2 * kRow;
      EFFINFER_NO_UNROLL
      for (int i = unit_.thread; i < int{ops::kHistoryWeights}; i += kThreads) {
        const int age = i < kFilter ? i / kRow % kRows : i - kDirect;
        const int number = (position - 1 - age + kRows) % kRows;
        int to = i;
        if (i < kFilter) to = i + (number - age) * kRow;
        if (i >= kDirect) to = kDirect + number;
        shared_.network[to] = unit_.load(all_.network + i);
      }
    }

    // The score of a page, by a warp.
    EFFINFER_DEVICE void predict(int64_t page, int64_t num_pages, int place) {
      constexpr int kRow = ops::kHistoryChannels;
      constexpr int kHalf = ops::kHistoryRows / 2;
      static_assert(ops::kHistoryRows == kWarp && kRow == kWarp / 2);
      const float* const bias = shared_.network + ops::kHistoryFilter;
      const float* const out = bias + kRow;
      const float* const direct = out + kRow;
      const int channel = unit_.lane % kRow;
      const int half = unit_.lane / kRow;
      float hidden = 0.0f;
      float own = 0.0f;
      EFFINFER_NO_UNROLL
      for (int n = 0; n < ops::kHistoryPages; ++n) {
        const int64_t from = page + n - 1;
        if (from < 0 || from >= num_pages) continue;
        const float row = history_[from * ops::kPageSize + unit_.lane];
        if (n == 1) own = row;
        const float* filter = shared_.network + n * ops::kHistoryRows * kRow + channel;
        EFFINFER_NO_UNROLL
        for (int i = 0; i < kHalf; ++i) {
          const int number = half * kHalf + i;
          hidden = fmaf(unit_.shfl(row, number), filter[number * kRow], hidden);
        }
      }
      hidden += unit_.shfl_xor(hidden, kRow);
      const float active = half == 0 ? fmaxf(hidden + bias[channel], 0.0f) : 0.0f;
      const float score =
          threads_.warp_sum(fmaf(own, direct[unit_.lane], unit_.mul(active, out[channel])));
      if (unit_.lane == 0) shared_.scores[place] = score;
    }

    // The words are there.
    EFFINFER_DEVICE void add_to_history(const ops::VisitBlock& row, bool follows) {
      const int64_t whole = row.position / ops::kPageSize;
      HistoryScores<Unit> scores(unit_, pages());
      EFFINFER_NO_UNROLL
      for (int64_t page = unit_.warp; page < whole; page += kRowWarps) {
        if (words_[page] == kWhole) scores.score_keys(page);
      }
      unit_.sync();
      EFFINFER_NO_UNROLL
      for (int head = unit_.warp; head < p_.group(); head += kRowWarps) {
        scores.join_pages(head, words_, whole);
      }
      unit_.sync();
      const int64_t now = row.position % ops::kHistoryRows;
      const int64_t before = (row.position - 1) % ops::kHistoryRows;
      EFFINFER_NO_UNROLL
      for (int64_t page = unit_.thread; page < whole; page += kThreads) {
        float* const own = history_ + page * ops::kPageSize;
        const float score = words_[page] == kWhole ? scores.score_of(page) : own[before];
        own[now] = score;
        EFFINFER_NO_UNROLL
        for (int i = 0; !follows && i < ops::kHistoryRows; ++i) own[i] = score;
      }
      if (unit_.thread != 0) return;
      history_[ops::kHistoryNext] = static_cast<float>(row.position + 1);
      history_[ops::kHistoryWhole] = static_cast<float>(whole);
    }

    Unit& unit_;
    const Params& params_;
    const ops::HistoryIndexProblem& all_;
    const ops::PageIndexProblem& p_;
    Shared& shared_;
    const int64_t sequence_;
    const int32_t kv_head_;
    const int64_t place_;  // of those that have memory at once
    RowBlock<Unit> threads_;
    float* history_ = nullptr;
    uint64_t* words_ = nullptr;
    int64_t num_words_ = 0;
  };
};

}  // namespace effinfer::cuda
