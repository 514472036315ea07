// What a block of a prompt's rows visits by the buckets of its keys (ops/bucket_index.h): a block
// of threads a list. Buckets get ranks by how near the block's queries lie; the least rank with
// enough keys up to it is searched, of that the newest keys are taken; and of what is left, which
// prefixes over pages number, one of each run is drawn.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/philox.h"
#include "cuda/bodies/bucket_keys.h"
#include "cuda/bodies/row_search.h"
#include "cuda/unit.h"
#include "ops/bucket_index.h"

namespace effinfer::cuda {

struct BucketIndexKernel {
  static constexpr const char* kName = "bucket_index";
  static constexpr int kThreads = kRowThreads;
  static constexpr int kMinBlocks = 1;
  static constexpr int kMostQueries = 8192;  // rows x heads that share keys
  static constexpr int kMostBuckets = 1 << ops::kMostBucketBits;
  // Draws of this index have counters that no hyperplane has.
  static constexpr uint32_t kDraws = uint32_t{1} << 31;
  using Params = BucketIndexParams;
  struct Shared {
    int64_t near[kMostBuckets];
    int32_t ranks[kMostBuckets];
    RowExchange exchange;
    int32_t found;
    uint8_t queries[kMostQueries];  // their buckets
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const ops::BucketIndexProblem& p = params.problem;
    const int32_t kv_head = unit.block % p.kv.num_kv_heads;
    const int64_t index = unit.block / p.kv.num_kv_heads;
    const ops::VisitBlock block = p.visits.blocks[index];
    if (block.sequence < 0 || p.heads[kv_head] == ops::IndexedHead::other) return;
    Choice<Unit>(unit, params, shared, index, block, kv_head).run();
  }

 private:
  template <class Unit>
  class Choice {
   public:
    EFFINFER_DEVICE Choice(Unit& unit, const Params& params, Shared& shared, int64_t index,
                           const ops::VisitBlock& block, int32_t kv_head)
        : unit_(unit),
          params_(params),
          p_(params.problem),
          shared_(shared),
          index_(index),
          block_(block),
          kv_head_(kv_head),
          pages_(ops::candidates_of(p_, block)),
          words_(p_.visits.list(index, kv_head)),
          num_words_((block.position + block.num_rows - 1) / int{ops::kPageSize} + 1),
          num_buckets_(1 << p_.bits),
          threads_(unit, shared.exchange) {}

    EFFINFER_DEVICE void run() {
      const bool chooses = params_.chooses(block_, kv_head_);
      const bool draws = chooses && p_.samples > 0;
      uint8_t* const weighted = p_.visits.weighted + index_ * p_.visits.num_kv_heads + kv_head_;
      if (unit_.thread == 0) *weighted = draws ? 1 : 0;
      for (int i = unit_.thread; i < num_words_; i += kThreads) {
        const bool candidate = chooses && i >= pages_.first && i < pages_.end;
        if (!candidate) words_[i] = ~uint64_t{0};
      }
      if (!chooses) return;
      float* const weights = p_.visits.list_weights(index_, kv_head_);
      for (int i = unit_.thread; draws && i < num_words_ * int{ops::kPageSize}; i += kThreads) {
        weights[i] = 0.0f;
      }
      buckets_ = params_.buckets(sequence_place(), kv_head_);
      hash_queries();
      rank_buckets();
      const Nearest nearest = find_nearest();
      write_pages(nearest, draws ? weights : nullptr);
    }

   private:
    // The keys of ranks below one, and of that itself those from a token on.
    struct Nearest {
      int32_t rank;
      int32_t first;

      EFFINFER_DEVICE bool has(int32_t other, int32_t token) const {
        return other < rank || (other == rank && token >= first);
      }
    };

    EFFINFER_DEVICE int64_t sequence_place() const {
      for (int64_t i = 0;; ++i) {
        const ops::VisitSequence& each = p_.visits.sequences[i];
        if (index_ >= each.first_block && index_ < each.first_block + each.num_blocks) return i;
      }
    }

    EFFINFER_DEVICE int rank_at(int64_t token) const {
      return shared_.ranks[unit_.load(buckets_ + token)];
    }
    EFFINFER_DEVICE int first_token() const {
      return static_cast<int>(pages_.first * ops::kPageSize);
    }
    EFFINFER_DEVICE int end_token() const { return static_cast<int>(pages_.end * ops::kPageSize); }

    // A warp a query.
    EFFINFER_DEVICE void hash_queries() {
      const int group = p_.num_qo_heads / p_.kv.num_kv_heads;
      const int dims = p_.kv.head_dim;
      for (int i = unit_.warp; i < block_.num_rows * group; i += kRowWarps) {
        const int64_t row = block_.first_row + i / group;
        const float* q = p_.q + row * p_.q_stride + (int64_t{kv_head_} * group + i % group) * dims;
        uint32_t bucket = 0;
        for (int bit = 0; bit < p_.bits; ++bit) {
          const bool above = is_above(unit_, q, p_.planes + int64_t{bit} * dims, dims);
          bucket |= (above ? 1u : 0u) << bit;
        }
        if (unit_.lane == 0) shared_.queries[i] = static_cast<uint8_t>(bucket);
      }
      unit_.sync();
    }

