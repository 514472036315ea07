// Selection and sampling over rows of logits or probabilities: a block a row (ops/row_sampling.h).
//
// A row of 128k is read three times where top-k is small (its highest, the number of candidates,
// the candidates), twice without filters (highest, sum), once where weights are given, and about
// seven times for top-p alone; then the part that has the token. Rows of up to 4096 values are
// lists from the start.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/row_draw.h"
#include "cuda/bodies/row_filters.h"
#include "cuda/unit.h"
#include "ops/row_sampling.h"

namespace effinfer::cuda {

struct SampleParams {
  ops::RowSamplingProblem problem;
  bool vectored;      // rows of x
  bool out_vectored;  // rows of out
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
    RowRing ring;
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
    const RowExtent extent = passes.extent();
    const ops::RowStatus status = status_of(extent, p.result, of_logits);
    if (unit.thread == 0) {
      if (p.statuses != nullptr) p.statuses[row] = status;
      if (p.valid != nullptr) p.valid[row] = status == ops::RowStatus::ok ? 1 : 0;
    }
    if (status != ops::RowStatus::ok) return refuse(unit, p, row);
    // As RowDistribution::to_weights(): a denormal temperature has no finite inverse.
    passes.set_weights(extent.highest, fminf(1.0f / p.temperature[row], 3.40282347e38f));
    RowFilters<Values, Unit> filters(block, passes, shared.filters, extent, limits_of(p, row));
    filters.keep_values();
    if (p.result == ops::RowResult::logits) {
      return write_logits(passes, params, row, filters.values());
    }
    filters.keep_weights();
    if (p.result == ops::RowResult::weights) {
      return write_weights(passes, params, row, filters);
    }
    sample(block, passes, p, row, filters, shared.filters);
  }

 private:
  EFFINFER_DEVICE static RowLimits limits_of(const ops::RowSamplingProblem& p, int64_t row) {
    RowLimits limits;
    const int64_t k = p.top_k_of(row);
    limits.top_k = k < p.vocab ? static_cast<int>(k) : 0;
    limits.top_p = p.top_p[row];
    limits.min_p = p.min_p[row];
    limits.joint = p.joint;
    return limits;
  }

  EFFINFER_DEVICE static ops::RowStatus status_of(const RowExtent& extent, ops::RowResult result,
                                                  bool of_logits) {
    using ops::RowStatus;
    if (of_logits) {
      if (extent.has_nan) return RowStatus::nan;
      if (result == ops::RowResult::logits) return RowStatus::ok;
      if (extent.highest == -INFINITY) return RowStatus::nothing;
      return extent.highest == INFINITY ? RowStatus::infinite : RowStatus::ok;
    }
    return status_of_weights(extent);
  }

  // The outputs of a row without a distribution are 0.
  template <class Unit>
  EFFINFER_DEVICE static void refuse(Unit& unit, const ops::RowSamplingProblem& p, int64_t row) {
    if (p.result == ops::RowResult::sample) {
      if (unit.thread != 0) return;
      p.set_sample(row, 0);
      if (p.undecided != nullptr) p.undecided[row] = 0;
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
    const double total = filters.total();
    const double point = point_of(uniform_of(p.random, row, 0), total);
    const double slack = filters.slack(total);
    const bool undecided = filters.undecided();
    const auto done = [&](int token, const Drawn& drawn) {
      p.set_sample(row, token);
      if (p.undecided == nullptr) return;
      // Nothing lies below the first token, where the point is 0.
      const bool near = (drawn.below <= slack && point > 0.0) || drawn.above <= slack;
      p.undecided[row] = undecided || near ? 1 : 0;
    };
    if (filters.listed()) {
      constexpr int kOwn = RowList::kPerThread;
      float weights[kOwn];
      const int first = block.unit().thread * kOwn;
      EFFINFER_UNROLL
      for (int i = 0; i < kOwn; ++i) {
        weights[i] = first + i < filters.list_size() ? shared.list.values[first + i] : 0.0f;
      }
      double sum = 0.0;
      const Drawn drawn = draw(block, weights, point, sum);
      if (drawn.here) done(shared.list.ids[first + drawn.which], drawn);
      return;
    }
    draw_in_row(
        block, passes.values(), shared.parts, point,
        [&](float x, int index) {
          return passes.weight(x, index, filters.values(), filters.weights());
        },
        done);
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
