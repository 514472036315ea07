// The highest values of each row as a result (ops/row_sampling.h): a block a row. In the order of
// tokens, as two passes behind the search for the last value find them, or highest first, sorted in
// shared memory. A row of 128k is read about seven times, all but the first from L2.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/row_heads.h"
#include "cuda/unit.h"
#include "ops/row_sampling.h"

namespace effinfer::cuda {

struct RowTopParams {
  ops::RowSamplingProblem problem;
  bool vectored;
};

struct RowTop {
  static constexpr const char* kName = "row_top";
  static constexpr int kThreads = kRowThreads;
  using Params = RowTopParams;
  using Values = RowValues;
  struct Shared {
    RowExchange exchange;
    RowFilterShared heads;
    RowRing ring;
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const ops::RowSamplingProblem& p = params.problem;
    const int64_t row = unit.block;
    const auto* x = static_cast<const float*>(p.x) + row * p.vocab;
    const Values values = Values::of(x, static_cast<int>(p.vocab), params.vectored, shared.ring);
    RowBlock<Unit> block(unit, shared.exchange);
    RowPasses<Values, Unit> passes(block, values, shared.heads.parts, true);
    const RowExtent extent = passes.extent();
    const auto k = static_cast<int>(p.top_k.value);
    const Output out{x, static_cast<float*>(p.out) + row * k, p.ids + row * k};
    if (unit.thread == 0 && p.statuses != nullptr) {
      p.statuses[row] = extent.has_nan ? ops::RowStatus::nan : ops::RowStatus::ok;
    }
    if (extent.has_nan) {
      for (int i = unit.thread; i < k; i += kThreads) out.put_nothing(i);
      return;
    }
    const RowLimits limits;
    Heads<Unit> heads(block, passes, shared.heads, extent, limits);
    const RowHead head = heads.value_head(k);
    count(block, values, head, shared.heads.parts);
    if (!p.sorted) {
      each_in_order(block, values, head, shared.heads.parts,
                    [&](int place, float, int token) { out.put(place, token); });
      return;
    }
    RowList& list = shared.heads.list;
    each_in_order(block, values, head, shared.heads.parts, [&](int place, float value, int token) {
      list.values[place] = value;
      list.ids[place] = token;
    });
    sort(unit, list, k);
    for (int i = unit.thread; i < k; i += kThreads) out.put(i, list.ids[i]);
  }

 private:
  template <class Unit>
  class Heads : public RowHeads<Values, Unit> {
   public:
    using Base = RowHeads<Values, Unit>;
    using Base::Base;
    using Base::value_head;
  };

  struct Output {
    const float* row;
    float* values;
    int64_t* ids;

    EFFINFER_DEVICE void put(int place, int token) const {
      ids[place] = token;
      values[place] = row[token];
    }
    EFFINFER_DEVICE void put_nothing(int place) const {
      ids[place] = 0;
      values[place] = 0.0f;
    }
  };

  // Of each warp's part, how many of the head it has. The barrier before is that of the search.
  template <class Unit>
  EFFINFER_DEVICE static void count(RowBlock<Unit>& block, const Values& values,
                                    const RowHead& head, RowParts& parts) {
    Unit& unit = block.unit();
    int mine = 0;
    values.visit(unit, NAN, [&](const float (&x)[Values::kPerLane], int first) {
      EFFINFER_UNROLL
      for (int e = 0; e < Values::kPerLane; ++e) mine += head.has(x[e], first + e) ? 1 : 0;
    });
    mine = block.warp_sum(mine);
    if (unit.lane == 0) parts.count[unit.warp] = mine;
    unit.sync();
  }

  // each(place, value, token) of the head, in the order of tokens.
  template <class Unit, class Each>
  EFFINFER_DEVICE static void each_in_order(RowBlock<Unit>& block, const Values& values,
                                            const RowHead& head, const RowParts& parts,
                                            Each&& each) {
    Unit& unit = block.unit();
    int at = 0;
    for (int w = 0; w < unit.warp; ++w) at += parts.count[w];
    values.visit(unit, NAN, [&](const float (&x)[Values::kPerLane], int first) {
      bool in[Values::kPerLane];
      EFFINFER_UNROLL
      for (int e = 0; e < Values::kPerLane; ++e) in[e] = head.has(x[e], first + e);
      int before = 0;
      const int count = block.count_in(in, before);
      int place = at + before;
      EFFINFER_UNROLL
      for (int e = 0; e < Values::kPerLane; ++e) {
        if (in[e]) each(place++, x[e], first + e);
      }
      at += count;
    });
  }

  // Highest first, the lower token of equal ones: the network of bitonic sorting (Batcher, 1968),
  // in which a thread has pairs of places. What fills the list up stays behind the `count` first.
  template <class Unit>
  EFFINFER_DEVICE static void sort(Unit& unit, RowList& list, int count) {
    int size = 2;
    while (size < count) size *= 2;
    for (int i = count + unit.thread; i < size; i += kThreads) {
      list.values[i] = -INFINITY;
      list.ids[i] = INT32_MAX;
    }
    for (int run = 2; run <= size; run *= 2) {
      for (int distance = run / 2; distance > 0; distance /= 2) {
        unit.sync();
        for (int i = unit.thread; i < size / 2; i += kThreads) {
          const int low = i / distance * distance * 2 + i % distance;
          order(list, low, low + distance, (low & run) == 0);
        }
      }
    }
    unit.sync();
  }
  EFFINFER_DEVICE static void order(RowList& list, int low, int high, bool descending) {
    const float x = list.values[low];
    const float y = list.values[high];
    const int x_id = list.ids[low];
    const int y_id = list.ids[high];
    const bool ordered = x > y || (x == y && x_id < y_id);
    if (ordered == descending) return;
    list.values[low] = y;
    list.values[high] = x;
    list.ids[low] = y_id;
    list.ids[high] = x_id;
  }
};

}  // namespace effinfer::cuda
