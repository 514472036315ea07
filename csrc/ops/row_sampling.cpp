#include "effinfer/ops/row_sampling.h"

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "core/philox.h"
#include "ops/convert_rows.h"
#include "ops/registry.h"
#include "ops/row_sampling.h"
#include "ops/sampling_scratch.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

void check_floats(const Validator& check, std::string_view argument, DType dtype) {
  check.expect(is_row_type(dtype), argument, "float32, float16 or bfloat16", name(dtype));
}

void check_rows(const Validator& check, std::string_view argument, const TensorView& x) {
  check_floats(check, argument, x.dtype);
  check.rank(argument, x, 2);
  check.expect(x.dims[1] >= 1, argument, "at least one token", "shape " + x.dims.to_string());
  check.expect(x.dims[1] <= INT32_MAX, argument, "at most 2^31 - 1 tokens",
               "shape " + x.dims.to_string());
  check.data(argument, x);
}

// A scalar, [1] or [rows] of values that all pass; on a GPU a number of the host's, or [rows].
template <class T, class Passes>
PerRow<T> per_row(const Validator& check, std::string_view argument, const TensorView& view,
                  DType dtype, int64_t rows, T off, std::string_view expected, Passes passes) {
  if (view.data == nullptr) return {nullptr, off};
  const bool is_number = view.dims.rank() == 0 && view.device == Device{};
  if (!is_number) check.device(argument, view);
  check.expect(view.dtype == dtype, argument, "dtype " + std::string(name(dtype)),
               name(view.dtype));
  const int64_t count = view.dims.num_elements();
  const bool one = count == 1 && (is_number || check.reads_values());
  check.expect(is_number || (view.dims.rank() == 1 && (one || count == rows)) ||
                   (one && view.dims.rank() == 0),
               argument, "a scalar or shape [" + std::to_string(rows) + "]",
               "shape " + view.dims.to_string());
  const auto* values = static_cast<const T*>(view.data);
  if (view.device != Device{}) return {values, off};
  for (int64_t i = 0; i < count; ++i) {
    if (!passes(values[i])) check.expect(false, argument, expected, std::to_string(values[i]));
  }
  if (count == rows && view.dims.rank() == 1) return {values, off};
  return {nullptr, values[0]};
}

void set_top_k(const Validator& check, const TensorView& view, RowSamplingProblem& problem) {
  if (view.device == Device{} || view.dtype != DType::i32) {
    problem.top_k = per_row<int64_t>(check, "top_k", view, DType::i64, problem.rows, 0,
                                     "at least 1", [](int64_t k) { return k >= 1; });
    return;
  }
  check.dtype("top_k", view, DType::i32);
  check.shape("top_k", view, {problem.rows});
  problem.narrow_top_k = static_cast<const int32_t*>(view.data);
}

