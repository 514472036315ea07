// What lists of a caller's keys are chosen by, beside scores of keys: rows of several tokens made
// one, bounds of pages, and how high logits within them may be. A block has a group of tokens or a
// page, of rows of any float type, a thread a number of each row, or a warp a head.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/any_float.h"
#include "cuda/bodies/row_sum.h"
#include "cuda/unit.h"
#include "ops/page_bounds.h"
#include "ops/pooled_rows.h"

namespace effinfer::cuda {

struct PoolRowsKernel {
  static constexpr const char* kName = "pool_rows";
  static constexpr int kThreads = 256;
  using Params = ops::PoolRowsProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int size = static_cast<int>(p.group_size);
    const int dims = static_cast<int>(p.dims);
    const int width = p.concatenates ? size * dims : dims;
    const int count = static_cast<int>(p.heads) * width;
    const uint8_t* const* tokens = p.tokens + int64_t{unit.block} * size;
    float* out = p.out + int64_t{unit.block} * count;
    int given = 0;
    EFFINFER_NO_UNROLL
    for (int token = 0; token < size; ++token) given += tokens[token] != nullptr ? 1 : 0;
    for (int i = unit.thread; i < count; i += kThreads) {
      // Of the tokens that a number is made of.
      const int place = i % width / dims;
      const int own = p.reverses ? size - 1 - place : place;
      const int first = p.concatenates ? own : 0;
      const int last = p.concatenates ? own + 1 : size;
      const auto shares = static_cast<float>(p.concatenates ? 1 : given);
      float sum = 0.0f;
      EFFINFER_NO_UNROLL
      for (int token = first; token < last; ++token) {
        if (tokens[token] == nullptr) continue;
        const uint8_t* row = tokens[token] + i / width * p.head_stride;
        sum += read_float(unit, p.dtype, row, i % dims) / shares;
      }
      out[i] = sum;
    }
  }
};

// Of callers' pages; those of the engine's have bodies/page_bounds.h.
struct CallerBoundsKernel {
  static constexpr const char* kName = "page_bounds";
  static constexpr int kThreads = 256;
  using Params = ops::PageBoundsProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const ops::KeyPage& page = p.pages[unit.block];
    const int width = p.num_kv_heads * p.k.dims;
    for (int i = unit.thread; i < width; i += kThreads) {
      const uint8_t* row = page.first + i / p.k.dims * p.k.head_stride;
      float least = INFINITY;
      float most = -INFINITY;
      EFFINFER_NO_UNROLL
      for (int64_t token = 0; token < page.tokens; ++token, row += p.k.token_stride) {
        const float x = read_float(unit, p.k.dtype, row, i % p.k.dims);
        least = fminf(least, x);
        most = fmaxf(most, x);
      }
      p.least[page.place * width + i] = least;
      p.most[page.place * width + i] = most;
    }
  }
};

struct PageScoresKernel {
  static constexpr const char* kName = "page_scores";
  static constexpr int kThreads = 256;
  using Params = ops::PageScoresProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const ops::KeyPage& page = p.pages[unit.block];
    const int group = p.num_qo_heads / p.num_kv_heads;
    for (int head = unit.warp; head < p.num_qo_heads; head += kThreads / kWarp) {
      const int64_t at = (page.place * p.num_kv_heads + head / group) * p.q.dims;
      float best = -INFINITY;
      EFFINFER_NO_UNROLL
      for (int row = p.qo_indptr[page.sequence]; row < p.qo_indptr[page.sequence + 1]; ++row) {
        const int64_t first = row * p.q.row_stride + head * p.q.head_stride;
        float sum = 0.0f;
        EFFINFER_NO_UNROLL
        for (int d = unit.lane; d < p.q.dims; d += kWarp) {
          const float x = read_float(unit, p.q.dtype, p.q.data, first + d);
          sum += fmaxf(x * unit.load(p.least + at + d), x * unit.load(p.most + at + d));
        }
        best = fmaxf(best, warp_sum(unit, sum));
      }
      if (unit.lane == 0) p.out[head * p.num_pages + unit.block] = best;
    }
  }
};

}  // namespace effinfer::cuda
