#include "effinfer/ops/row_sampling.h"

#include <cmath>
#include <string>
#include <vector>

#include "core/philox.h"
#include "ops/registry.h"
#include "ops/row_sampling.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

void check_floats(const Validator& check, std::string_view argument, const TensorView& x) {
  check.expect(is_row_type(x.dtype), argument, "float32, float16 or bfloat16", name(x.dtype));
}

void check_rows(const Validator& check, std::string_view argument, const TensorView& x) {
  check_floats(check, argument, x);
  check.rank(argument, x, 2);
  check.expect(x.dims[1] >= 1, argument, "at least one token", "shape " + x.dims.to_string());
  check.expect(x.dims[1] <= INT32_MAX, argument, "at most 2^31 - 1 tokens",
               "shape " + x.dims.to_string());
  check.data(argument, x);
}

// A scalar, [1] or [rows] of values that all pass.
template <class T, class Passes>
PerRow<T> per_row(const Validator& check, std::string_view argument, const TensorView& view,
                  DType dtype, int64_t rows, T off, std::string_view expected, Passes passes) {
  if (view.data == nullptr) return {nullptr, off};
  check.dtype(argument, view, dtype);
  const int64_t count = view.dims.num_elements();
  check.expect(view.dims.rank() == 0 || (view.dims.rank() == 1 && (count == 1 || count == rows)),
               argument, "a scalar or shape [" + std::to_string(rows) + "]",
               "shape " + view.dims.to_string());
  const auto* values = static_cast<const T*>(view.data);
  for (int64_t i = 0; i < count; ++i) {
    if (!passes(values[i])) check.expect(false, argument, expected, std::to_string(values[i]));
  }
  if (count == rows && view.dims.rank() == 1) return {values, off};
  return {nullptr, values[0]};
}

void set_filters(const Validator& check, const RowFilters& filters, RowSamplingProblem& problem) {
  const int64_t rows = problem.rows;
  problem.temperature =
      per_row<float>(check, "temperature", filters.temperature, DType::f32, rows, 1.0f,
                     "a positive number", [](float t) { return std::isfinite(t) && t > 0.0f; });
  problem.top_k = per_row<int64_t>(check, "top_k", filters.top_k, DType::i64, rows, 0, "at least 1",
                                   [](int64_t k) { return k >= 1; });
  problem.top_p = per_row<float>(check, "top_p", filters.top_p, DType::f32, rows, 1.0f,
                                 "a number in (0, 1]", [](float p) { return p > 0 && p <= 1; });
  problem.min_p = per_row<float>(check, "min_p", filters.min_p, DType::f32, rows, 0.0f,
                                 "a number in [0, 1]", [](float p) { return p >= 0 && p <= 1; });
  problem.joint = filters.joint;
}

// Seeds are unsigned in the generator: the bits count.
RowRandom random_of(const Validator& check, const RowSeeds& seeds, int64_t rows) {
  const auto any = [](int64_t) { return true; };
  const auto unsigned_of = [](const PerRow<int64_t>& from) -> PerRow<uint64_t> {
    return {reinterpret_cast<const uint64_t*>(from.values), static_cast<uint64_t>(from.value)};
  };
  return {
      unsigned_of(per_row<int64_t>(check, "seed", seeds.seed, DType::i64, rows, 0, "", any)),
      unsigned_of(per_row<int64_t>(check, "offset", seeds.offset, DType::i64, rows, 0, "", any))};
}

const int64_t* indices_of(const Validator& check, const TensorView& indices, int64_t limit) {
  if (indices.data == nullptr) return nullptr;
  check.dtype("indices", indices, DType::i64);
  check.rank("indices", indices, 1);
  const auto* values = static_cast<const int64_t*>(indices.data);
  for (int64_t i = 0; i < indices.dims[0]; ++i) {
    if (values[i] >= 0 && values[i] < limit) continue;
    check.expect(false, indexed("indices", i), "a row in [0, " + std::to_string(limit) + ")",
                 std::to_string(values[i]));
  }
  return values;
}

std::string_view argument_name(RowKind kind) {
  return kind == RowKind::logits ? "logits" : "probs";
}

RowSamplingProblem problem_of(const Validator& check, RowKind kind, const TensorView& x) {
  check_rows(check, argument_name(kind), x);
  RowSamplingProblem problem;
  problem.source = kind == RowKind::logits ? RowSource::logits : RowSource::weights;
  problem.x = x.data;
  problem.dtype = x.dtype;
  problem.rows = x.dims[0];
  problem.vocab = x.dims[1];
  return problem;
}

