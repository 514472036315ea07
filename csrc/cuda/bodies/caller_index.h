// What lists of a caller's keys are chosen by, beside scores of keys: rows of several tokens made
// one, bounds of pages, and how high logits within them may be. A thread has a number, or a warp a
// page, of rows of any float type.
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
    const int64_t width = p.concatenates ? p.group_size * p.dims : p.dims;
    const int64_t i = int64_t{unit.block} * kThreads + unit.thread;
    if (i >= p.num_groups * p.heads * width) return;
    const int64_t group = i / (p.heads * width);
    const int64_t offset = i / width % p.heads * p.head_stride;
    const int64_t at = i % width;
    const uint8_t* const* tokens = p.tokens + group * p.group_size;
    const auto number = [&](int64_t token, int64_t d) {
      return read_float(unit, p.dtype, tokens[token] + offset, d);
    };
    if (p.concatenates) {
      const int64_t place = at / p.dims;
      const int64_t token = p.reverses ? p.group_size - 1 - place : place;
      p.out[i] = tokens[token] == nullptr ? 0.0f : number(token, at % p.dims);
      return;
    }
    int count = 0;
    for (int64_t token = 0; token < p.group_size; ++token) {
      count += tokens[token] == nullptr ? 0 : 1;
    }
    float sum = 0.0f;
    for (int64_t token = 0; token < p.group_size; ++token) {
      if (tokens[token] == nullptr) continue;
      sum += number(token, at) / static_cast<float>(count);
    }
    p.out[i] = sum;
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
    const int64_t width = int64_t{p.num_kv_heads} * p.k.dims;
    const int64_t i = int64_t{unit.block} * kThreads + unit.thread;
    if (i >= p.num_pages * width) return;
    const ops::KeyPage& page = p.pages[i / width];
    const uint8_t* row = page.first + i % width / p.k.dims * p.k.head_stride;
    float least = INFINITY;
    float most = -INFINITY;
    for (int64_t token = 0; token < page.tokens; ++token, row += p.k.token_stride) {
      const float x = read_float(unit, p.k.dtype, row, i % p.k.dims);
      least = fminf(least, x);
      most = fmaxf(most, x);
    }
    p.least[page.place * width + i % width] = least;
    p.most[page.place * width + i % width] = most;
  }
};

// A warp a page and query head.
struct PageScoresKernel {
  static constexpr const char* kName = "page_scores";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 4;
  static constexpr int kWarps = kThreads / kWarp;
  using Params = ops::PageScoresProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int64_t task = int64_t{unit.block} * kWarps + unit.warp;
    if (task >= p.num_pages * p.num_qo_heads) return;
    const int64_t head = task / p.num_pages;
    const ops::KeyPage& page = p.pages[task % p.num_pages];
    const int64_t kv_head = head / (p.num_qo_heads / p.num_kv_heads);
    const int64_t at = (page.place * p.num_kv_heads + kv_head) * p.q.dims;
    float best = -INFINITY;
    for (int32_t row = p.qo_indptr[page.sequence]; row < p.qo_indptr[page.sequence + 1]; ++row) {
      float sum = 0.0f;
      for (int d = unit.lane; d < p.q.dims; d += kWarp) {
        const float x = read_float(unit, p.q.dtype, p.q.data,
                                   row * p.q.row_stride + head * p.q.head_stride + d);
        sum += fmaxf(x * unit.load(p.least + at + d), x * unit.load(p.most + at + d));
      }
      best = fmaxf(best, warp_sum(unit, sum));
    }
    if (unit.lane == 0) p.out[task] = best;
  }
};

}  // namespace effinfer::cuda
