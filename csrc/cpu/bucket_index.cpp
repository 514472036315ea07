// The driver of bucket_index: an item is the lists of some blocks that follow each other and of one
// KV head, with their weights. Keys are hashed once for all of an item's blocks of a sequence.
#include "ops/bucket_index.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "core/philox.h"
#include "cpu/hash_index.h"
#include "cpu/level.h"
#include "cpu/page_index.h"
#include "cpu/register.h"
#include "cpu/token_set.h"
#include "ops/registry.h"

namespace effinfer::cpu {
namespace {

using ops::BucketIndexProblem;
using ops::IndexedHead;
using ops::kPageSize;
using ops::PageCandidates;
using ops::VisitBlock;

constexpr int64_t kItemBlocks = 8;
constexpr int64_t kPlanes = ops::kBucketPlanes.planes();
constexpr int64_t kMostBuckets = int64_t{1} << ops::kMostBucketBits;
// Draws of this index have counters that no hyperplane has.
constexpr uint32_t kDraws = uint32_t{1} << 31;

class BucketMember {
 public:
  BucketMember(const HashIndexKernels& level, const BucketIndexProblem& p, void* scratch)
      : level_(level),
        p_(p),
        num_buckets_(int64_t{1} << p.bits),
        sides_(static_cast<uint64_t*>(scratch)),
        near_(reinterpret_cast<int64_t*>(sides_ + kPlanes)),
        counts_(near_ + kMostBuckets),
        order_(counts_ + kMostBuckets),
        keys_(reinterpret_cast<float*>(order_ + kMostBuckets)),
        mean_(keys_ + hash_scratch_floats(p.kv.head_dim)),
        buckets_(reinterpret_cast<uint8_t*>(mean_ + p.kv.head_dim)) {}

  static size_t scratch_bytes(const BucketIndexProblem& p) {
    const int64_t words = kPlanes + 3 * kMostBuckets;
    const int64_t floats = hash_scratch_floats(p.kv.head_dim) + p.kv.head_dim;
    return static_cast<size_t>(words) * sizeof(uint64_t) +
           static_cast<size_t>(floats) * sizeof(float) + static_cast<size_t>(p.max_kv_len);
  }

  void run_item(int64_t item, int64_t kv_head) {
    if (p_.heads[kv_head] == IndexedHead::other) return;
    sequence_ = -1;
    const int64_t end = std::min((item + 1) * kItemBlocks, p_.visits.num_blocks);
    for (int64_t i = item * kItemBlocks; i < end; ++i) write_list(i, kv_head);
  }

 private:
  void write_list(int64_t index, int64_t kv_head) {
    const VisitBlock& block = p_.visits.blocks[index];
    const int64_t num_pages = TokenSet::words_of(block.position + block.num_rows);
    uint64_t* words = p_.visits.list(index, kv_head);
    const TokenSet list(words, num_pages);
    uint8_t& weighted = p_.visits.weighted[index * p_.visits.num_kv_heads + kv_head];
    weighted = 0;
    if (p_.heads[kv_head] == IndexedHead::dense || visits_all(p_, block)) return list.add_all();
    const PageCandidates pages = candidates_of(p_, block);
    list.add_all();
    hash_keys(block.sequence, kv_head, pages);
    hash_queries(block, kv_head);
    take_nearest(pages, words);
    if (p_.samples == 0) return;
    weighted = 1;
    float* weights = p_.visits.list_weights(index, kv_head);
    draw_rest(block, kv_head, words, weights);
    std::fill_n(weights, pages.first * kPageSize, 0.0f);
    std::fill_n(weights + pages.end * kPageSize, (num_pages - pages.end) * kPageSize, 0.0f);
  }

  // Of what is not hashed yet of a sequence.
  void hash_keys(int32_t sequence, int64_t kv_head, const PageCandidates& pages) {
    const int32_t* ids = p_.batch.kv_indices + p_.batch.kv_indptr[sequence];
    const KeyShape shape = {p_.kv.dtype, p_.kv.head_dim};
    if (sequence_ != sequence) {
      sequence_ = sequence;
      hashed_ = pages.first;
      std::fill_n(mean_, p_.kv.head_dim, 0.0f);
      const int64_t count = mean_pages(p_);
      for (int64_t i = 0; i < count; ++i) {
        level_.add_keys(shape, keys_of(p_.kv, ids[pages.first + i], kv_head), mean_);
      }
      for (int64_t d = 0; d < p_.kv.head_dim; ++d) {
        mean_[d] /= static_cast<float>(count * kPageSize);
      }
    }
    for (; hashed_ < pages.end; ++hashed_) {
      const PageKeys keys = keys_of(p_.kv, ids[hashed_], kv_head);
      level_.hash({shape, keys, mean_, p_.planes, kPlanes}, keys_, sides_);
      uint8_t* to = buckets_ + hashed_ * kPageSize;
      for (int64_t t = 0; t < kPageSize; ++t) {
        uint32_t bucket = 0;
        for (int32_t bit = 0; bit < p_.bits; ++bit) bucket |= (sides_[bit] >> t & 1) << bit;
        to[t] = static_cast<uint8_t>(bucket);
      }
    }
  }

