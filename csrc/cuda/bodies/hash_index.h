// The keys that a generated row draws by its tables of hashes, and how often each counts
// (ops/hash_index.h), in two kernels. The first one makes the codes of pages that nobody knows yet,
// a block of threads a page at a time, as page_bounds.h makes bounds. The second one has a block
// for a part of a list's pages, a warp for each: its lanes have tables of a head, whose collisions
// are words of a page's keys, and then keys, two a lane, of those that were drawn.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/hash_codes.h"
#include "cuda/bodies/index_keys.h"
#include "cuda/bodies/key_products.h"
#include "cuda/bodies/tiled_queries.h"
#include "cuda/unit.h"
#include "ops/hash_index.h"

namespace effinfer::cuda {

struct HashIndexParams {
  ops::HashIndexProblem problem;
  int64_t head_bytes;  // of a KV head's page
  int32_t parts;       // of a list's pages: blocks

  EFFINFER_DEVICE int32_t kv_head(int block) const {
    return block / parts % problem.kv.num_kv_heads;
  }
  EFFINFER_DEVICE int64_t list_block(int block) const {
    return problem.visits.num_blocks + block / parts / problem.kv.num_kv_heads;
  }
  // Whether a row's KV head draws.
  EFFINFER_DEVICE bool draws(const ops::VisitBlock& row, int32_t kv_head) const {
    return row.sequence >= 0 && problem.heads[kv_head] == ops::IndexedHead::chosen &&
           !ops::visits_all(problem, row);
  }
};

struct HashCodesKernel {
  static constexpr const char* kName = "hash_codes";
  static constexpr int kThreads = 256;
  static constexpr int kPages = 64;  // that a block looks at
  using Params = HashIndexParams;
  struct Shared {
    HashedPage<kThreads / kWarp> page;
    int32_t pages[kPages];
    uint32_t unknown[kPages / kWarp];
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const ops::HashIndexProblem& p = params.problem;
    const int32_t kv_head = params.kv_head(unit.block);
    const ops::VisitBlock row = p.visits.blocks[params.list_block(unit.block)];
    if (!params.draws(row, kv_head)) return;
    const ops::PageCandidates pages = ops::candidates_of(p, row);
    const int64_t first = pages.first + int64_t{unit.block % params.parts} * kPages;
    if (first >= pages.end) return;
    const int32_t* ids = p.batch.kv_indices + p.batch.kv_indptr[row.sequence];
    if (unit.thread < kPages) {
      const int64_t own = first + unit.thread;
      const int32_t page = own < pages.end ? unit.load(ids + own) : -1;
      // It counts who asked, as those of page_bounds.h are.
      const bool is_first =
          page >= 0 &&
          unit.atomic_add(p.kv.bounds.known + page * p.kv.bounds.known_stride + kv_head, 1) == 0;
      const uint32_t unknown = unit.ballot(is_first);
      shared.pages[unit.thread] = page;
      if (unit.lane == 0) shared.unknown[unit.warp] = unknown;
    }
    unit.sync();
    for (int i = 0; i < kPages; ++i) {
      if ((shared.unknown[i / kWarp] >> i % kWarp & 1) == 0) continue;
      const int64_t page = shared.pages[i];
      shared.page.set(unit, p.kv, params.head_bytes, page, kv_head,
                      p.means + kv_head * p.kv.head_dim);
      unit.sync();
      // Where bounds would be.
      auto* const codes = reinterpret_cast<uint64_t*>(
          p.kv.bounds.of(page, kv_head, p.kv.num_kv_heads, p.kv.head_dim));
      shared.page.hash(unit, p.planes, static_cast<int>(p.tables.planes()), p.kv.head_dim,
                       [&](int plane, uint64_t word) { codes[plane] = word; });
      unit.sync();
    }
  }
};

struct HashIndexKernel {
  static constexpr const char* kName = "hash_index";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 2;
  static constexpr int kPages = 64;                    // of a block
  static constexpr int kMostPlanes = 16384;            // of a KV head's tables
  static constexpr int kHeads = TiledQueries::kHeads;  // that are measured at a time
  using Params = HashIndexParams;
  struct Shared {
    TiledQueries queries;
    float sizes[TiledQueries::kMostHeads];  // of queries
    uint8_t sides[kMostPlanes];             // of hyperplanes: whether they are above
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const ops::HashIndexProblem& p = params.problem;
    const int32_t kv_head = params.kv_head(unit.block);
    const int64_t block = params.list_block(unit.block);
    const ops::VisitBlock row = p.visits.blocks[block];
    if (row.sequence < 0 || p.heads[kv_head] == ops::IndexedHead::other) return;
    Draw<Unit>(unit, params, shared, block, row, kv_head).run();
  }

