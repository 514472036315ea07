// Scores of the single keys that a generated row chooses from (ops/page_index.h), of each query
// head of a KV head: a key a thread, four heads at a time. Of channels that do not count queries
// are zeros, and lines of keys that have no other ones are not read.
#pragma once

#include <cstdint>

#include "cuda/bodies/key_products.h"
#include "cuda/bodies/page_bounds.h"
#include "cuda/bodies/tiled_queries.h"
#include "cuda/unit.h"
#include "ops/page_index.h"

namespace effinfer::cuda {

struct UnitKeysKernel {
  static constexpr const char* kName = "unit_keys";
  static constexpr int kThreads = 128;
  static constexpr int kUnits = 512;                   // of a block
  static constexpr int kHeads = TiledQueries::kHeads;  // at a time
  using Params = PageIndexParams;
  struct Shared {
    TiledQueries queries;
    int32_t counts[TiledQueries::kMostDims];  // of a line: whether some of its channels do
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const ops::PageIndexProblem& p = params.problem;
    const OwnUnits<kUnits> own(params, unit.block, int{ops::kPageSize});
    if (own.none()) return;
    set_queries(unit, p, own.row, own.kv_head, shared);
    for (int i = own.first + unit.thread; i < own.end; i += kThreads) {
      const int64_t page = unit.load(own.ids + i / int{ops::kPageSize});
      const int token = i % int{ops::kPageSize};
      const int64_t head = page * p.kv.num_kv_heads + own.kv_head;
      score(unit, params, shared, head, token, params.scores(own.index, own.kv_head) + i);
    }
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE static void set_queries(Unit& unit, const ops::PageIndexProblem& p,
                                          const ops::VisitBlock& row, int32_t kv_head,
                                          Shared& shared) {
    const int dims = p.kv.head_dim;
    const int group = p.group();
    const int of_line = AnyKeyLine(p.kv).of_line;
    const bool all = p.num_channels == 0;
    const float* q = p.q + row.first_row * p.q_stride + int64_t{kv_head} * group * dims;
    shared.queries.set(unit, q, group, dims, all ? p.sm_scale : 0.0f, kThreads);
    for (int i = unit.thread; i < dims / of_line; i += kThreads) shared.counts[i] = all ? 1 : 0;
    if (!all) {
      unit.sync();
      const int32_t* channels = p.channels + int64_t{kv_head} * p.num_channels;
      for (int i = unit.thread; i < p.num_channels; i += kThreads) {
        const int channel = unit.load(channels + i);
        for (int head = 0; head < group; ++head) {
          shared.queries.at(head, channel, dims) =
              unit.mul(unit.load(q + head * dims + channel), p.sm_scale);
        }
        // By the first of a line's channels alone.
        const int before = i > 0 ? unit.load(channels + i - 1) / of_line : -1;
        if (before != channel / of_line) shared.counts[channel / of_line] = 1;
      }
    }
    unit.sync();
  }

  template <class Unit>
  EFFINFER_DEVICE static void score(Unit& unit, const Params& params, const Shared& shared,
                                    int64_t head_page, int token, float* to) {
    const ops::PageIndexProblem& p = params.problem;
    const AnyKeyLine line_of(p.kv);
    const uint32_t* from = line_of.first(p.kv.k + head_page * params.head_bytes, token);
    const float scale = line_of.scale(unit, p.kv, head_page, token);
    EFFINFER_NO_UNROLL
    for (int head = 0; head < p.group(); head += kHeads) {
      float x[kHeads] = {};
      const float (*queries)[kHeads] = shared.queries.of(head, line_of.dims);
      for (int line = 0; line < line_of.lines(); ++line) {
        if (shared.counts[line] != 0) line_of.add(unit, from, line, queries, x);
      }
      EFFINFER_UNROLL
      for (int i = 0; i < kHeads; ++i) {
        if (head + i < p.group()) to[(head + i) * params.score_stride()] = unit.mul(x[i], scale);
      }
    }
  }
};

}  // namespace effinfer::cuda