void set_filters(const Validator& check, const RowFilters& filters, RowSamplingProblem& problem) {
  const int64_t rows = problem.rows;
  problem.temperature =
      per_row<float>(check, "temperature", filters.temperature, DType::f32, rows, 1.0f,
                     "a positive number", [](float t) { return std::isfinite(t) && t > 0.0f; });
  set_top_k(check, filters.top_k, problem);
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

// The outputs of a problem: all rows, or those that are named.
template <class Problem>
void set_indices(const Validator& check, const TensorView& indices, Problem& problem) {
  if (indices.data == nullptr && indices.dims.rank() == 0) return;
  const bool narrow = indices.dtype == DType::i32 && !check.reads_values();
  check.dtype("indices", indices, narrow ? DType::i32 : DType::i64);
  check.rank("indices", indices, 1);
  const int64_t limit = problem.rows;
  problem.rows = indices.dims[0];
  if (narrow) {
    problem.narrow_indices = static_cast<const int32_t*>(indices.data);
    return;
  }
  problem.indices = static_cast<const int64_t*>(indices.data);
  for (int64_t i = 0; check.reads_values() && i < problem.rows; ++i) {
    if (problem.indices[i] >= 0 && problem.indices[i] < limit) continue;
    check.expect(false, indexed("indices", i), "a row in [0, " + std::to_string(limit) + ")",
                 std::to_string(problem.indices[i]));
  }
}

// The memory of a dense output.
void* output(const Validator& check, std::string_view argument, const StridedView& view,
             const Dims& dims, DType dtype) {
  check.shape(argument, view, dims);
  check.dtype(argument, view, dtype);
  int64_t stride = 1;
  for (int axis = dims.rank() - 1; axis >= 0 && dims.num_elements() > 0; --axis) {
    check.expect(dims[axis] == 1 || view.stride(axis) == stride, argument, "a C-contiguous array",
                 "strides");
    stride *= dims[axis];
  }
  return view.data;
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

void check_statuses(const Validator& check, std::string_view argument,
                    const std::vector<RowStatus>& statuses, const int64_t* indices) {
  for (size_t row = 0; row < statuses.size(); ++row) {
    const auto index = static_cast<int64_t>(row);
    check_status(check, argument, statuses[row], indices == nullptr ? index : indices[row]);
  }
}

// Runs the problem on the CPU; where rows are refused throws, unless `valid` is to say so.
void run_here(const Validator& check, std::string_view argument, RowSamplingProblem& problem,
              const Executor& executor) {
  std::vector<RowStatus> statuses(static_cast<size_t>(problem.rows));
  problem.statuses = statuses.data();
  run_alone(problem, executor);
  if (problem.valid == nullptr) {
    return check_statuses(check, argument, statuses, problem.indices);
  }
  for (size_t row = 0; row < statuses.size(); ++row) {
    problem.valid[row] = statuses[row] == RowStatus::ok ? 1 : 0;
  }
}

// Rows of a GPU as float32, which its kernels take, and back.
class RowsThere {
 public:
  explicit RowsThere(Queue& queue) : queue_(queue) {}

  const void* widened(const void* from, DType dtype, int64_t rows, int64_t cols) {
    if (dtype == DType::f32 || rows == 0) return from;
    void* to = scratch(rows * cols);
    convert(from, dtype, to, DType::f32, rows, cols);
    return to;
  }
  void* scratch(int64_t count) { return allocate(count * static_cast<int64_t>(sizeof(float))); }
  void* allocate(int64_t bytes) {
    held_.push_back(queue_.allocate(static_cast<size_t>(bytes)));
    return held_.back().get();
  }
  void convert(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t rows,
               int64_t cols) {
    ConvertRowsProblem problem;
    problem.from = from_dtype;
    problem.to = to_dtype;
    problem.x = {from, cols, 0};
    problem.out = {to, cols, 0};
    problem.rows = rows;
    problem.cols = cols;
    run_alone(problem, queue_);
  }

 private:
  Queue& queue_;
  std::vector<std::shared_ptr<void>> held_;
};

// `given`: rows of x. With `check_values` waits, and throws as run_here().
void run_there(const Validator& check, std::string_view argument, RowSamplingProblem& problem,
               int64_t given, Queue& queue, bool check_values) {
  if (problem.rows == 0) return;
  const bool top = problem.result == RowResult::top;
  const int64_t out_cols = top ? problem.top_k.value : problem.vocab;
  RowsThere rows(queue);
  problem.x = rows.widened(problem.x, problem.dtype, given, problem.vocab);
  problem.dtype = DType::f32;
  void* const out = problem.out;
  const DType out_dtype = problem.out_dtype;
  if (out != nullptr && out_dtype != DType::f32) {
    problem.out = rows.scratch(problem.rows * out_cols);
  }
  problem.out_dtype = DType::f32;
  const int64_t bytes = SamplingScratch::of(problem.vocab).bytes();
  if (problem.result == RowResult::sample && bytes > 0) {
    problem.scratch = rows.allocate(problem.rows * bytes);
  }
  std::shared_ptr<void> there;
  const auto count = static_cast<size_t>(problem.rows);
  if (check_values) {
    there = queue.allocate(count * sizeof(RowStatus));
    problem.statuses = static_cast<RowStatus*>(there.get());
  }
  run_alone(problem, queue);
  if (out != problem.out) {
    rows.convert(problem.out, DType::f32, out, out_dtype, problem.rows, out_cols);
  }
  if (!check_values) return;
  std::vector<RowStatus> statuses(count);
  queue.download(statuses.data(), there.get(), count * sizeof(RowStatus));
  queue.wait();
  check_statuses(check, argument, statuses, nullptr);
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
                 const TensorView& indices, const RowSeeds& seeds, const StridedView& samples,
                 const StridedView& valid, const Executor& executor, bool check_values) {
  const Validator check(op, executor.device());
  RowSamplingProblem problem = problem_of(check, kind, x);
  problem.result = RowResult::sample;
  set_indices(check, indices, problem);
  set_filters(check, filters, problem);
  problem.random = random_of(check, seeds, problem.rows);
  const bool wide = samples.dtype == DType::i64;
  void* tokens = output(check, "samples", samples, {problem.rows}, wide ? DType::i64 : DType::i32);
  if (wide) {
    problem.wide_samples = static_cast<int64_t*>(tokens);
  } else {
    problem.samples = static_cast<int32_t*>(tokens);
  }
  if (valid.dims.rank() > 0) {
    problem.valid = static_cast<uint8_t*>(output(check, "valid", valid, {problem.rows}, DType::u8));
  }
  Queue* const queue = executor.queue();
  if (queue == nullptr) return run_here(check, argument_name(kind), problem, executor);
  run_there(check, argument_name(kind), problem, x.dims[0], *queue, check_values);
}

void filter_rows(std::string_view op, RowKind kind, const TensorView& x, const RowFilters& filters,
                 RowKind out_kind, const StridedView& out, const Executor& executor) {
  const Validator check(op, executor.device());
  RowSamplingProblem problem = problem_of(check, kind, x);
  problem.result = out_kind == RowKind::logits ? RowResult::logits : RowResult::weights;
  const bool possible =
      out_kind == RowKind::probs ||
      (kind == RowKind::logits && filters.top_p.data == nullptr && filters.min_p.data == nullptr);
  check.expect(possible, argument_name(kind), "no filter but top-k for a result of logits",
               "others");
  set_filters(check, filters, problem);
  check_floats(check, "out", out.dtype);
  problem.out = output(check, "out", out, x.dims, out.dtype);
  problem.out_dtype = out.dtype;
  Queue* const queue = executor.queue();
  if (queue == nullptr) return run_here(check, argument_name(kind), problem, executor);
  run_there(check, argument_name(kind), problem, problem.rows, *queue, false);
}

void top_k(std::string_view op, const TensorView& x, int64_t k, bool sorted,
           const StridedView& values, const StridedView& ids, const Executor& executor) {
  const Validator check(op, executor.device());
  check_rows(check, "input", x);
  RowSamplingProblem problem = problem_of(check, RowKind::logits, x);
  check.expect(k >= 1 && k <= problem.vocab, "k",
               "a number in [1, " + std::to_string(problem.vocab) + "]", std::to_string(k));
  problem.result = RowResult::top;
  problem.top_k = {nullptr, k};
  problem.sorted = sorted;
  problem.out = output(check, "values", values, {problem.rows, k}, x.dtype);
  problem.out_dtype = x.dtype;
  problem.ids = static_cast<int64_t*>(output(check, "ids", ids, {problem.rows, k}, DType::i64));
  Queue* const queue = executor.queue();
  if (queue == nullptr) return run_here(check, "input", problem, executor);
  run_there(check, "input", problem, problem.rows, *queue, false);
}

void chain_speculative_sampling(const TensorView& draft_probs, const TensorView& draft_ids,
                                const TensorView& target_probs, const RowSeeds& seeds,
                                const StridedView& tokens, const StridedView& accepted,
                                const StridedView& emitted, const Executor& executor) {
  const Validator check("chain_speculative_sampling", executor.device());
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
  for (int64_t i = 0; check.reads_values() && i < problem.rows * problem.drafts; ++i) {
    const int32_t id = problem.draft_ids[i];
    if (id >= 0 && id < problem.vocab) continue;
    check.expect(false, "draft_token_ids", "ids in [0, " + std::to_string(problem.vocab) + ")",
                 std::to_string(id));
  }
  problem.random = random_of(check, seeds, problem.rows);
  const auto ints = [&](std::string_view argument, const StridedView& view, const Dims& dims) {
    return static_cast<int32_t*>(output(check, argument, view, dims, DType::i32));
  };
  problem.tokens = ints("tokens", tokens, {problem.rows, problem.drafts + 1});
  problem.accepted = ints("accepted", accepted, {problem.rows});
  problem.emitted = ints("emitted", emitted, {problem.rows});
  if (problem.rows == 0) return;
  if (executor.queue() != nullptr) return run_alone(problem, executor);
  std::vector<RowStatus> statuses(static_cast<size_t>(problem.rows));
  problem.statuses = statuses.data();
  run_alone(problem, executor);
  check_statuses(check, "target_probs", statuses, nullptr);
}

void apply_token_bitmask(const StridedView& logits, const TensorView& bitmask,
                         const TensorView& indices, const Executor& executor) {
  const Validator check("apply_token_bitmask", executor.device());
  TensorView rows;
  rows.data = logits.data;
  rows.dtype = logits.dtype;
  rows.dims = logits.dims;
  rows.device = logits.device;
  check_rows(check, "logits", rows);
  TokenBitmaskProblem problem;
  problem.logits = output(check, "logits", logits, logits.dims, logits.dtype);
  problem.dtype = logits.dtype;
  problem.vocab = logits.dims[1];
  problem.rows = logits.dims[0];
  const int64_t words = (problem.vocab + 31) / 32;
  check.dtype("bitmask", bitmask, DType::i32);
  check.shape("bitmask", bitmask, {problem.rows, words});
  problem.bitmask = static_cast<const int32_t*>(bitmask.data);
  set_indices(check, indices, problem);
  // Bits past the vocabulary do not count.
  const uint32_t last = problem.vocab % 32 == 0 ? ~0u : (1u << problem.vocab % 32) - 1;
  for (int64_t i = 0; check.reads_values() && i < problem.rows; ++i) {
    const int64_t row = problem.row_of(i);
    const int32_t* mask = problem.bitmask + row * words;
    bool any = (static_cast<uint32_t>(mask[words - 1]) & last) != 0;
    for (int64_t word = 0; word < words - 1 && !any; ++word) any = mask[word] != 0;
    check.expect(any, "bitmask", "an allowed token in each row",
                 "none in row " + std::to_string(row));
  }
  if (problem.rows > 0) run_alone(problem, executor);
}

}  // namespace effinfer::ops