    // How near each bucket is, then how many are nearer.
    EFFINFER_DEVICE void rank_buckets() {
      const int count = block_.num_rows * (p_.num_qo_heads / p_.kv.num_kv_heads);
      const int own = unit_.thread;
      const bool inside = own < num_buckets_;
      if (inside) {
        int64_t near = 0;
        for (int i = 0; i < count; ++i) near += shared_.queries[i] == own ? 1 : 0;
        shared_.near[own] = near;
      }
      for (int bit = 1; bit < num_buckets_; bit *= 2) {
        unit_.sync();
        if (!inside || (own & bit) != 0) continue;
        const int64_t without = shared_.near[own];
        const int64_t with = shared_.near[own + bit];
        shared_.near[own] = ops::kBucketNearness * without + with;
        shared_.near[own + bit] = without + ops::kBucketNearness * with;
      }
      unit_.sync();
      if (inside) {
        int rank = 0;
        const int64_t near = shared_.near[own];
        for (int i = 0; i < num_buckets_; ++i) {
          const int64_t other = shared_.near[i];
          rank += other > near || (other == near && i < own) ? 1 : 0;
        }
        shared_.ranks[own] = rank;
      }
      unit_.sync();
    }

    EFFINFER_DEVICE Nearest find_nearest() {
      if (p_.keys == 0) return {-1, 0};
      int low = 0;
      int high = num_buckets_ - 1;
      while (low < high) {
        const int middle = (low + high) / 2;
        int counts[1] = {};
        for (int t = first_token() + unit_.thread; t < end_token(); t += kThreads) {
          counts[0] += rank_at(t) <= middle ? 1 : 0;
        }
        threads_.sum(counts);
        (counts[0] >= p_.keys ? high : low) = counts[0] >= p_.keys ? middle : middle + 1;
      }
      int counts[2] = {};  // below the rank, and of it
      for (int t = first_token() + unit_.thread; t < end_token(); t += kThreads) {
        const int rank = rank_at(t);
        counts[0] += rank < low ? 1 : 0;
        counts[1] += rank == low ? 1 : 0;
      }
      threads_.sum(counts);
      const int left_out = counts[1] - (p_.keys - counts[0]);
      if (left_out == 0) return {low, 0};
      pick_nth(
          threads_, left_out + 1, [&](int tile) { return equals_of(tile, low, 0); },
          [&](int tile, int n) { shared_.found = equals_of(tile, low, n); });
      unit_.sync();
      return {low, shared_.found};
    }

    // How many keys of the thread's page of a tile have a rank; or, with n, the n-th of them.
    EFFINFER_DEVICE int equals_of(int tile, int rank, int n) const {
      const int first = first_token() + (tile * kThreads + unit_.thread) * int{ops::kPageSize};
      int count = 0;
      for (int t = first; t < first + int{ops::kPageSize} && t < end_token(); ++t) {
        if (rank_at(t) != rank) continue;
        ++count;
        if (count == n) return t;
      }
      return count;
    }

    // A thread a page; `weights`: null where nothing is drawn.
    EFFINFER_DEVICE void write_pages(const Nearest& nearest, float* weights) {
      const int count = static_cast<int>(pages_.count());
      double before = 0.0;
      for (int tile = 0; tile < count; tile += kThreads) {
        const bool inside = tile + unit_.thread < count;
        const int64_t page = pages_.first + tile + unit_.thread;
        uint64_t word = 0;
        int free = 0;
        for (int t = 0; inside && t < int{ops::kPageSize}; ++t) {
          const auto token = static_cast<int>(page * ops::kPageSize) + t;
          const bool taken = nearest.has(rank_at(token), token);
          word |= uint64_t{taken ? 1u : 0u} << t;
          free += taken ? 0 : 1;
        }
        double total = 0.0;
        const auto first = static_cast<int64_t>(before + threads_.prefix(free, total));
        before += total;
        if (!inside) continue;
        if (weights != nullptr) {
          word |= draw(~word, first, first + free, weights + page * ops::kPageSize);
        }
        words_[page] = word;
      }
    }

    // Of the keys [first, end) of the rest, which are a page's bits, those that are drawn.
    EFFINFER_DEVICE uint64_t draw(uint64_t rest, int64_t first, int64_t end, float* weights) const {
      const int64_t all = pages_.count() * ops::kPageSize - p_.keys;
      const auto number = static_cast<uint32_t>(p_.layer * p_.kv.num_kv_heads + kv_head_);
      uint64_t drawn = 0;
      int bit = 0;
      int64_t place = first;  // of the first that `rest` has from `bit` on
      for (int64_t run = ((first + 1) * p_.samples - 1) / all; run < p_.samples; ++run) {
        const int64_t begin = run * all / p_.samples;
        if (begin >= end) break;
        const int64_t length = (run + 1) * all / p_.samples - begin;
        const double share =
            philox_uniform(p_.seed, static_cast<uint64_t>(run + 1),
                           static_cast<uint32_t>(block_.position), kDraws | number);
        const int64_t chosen = begin + static_cast<int64_t>(share * static_cast<double>(length));
        if (chosen < first || chosen >= end) continue;
        for (;; ++bit) {
          if ((rest >> bit & 1) == 0) continue;
          if (place == chosen) break;
          ++place;
        }
        drawn |= uint64_t{1} << bit;
        weights[bit] = logf(static_cast<float>(length));
      }
      return drawn;
    }

    Unit& unit_;
    const Params& params_;
    const ops::BucketIndexProblem& p_;
    Shared& shared_;
    const int64_t index_;
    const ops::VisitBlock& block_;
    const int32_t kv_head_;
    const ops::PageCandidates pages_;
    uint64_t* const words_;
    const int num_words_;
    const int num_buckets_;
    const uint8_t* buckets_ = nullptr;
    RowBlock<Unit> threads_;
  };
};

}  // namespace effinfer::cuda