void check_status(const Validator& check, std::string_view argument, RowStatus status,
                  int64_t row) {
  const std::string place = " in row " + std::to_string(row);
  const bool logits = argument == "logits";
  switch (status) {
    case RowStatus::ok:
      return;
    case RowStatus::nan:
      return check.expect(false, argument, "numbers", "NaN" + place);
    case RowStatus::infinite:
      return check.expect(false, argument, logits ? "a finite maximum" : "a finite sum",
                          "infinity" + place);
    case RowStatus::nothing:
      return check.expect(false, argument, logits ? "a finite maximum" : "a positive sum",
                          (logits ? "nothing above -infinity" : "0") + place);
    case RowStatus::negative:
      return check.expect(false, argument, "no negative values", "one" + place);
  }
}

// Runs the problem; where rows are refused throws, unless `valid` is to say so.
void run(const Validator& check, std::string_view argument, RowSamplingProblem& problem,
         uint8_t* valid, ThreadPool& pool) {
  std::vector<RowStatus> statuses(static_cast<size_t>(problem.rows));
  problem.statuses = statuses.data();
  run_alone(problem, pool);
  for (size_t row = 0; row < statuses.size(); ++row) {
    if (valid != nullptr) {
      valid[row] = statuses[row] == RowStatus::ok ? 1 : 0;
    } else {
      const auto index = static_cast<int64_t>(row);
      check_status(check, argument, statuses[row],
                   problem.indices == nullptr ? index : problem.indices[row]);
    }
  }
}

}  // namespace

double RowRandom::uniform(int64_t row, uint32_t draw) const {
  const uint32_t place = seed.values == nullptr ? static_cast<uint32_t>(row) : 0;
  return philox_uniform(seed[row], offset[row], place, draw);
}

std::string describe(const RowSamplingProblem& problem) {
  return "[row_sampling] rows=" + std::to_string(problem.rows) +
         " vocab=" + std::to_string(problem.vocab) + " dtype=" + std::string(name(problem.dtype));
}

std::string describe(const ChainSpeculationProblem& problem) {
  return "[chain_speculative_sampling] rows=" + std::to_string(problem.rows) +
         " drafts=" + std::to_string(problem.drafts) + " vocab=" + std::to_string(problem.vocab);
}

std::string describe(const TokenBitmaskProblem& problem) {
  return "[apply_token_bitmask] rows=" + std::to_string(problem.rows) +
         " vocab=" + std::to_string(problem.vocab) + " dtype=" + std::string(name(problem.dtype));
}

const char* rejects(const RowSamplingProblem& problem) {
  const bool known = is_row_type(problem.dtype) && is_row_type(problem.out_dtype);
  return known ? nullptr : "rows must be f32, f16 or bf16";
}

const char* rejects(const TokenBitmaskProblem& problem) {
  return is_row_type(problem.dtype) ? nullptr : "rows must be f32, f16 or bf16";
}

void sample_rows(std::string_view op, RowKind kind, const TensorView& x, const RowFilters& filters,
                 const TensorView& indices, const RowSeeds& seeds, int32_t* samples, uint8_t* valid,
                 ThreadPool& pool) {
  const Validator check(op);
  RowSamplingProblem problem = problem_of(check, kind, x);
  problem.result = RowResult::sample;
  problem.indices = indices_of(check, indices, problem.rows);
  if (problem.indices != nullptr) problem.rows = indices.dims[0];
  set_filters(check, filters, problem);
  problem.random = random_of(check, seeds, problem.rows);
  problem.samples = samples;
  run(check, argument_name(kind), problem, valid, pool);
}

void filter_rows(std::string_view op, RowKind kind, const TensorView& x, const RowFilters& filters,
                 RowKind out_kind, DType out_dtype, void* out, ThreadPool& pool) {
  const Validator check(op);
  RowSamplingProblem problem = problem_of(check, kind, x);
  problem.result = out_kind == RowKind::logits ? RowResult::logits : RowResult::weights;
  const bool possible =
      out_kind == RowKind::probs ||
      (kind == RowKind::logits && filters.top_p.data == nullptr && filters.min_p.data == nullptr);
  check.expect(possible, argument_name(kind), "no filter but top-k for a result of logits",
               "others");
  set_filters(check, filters, problem);
  problem.out = out;
  problem.out_dtype = out_dtype;
  run(check, argument_name(kind), problem, nullptr, pool);
}