 private:
  template <class Unit>
  class Draw {
   public:
    EFFINFER_DEVICE Draw(Unit& unit, const Params& params, Shared& shared, int64_t block,
                         const ops::VisitBlock& row, int32_t kv_head)
        : unit_(unit),
          params_(params),
          p_(params.problem),
          shared_(shared),
          row_(row),
          kv_head_(kv_head),
          dims_(p_.kv.head_dim),
          pages_(ops::candidates_of(p_, row)),
          words_(p_.visits.list(block, kv_head)),
          weights_(p_.visits.list_weights(block, kv_head)),
          weighted_(p_.visits.weighted + block * p_.visits.num_kv_heads + kv_head),
          slot_(p_.batch.step_begin(row.sequence) + row.first_row -
                p_.batch.qo_indptr[row.sequence]) {}

    EFFINFER_DEVICE void run() {
      const int64_t first = int64_t{unit_.block % params_.parts} * kPages;
      const int64_t all = slot_ / ops::kPageSize + 1;
      const int64_t end = first + kPages < all ? first + kPages : all;
      const bool draws = params_.draws(row_, kv_head_);
      if (first == 0 && unit_.thread == 0) *weighted_ = draws ? 1 : 0;
      if (first >= end) return;
      if (!draws) {
        for (int64_t i = first + unit_.thread; i < end; i += kThreads) words_[i] = ~uint64_t{0};
        return;
      }
      set_queries();
      EFFINFER_NO_UNROLL
      for (int64_t i = first + unit_.warp; i < end; i += kThreads / kWarp) write_page(i);
    }

   private:
    EFFINFER_DEVICE void set_queries() {
      const int group = p_.tables.group;
      const float* q = p_.q + row_.first_row * p_.q_stride + int64_t{kv_head_} * group * dims_;
      shared_.queries.set(unit_, q, group, dims_, 1.0f, kThreads);
      EFFINFER_NO_UNROLL
      for (int head = unit_.warp; head < group; head += kThreads / kWarp) {
        double sum = 0.0;
        for (int d = unit_.lane; d < dims_; d += kWarp) {
          const double x = unit_.load(q + head * dims_ + d);
          sum += x * x;
        }
        EFFINFER_UNROLL
        for (int mask = 1; mask < kWarp; mask *= 2) sum += unit_.shfl_xor(sum, mask);
        if (unit_.lane == 0) shared_.sizes[head] = static_cast<float>(sqrt(sum));
      }
      const int of_head = static_cast<int>(p_.tables.of_head());
      EFFINFER_NO_UNROLL
      for (int i = unit_.warp; i < group * of_head; i += kThreads / kWarp) {
        const float* plane = p_.planes + int64_t{i} * dims_;
        const bool above = is_above(unit_, q + i / of_head * dims_, plane, dims_);
        if (unit_.lane == 0) shared_.sides[i] = above ? 1 : 0;
      }
      unit_.sync();
    }

    EFFINFER_DEVICE void write_page(int64_t page) {
      const int64_t own = row_.position / ops::kPageSize;
      const uint64_t always = always_visited(p_.sink_tokens, p_.local_tokens, row_, page) |
                              bits_of_word(page, (own - 1) * ops::kPageSize, slot_ + 1);
      uint64_t drawn = 0;
      if (page >= pages_.first && page < pages_.end) {
        const int32_t* ids = p_.batch.kv_indices + p_.batch.kv_indptr[row_.sequence];
        const int64_t id = unit_.load(ids + page);
        drawn = collisions(id);
        const uint64_t measured = drawn & ~always;
        if (measured != 0) weigh(id, page, measured);
      }
      EFFINFER_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int token = half * kWarp + unit_.lane;
        if ((always >> token & 1) != 0) weights_[page * ops::kPageSize + token] = 0.0f;
      }
      if (unit_.lane == 0) words_[page] = drawn | always;
    }

