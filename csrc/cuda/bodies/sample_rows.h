// Selection and sampling over rows of logits or probabilities: a block a row (ops/row_sampling.h).
//
// A row of 128k is read three times where top-k is small (its highest, the number of candidates,
// the candidates), twice without filters (highest, sum), once where weights are given, and about
// seven times for top-p alone; then the part that has the token. Rows of up to 4096 values are
// lists from the start. Of rows that are split (split_rows.h) others have read all, and what is
// left is the list and a token.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/row_draw.h"
#include "cuda/bodies/row_filters.h"
#include "cuda/bodies/row_outcome.h"
#include "cuda/bodies/split_end.h"
#include "cuda/unit.h"
#include "ops/row_sampling.h"

namespace effinfer::cuda {

struct SampleParams {
  ops::RowSamplingProblem problem;
  bool vectored;               // rows of x
  bool out_vectored;           // rows of out
  ops::SamplingScratch split;  // rows of which parts are weighed already (split_rows.h)
};

struct SampleRows {
  static constexpr const char* kName = "sample_rows";
  static constexpr int kThreads = kRowThreads;
  static constexpr int kMinBlocks = 1;
  using Params = SampleParams;
  using Values = RowValues;
  struct Shared {
    RowExchange exchange;
    RowFilterShared filters;
    union {
      RowRing ring;
      SplitEndShared split;
    };
  };

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared& shared) {
    const ops::RowSamplingProblem& p = params.problem;
    const int64_t row = unit.block;
    const Values values = Values::of(static_cast<const float*>(p.x) + p.source_of(row) * p.vocab,
                                     static_cast<int>(p.vocab), params.vectored, shared.ring);
    RowBlock<Unit> block(unit, shared.exchange);
    const bool of_logits = p.source == ops::RowSource::logits;
    RowPasses<Values, Unit> passes(block, values, shared.filters.parts, of_logits);
    const RowLimits limits = limits_of(p, row);
    const SplitRow split({p, params.split, params.vectored}, row, 0);
    const RowPlan plan = params.split.parts > 0 ? split.ended_plan(limits) : RowPlan::rest;
    const bool is_split = plan != RowPlan::rest;
    const RowExtent extent = is_split ? split.extent(unit) : passes.extent();
    const ops::RowStatus status = status_of(extent, p.result, of_logits);
    if (unit.thread == 0) tell_status(p, row, status);
    if (status != ops::RowStatus::ok) return refuse(unit, p, row);
    passes.set_weights(extent.highest, factor_of(p, row));
    RowFilters<Values, Unit> filters(block, passes, shared.filters, extent, limits);
    SplitEnd<Unit> end(block, split, p, shared.filters.list, shared.split);
    if (is_split) {
      const RowKnown known = end.take(plan);
      if (unit.thread == 0) shared.filters.known = known;
      unit.sync();
      filters.take_known();
    }
    filters.keep_values();
    if (p.result == ops::RowResult::logits) {
      return write_logits(passes, params, row, filters.values());
    }
    filters.keep_weights();
    if (p.result == ops::RowResult::weights) {
      return write_weights(passes, params, row, filters);
    }
    if (filters.is_split()) {
      return end.draw_token(passes.weights(), filters, shared.filters.known.plan);
    }
    sample(block, passes, p, row, filters, shared.filters);
  }

 private:
  // The outputs of a row without a distribution are 0.
  template <class Unit>
  EFFINFER_DEVICE static void refuse(Unit& unit, const ops::RowSamplingProblem& p, int64_t row) {
    if (p.result == ops::RowResult::sample) {
      if (unit.thread == 0) refuse_sample(p, row);
      return;
    }
    for (int64_t i = unit.thread; i < p.vocab; i += kThreads) {
      static_cast<float*>(p.out)[row * p.vocab + i] = 0.0f;
    }
  }

  template <class Unit, class Passes, class Filters>
  EFFINFER_DEVICE static void sample(RowBlock<Unit>& block, Passes& passes,
                                     const ops::RowSamplingProblem& p, int64_t row,
                                     const Filters& filters, const RowFilterShared& shared) {
    const RowPoint at = RowPoint::of(p, row, filters);
    if (filters.listed()) {
      return draw_listed(block, p, row, at, shared.list, filters.list_size());
    }
    draw_in_row(
        block, passes.values(), shared.parts, at.point,
        [&](float x, int index) {
          return passes.weight(x, index, filters.values(), filters.weights());
        },
        [&](int token, const Drawn& drawn) { at.settle(p, row, token, drawn); });
  }

  // --- whole rows ------------------------------------------------------------------------------

  EFFINFER_DEVICE static void store(const Params& params, int64_t row, int first,
                                    const float (&x)[Values::kPerLane]) {
    const auto size = static_cast<int>(params.problem.vocab);
    Quad quad;
    EFFINFER_UNROLL
    for (int e = 0; e < Values::kPerLane; ++e) quad.words[e] = bits_of(x[e]);
    store_chunk(static_cast<float*>(params.problem.out) + row * params.problem.vocab, first, size,
                params.out_vectored, quad);
  }

  template <class Passes>
  EFFINFER_DEVICE static void write_logits(Passes& passes, const Params& params, int64_t row,
                                           const RowHead& head) {
    const float temperature = params.problem.temperature[row];
    passes.visit(NAN, [&](const float (&x)[Values::kPerLane], int first) {
      float out[Values::kPerLane];
      EFFINFER_UNROLL
      for (int e = 0; e < Values::kPerLane; ++e) {
        out[e] = head.has(x[e], first + e) ? x[e] / temperature : -INFINITY;
      }
      store(params, row, first, out);
    });
  }

  template <class Passes, class Filters>
  EFFINFER_DEVICE static void write_weights(Passes& passes, const Params& params, int64_t row,
                                            const Filters& filters) {
    // As RowDistribution::write_probabilities(): a factor that float32 has not is applied in
    // double.
    const double factor = 1.0 / filters.total();
    const bool plain = factor >= 1e-37 && factor <= 1e37;
    const auto single = static_cast<float>(factor);
    passes.visit(NAN, [&](const float (&x)[Values::kPerLane], int first) {
      float out[Values::kPerLane];
      EFFINFER_UNROLL
      for (int e = 0; e < Values::kPerLane; ++e) {
        const float weight = passes.weight(x[e], first + e, filters.values(), filters.weights());
        out[e] = plain ? weight * single : static_cast<float>(weight * factor);
      }
      store(params, row, first, out);
    });
  }
};

}  // namespace effinfer::cuda