void top_k(std::string_view op, const TensorView& x, int64_t k, bool sorted, void* values,
           int64_t* ids, ThreadPool& pool) {
  const Validator check(op);
  check_rows(check, "input", x);
  RowSamplingProblem problem = problem_of(check, RowKind::logits, x);
  check.expect(k >= 1 && k <= problem.vocab, "k",
               "a number in [1, " + std::to_string(problem.vocab) + "]", std::to_string(k));
  problem.result = RowResult::top;
  problem.top_k = {nullptr, k};
  problem.sorted = sorted;
  problem.out = values;
  problem.out_dtype = x.dtype;
  problem.ids = ids;
  run(check, "input", problem, nullptr, pool);
}

void chain_speculative_sampling(const TensorView& draft_probs, const TensorView& draft_ids,
                                const TensorView& target_probs, const RowSeeds& seeds,
                                int32_t* tokens, int32_t* accepted, int32_t* emitted,
                                ThreadPool& pool) {
  const Validator check("chain_speculative_sampling");
  check.rank("draft_probs", draft_probs, 3);
  check.dtype("draft_probs", draft_probs, DType::f32);
  ChainSpeculationProblem problem;
  problem.rows = draft_probs.dims[0];
  problem.drafts = draft_probs.dims[1];
  problem.vocab = draft_probs.dims[2];
  check.expect(problem.vocab >= 1 && problem.vocab <= INT32_MAX, "draft_probs",
               "at least one token", "shape " + draft_probs.dims.to_string());
  check.dtype("draft_token_ids", draft_ids, DType::i32);
  check.shape("draft_token_ids", draft_ids, {problem.rows, problem.drafts});
  check.dtype("target_probs", target_probs, DType::f32);
  check.shape("target_probs", target_probs, {problem.rows, problem.drafts + 1, problem.vocab});
  problem.draft_probs = static_cast<const float*>(draft_probs.data);
  problem.draft_ids = static_cast<const int32_t*>(draft_ids.data);
  problem.target_probs = static_cast<const float*>(target_probs.data);
  for (int64_t i = 0; i < problem.rows * problem.drafts; ++i) {
    const int32_t id = problem.draft_ids[i];
    if (id >= 0 && id < problem.vocab) continue;
    check.expect(false, "draft_token_ids", "ids in [0, " + std::to_string(problem.vocab) + ")",
                 std::to_string(id));
  }
  problem.random = random_of(check, seeds, problem.rows);
  problem.tokens = tokens;
  problem.accepted = accepted;
  problem.emitted = emitted;
  std::vector<RowStatus> statuses(static_cast<size_t>(problem.rows));
  problem.statuses = statuses.data();
  run_alone(problem, pool);
  for (size_t row = 0; row < statuses.size(); ++row) {
    check_status(check, "target_probs", statuses[row], static_cast<int64_t>(row));
  }
}

void apply_token_bitmask(const TensorView& logits, void* data, const TensorView& bitmask,
                         const TensorView& indices, ThreadPool& pool) {
  const Validator check("apply_token_bitmask");
  check_rows(check, "logits", logits);
  TokenBitmaskProblem problem;
  problem.logits = data;
  problem.dtype = logits.dtype;
  problem.vocab = logits.dims[1];
  problem.rows = logits.dims[0];
  const int64_t words = (problem.vocab + 31) / 32;
  check.dtype("bitmask", bitmask, DType::i32);
  check.shape("bitmask", bitmask, {problem.rows, words});
  problem.bitmask = static_cast<const int32_t*>(bitmask.data);
  problem.indices = indices_of(check, indices, problem.rows);
  if (problem.indices != nullptr) problem.rows = indices.dims[0];
  // Bits past the vocabulary do not count.
  const uint32_t last = problem.vocab % 32 == 0 ? ~0u : (1u << problem.vocab % 32) - 1;
  for (int64_t i = 0; i < problem.rows; ++i) {
    const int64_t row = problem.indices == nullptr ? i : problem.indices[i];
    const int32_t* mask = problem.bitmask + row * words;
    bool any = (static_cast<uint32_t>(mask[words - 1]) & last) != 0;
    for (int64_t word = 0; word < words - 1 && !any; ++word) any = mask[word] != 0;
    check.expect(any, "bitmask", "an allowed token in each row",
                 "none in row " + std::to_string(row));
  }
  run_alone(problem, pool);
}

}  // namespace effinfer::ops