    // Keys that collide with some head in two tables of its own.
    EFFINFER_DEVICE uint64_t collisions(int64_t id) {
      const auto* codes = reinterpret_cast<const uint64_t*>(
          p_.kv.bounds.of(id, kv_head_, p_.kv.num_kv_heads, dims_));
      const int tables = p_.tables.tables;
      const int bits = p_.tables.bits;
      constexpr int kTogether = static_cast<int>(ops::kTablesTogether);
      uint64_t drawn = 0;
      EFFINFER_NO_UNROLL
      for (int head = 0; head < p_.tables.group; ++head) {
        uint64_t once = 0;
        uint64_t twice = 0;
        for (int table = unit_.lane; table < tables; table += kWarp) {
          const int first =
              head * tables * bits + table / kTogether * bits * kTogether + table % kTogether;
          uint64_t same = ~uint64_t{0};
          for (int bit = 0; bit < bits; ++bit) {
            const int plane = first + bit * kTogether;
            const uint64_t other = shared_.sides[plane] != 0 ? 0 : ~uint64_t{0};
            same &= unit_.load(codes + plane) ^ other;
          }
          twice |= once & same;
          once |= same;
        }
        EFFINFER_UNROLL
        for (int mask = 1; mask < kWarp; mask *= 2) {
          const uint64_t others = unit_.shfl_xor(once, mask);
          twice |= unit_.shfl_xor(twice, mask) | (once & others);
          once |= others;
        }
        drawn |= twice;
      }
      return drawn;
    }

    // The logarithms of how often drawn keys of a page count: over the chance that some head draws
    // them.
    EFFINFER_DEVICE void weigh(int64_t id, int64_t page, uint64_t drawn) {
      const int64_t place = id * p_.kv.num_kv_heads + kv_head_;
      EFFINFER_NO_UNROLL
      for (int token = unit_.lane; token < int{ops::kPageSize}; token += kWarp) {
        if ((drawn >> token & 1) == 0) continue;
        float chance = 0.0f;
        EFFINFER_NO_UNROLL
        for (int head = 0; head < p_.tables.group; head += kHeads) {
          float products[kHeads] = {};
          const float size = sqrtf(measure(place, token, head, products));
          EFFINFER_UNROLL
          for (int i = 0; i < kHeads; ++i) {
            if (head + i >= p_.tables.group) continue;
            const float cosine = products[i] / unit_.mul(shared_.sizes[head + i], size);
            chance += unit_.mul(ops::hash_chance(p_.chances, cosine), 1.0f - chance);
          }
        }
        weights_[page * ops::kPageSize + token] = -logf(chance);
      }
    }

    // Products of a key, less its mean, with the queries of kHeads heads; returns its own.
    EFFINFER_DEVICE float measure(int64_t head_page, int token, int head,
                                  float (&products)[kHeads]) {
      const AnyKeyLine line_of(p_.kv);
      const uint32_t* from = line_of.first(p_.kv.k + head_page * params_.head_bytes, token);
      const float scale = line_of.scale(unit_, p_.kv, head_page, token);
      const float* mean = p_.means + kv_head_ * dims_;
      const float (*queries)[kHeads] = shared_.queries.of(head, dims_);
      float square = 0.0f;
      for (int line = 0; line < line_of.lines(); ++line) {
        line_of.visit(unit_, from, line, [&](int dim, float key) {
          const float x = unit_.mul(key, scale) - unit_.load(mean + dim);
          square = fmaf(x, x, square);
          EFFINFER_UNROLL
          for (int i = 0; i < kHeads; ++i) products[i] = fmaf(queries[dim][i], x, products[i]);
        });
      }
      return square;
    }

    Unit& unit_;
    const Params& params_;
    const ops::HashIndexProblem& p_;
    Shared& shared_;
    const ops::VisitBlock& row_;
    const int32_t kv_head_;
    const int dims_;
    const ops::PageCandidates pages_;
    uint64_t* const words_;
    float* const weights_;
    uint8_t* const weighted_;
    const int64_t slot_;  // a tree's tokens lie behind each other, whatever their positions are
  };
};

}  // namespace effinfer::cuda