  // How near each bucket is to the block's queries.
  void hash_queries(const VisitBlock& block, int64_t kv_head) {
    const int64_t group = p_.num_qo_heads / p_.kv.num_kv_heads;
    std::fill_n(near_, num_buckets_, int64_t{0});
    for (int64_t row = block.first_row; row < block.first_row + block.num_rows; ++row) {
      const float* q = p_.q + row * p_.q_stride + kv_head * group * p_.kv.head_dim;
      for (int64_t head = 0; head < group; ++head, q += p_.kv.head_dim) {
        level_.hash_queries(q, p_.kv.head_dim, p_.planes, ops::kBucketPlanes, sides_);
        int64_t bucket = 0;
        for (int32_t bit = 0; bit < p_.bits; ++bit) bucket |= int64_t{sides_[bit] == 0} << bit;
        ++near_[bucket];
      }
    }
    for (int64_t bit = 1; bit < num_buckets_; bit *= 2) {
      for (int64_t i = 0; i < num_buckets_; ++i) {
        if ((i & bit) != 0) continue;
        const int64_t without = near_[i];
        near_[i] = ops::kBucketNearness * without + near_[i + bit];
        near_[i + bit] = without + ops::kBucketNearness * near_[i + bit];
      }
    }
  }

  // Leaves of the candidates' words the keys of the nearest buckets; of the last bucket, which is
  // taken in part, the newest.
  void take_nearest(const PageCandidates& pages, uint64_t* words) {
    std::fill_n(counts_, num_buckets_, int64_t{0});
    for (int64_t t = pages.first * kPageSize; t < pages.end * kPageSize; ++t) {
      ++counts_[buckets_[t]];
    }
    std::iota(order_, order_ + num_buckets_, int64_t{0});
    std::sort(order_, order_ + num_buckets_, [&](int64_t a, int64_t b) {
      return near_[a] != near_[b] ? near_[a] > near_[b] : a < b;
    });
    int64_t left = p_.keys;
    for (int64_t i = 0; i < num_buckets_; ++i) {  // to how many of each are taken
      int64_t& count = counts_[order_[i]];
      count = std::min(count, left);
      left -= count;
    }
    for (int64_t page = pages.end - 1; page >= pages.first; --page) {
      uint64_t taken = 0;
      for (int64_t t = kPageSize - 1; t >= 0; --t) {
        int64_t& count = counts_[buckets_[page * kPageSize + t]];
        if (count == 0) continue;
        --count;
        taken |= uint64_t{1} << t;
      }
      words[page] = taken;
    }
  }

  void draw_rest(const VisitBlock& block, int64_t kv_head, uint64_t* words, float* weights) const {
    const PageCandidates pages = candidates_of(p_, block);
    const int64_t rest = pages.count() * kPageSize - p_.keys;
    const auto number = static_cast<uint32_t>(p_.layer * p_.kv.num_kv_heads + kv_head);
    const auto row = static_cast<uint32_t>(block.position);
    int64_t run = 0, length = 0, drawn = -1;
    const auto next = [&] {
      const int64_t begin = run * rest / p_.samples;
      length = ++run * rest / p_.samples - begin;
      const double place =
          philox_uniform(p_.seed, static_cast<uint64_t>(run), row, kDraws | number);
      drawn = begin + static_cast<int64_t>(place * static_cast<double>(length));
    };
    next();
    int64_t first = 0;  // of the rest, in this page
    for (int64_t page = pages.first; page < pages.end; ++page) {
      uint64_t free = ~words[page];
      std::fill_n(weights + page * kPageSize, kPageSize, 0.0f);
      int64_t place = first;
      first += std::popcount(free);
      while (drawn < first) {
        for (; place < drawn; ++place) free &= free - 1;
        const int bit = std::countr_zero(free);
        words[page] |= uint64_t{1} << bit;
        weights[page * kPageSize + bit] = std::log(static_cast<float>(length));
        if (run == p_.samples) return fill_behind(page + 1, pages.end, weights);
        next();
      }
    }
  }

  static void fill_behind(int64_t page, int64_t end, float* weights) {
    std::fill(weights + page * kPageSize, weights + end * kPageSize, 0.0f);
  }

  const HashIndexKernels& level_;
  const BucketIndexProblem& p_;
  const int64_t num_buckets_;
  uint64_t* const sides_;
  int64_t* const near_;
  int64_t* const counts_;
  int64_t* const order_;
  float* const keys_;
  float* const mean_;
  uint8_t* const buckets_;  // by token
  int32_t sequence_ = -1;   // that is hashed, up to this page
  int64_t hashed_ = 0;
};

template <Level kLevel>
void run_blocks(const BucketIndexProblem& p, Team& team) {
  BucketMember member(kernels<kLevel, HashIndexKernels>(), p, team.scratch());
  const int64_t heads = p.kv.num_kv_heads;
  const int64_t items = (p.visits.num_blocks + kItemBlocks - 1) / kItemBlocks;
  team.for_chunks(items * heads, [&](int64_t i) { member.run_item(i / heads, i % heads); });
}

const char* rejects(const BucketIndexProblem& p) {
  return rejects_keys(p.kv);
}

}  // namespace

void register_bucket_index() {
  auto& table = ops::mutable_table<BucketIndexProblem>();
  for_levels<Level::portable, Level::avx2, Level::avx512>([&]<Level kLevel>() {
    table.add({"bucket_index." + std::string(name(kLevel)), isa_of(kLevel), rejects,
               run_blocks<kLevel>, BucketMember::scratch_bytes});
  });
}

}  // namespace effinfer::cpu
