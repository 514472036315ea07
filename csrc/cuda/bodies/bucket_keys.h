// The buckets of a prompt's keys (ops/bucket_index.h): the mean of the first candidates, then on
// which sides of eight hyperplanes each candidate lies, less that mean: a byte by token.
#pragma once

#include <cstdint>

#include "cuda/bodies/hash_codes.h"
#include "cuda/bodies/key_products.h"
#include "cuda/bodies/row_sum.h"
#include "cuda/unit.h"
#include "ops/bucket_index.h"

namespace effinfer::cuda {

struct BucketIndexParams {
  ops::BucketIndexProblem problem;
  int64_t head_bytes;  // of a KV head's page
  int32_t parts;       // of a sequence's pages: blocks

  // What the kernels have of a sequence's KV head, by its place in VisitPlan::sequences.
  EFFINFER_DEVICE float* mean(int64_t place, int64_t kv_head) const {
    const int64_t head = place * problem.kv.num_kv_heads + kv_head;
    return reinterpret_cast<float*>(problem.visits.buckets +
                                    head * ops::bucket_bytes(problem.visits.list_words));
  }
  EFFINFER_DEVICE uint8_t* buckets(int64_t place, int64_t kv_head) const {
    return reinterpret_cast<uint8_t*>(mean(place, kv_head) + ops::kMostBucketDims);
  }
  // The last block of a sequence, which has all of its candidates.
  EFFINFER_DEVICE const ops::VisitBlock& last_block(int64_t place) const {
    const ops::VisitSequence& sequence = problem.visits.sequences[place];
    return problem.visits.blocks[sequence.first_block + sequence.num_blocks - 1];
  }
  EFFINFER_DEVICE bool chooses(const ops::VisitBlock& block, int64_t kv_head) const {
    return problem.heads[kv_head] == ops::IndexedHead::chosen && !ops::visits_all(problem, block);
  }
};

// A warp has a line of the pages at a time, a lane a token of 32.
struct BucketMeanKernel {
  static constexpr const char* kName = "bucket_mean";
  static constexpr int kThreads = 256;
  using Params = BucketIndexParams;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared&) {
    const ops::BucketIndexProblem& p = params.problem;
    const int64_t kv_head = unit.block % p.kv.num_kv_heads;
    const int64_t place = unit.block / p.kv.num_kv_heads;
    const ops::VisitBlock& last = params.last_block(place);
    if (!params.chooses(last, kv_head)) return;
    const int32_t* ids =
        p.batch.kv_indices + p.batch.kv_indptr[last.sequence] + ops::candidates_of(p, last).first;
    const int pages = static_cast<int>(ops::mean_pages(p));
    const AnyKeyLine line_of(p.kv);
    EFFINFER_NO_UNROLL
    for (int line = unit.warp; line < line_of.lines(); line += kThreads / kWarp) {
      float sums[AnyKeyLine::kMost] = {};
      for (int i = 0; i < 2 * pages; ++i) {
        const int64_t head = unit.load(ids + i / 2) * int64_t{p.kv.num_kv_heads} + kv_head;
        const int token = i % 2 * kWarp + unit.lane;
        const uint32_t* from = line_of.first(p.kv.k + head * params.head_bytes, token);
        const float scale = line_of.scale(unit, p.kv, head, token);
        float k[AnyKeyLine::kMost];
        line_of.widen(unit, unit.load(from + line * 16), k);
        EFFINFER_UNROLL
        for (int e = 0; e < AnyKeyLine::kMost; ++e) sums[e] = fmaf(k[e], scale, sums[e]);
      }
      EFFINFER_UNROLL
      for (int e = 0; e < AnyKeyLine::kMost; ++e) {
        const float sum = warp_sum(unit, sums[e]);
        if (unit.lane != 0 || e >= line_of.of_line) continue;
        params.mean(place, kv_head)[line * line_of.of_line + e] =
            sum / static_cast<float>(pages * int{ops::kPageSize});
      }
    }
  }
};

// A block has a page at a time, each of its two warps four hyperplanes, then a thread a token.
struct BucketKeysKernel {
  static constexpr const char* kName = "bucket_keys";
  static constexpr int kThreads = 64;
  static constexpr int kPages = 8;  // of a block
  static constexpr int kPlanes = static_cast<int>(ops::kBucketPlanes.planes());
  using Params = BucketIndexParams;
  struct Shared {
    HashedPage<kThreads / kWarp> page;
    uint64_t sides[kPlanes];
  };
  static_assert(kThreads == ops::kPageSize);

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const ops::BucketIndexProblem& p = params.problem;
    const int64_t head = unit.block / params.parts;
    const int64_t kv_head = head % p.kv.num_kv_heads;
    const int64_t place = head / p.kv.num_kv_heads;
    const ops::VisitBlock& last = params.last_block(place);
    if (!params.chooses(last, kv_head)) return;
    const ops::PageCandidates pages = ops::candidates_of(p, last);
    const int32_t* ids = p.batch.kv_indices + p.batch.kv_indptr[last.sequence];
    const int64_t first = pages.first + int64_t{unit.block % params.parts} * kPages;
    for (int64_t i = first; i < first + kPages && i < pages.end; ++i) {
      shared.page.set(unit, p.kv, params.head_bytes, unit.load(ids + i), kv_head,
                      params.mean(place, kv_head));
      unit.sync();
      shared.page.hash(unit, p.planes, kPlanes, p.kv.head_dim,
                       [&](int plane, uint64_t word) { shared.sides[plane] = word; });
      unit.sync();
      uint32_t bucket = 0;
      for (int bit = 0; bit < p.bits; ++bit) {
        bucket |= static_cast<uint32_t>(shared.sides[bit] >> unit.thread & 1) << bit;
      }
      params.buckets(place, kv_head)[i * ops::kPageSize + unit.thread] =
          static_cast<uint8_t>(bucket);
    }
  }
};

}  // namespace effinfer::cuda
