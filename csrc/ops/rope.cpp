#include "effinfer/ops/rope.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <numbers>
#include <optional>

#include "ops/describe.h"
#include "ops/int32_operand.h"
#include "ops/rope.h"
#include "ops/row_layout.h"
#include "ops/run_rows.h"

namespace effinfer::ops {
namespace {

// theta^(2i / dims) rounded once from double: what a float32 pow aims at.
float position_period(const RopeParameters& p, int32_t i) {
  const float exponent = static_cast<float>(2 * i) / static_cast<float>(p.dims);
  return static_cast<float>(std::pow(static_cast<double>(p.theta), static_cast<double>(exponent)));
}

// The reference divides a number by a tensor, which torch computes as reciprocal times number; the
// ramp subtracts nearly equal numbers, so the same roundings matter.
float llama3(const RopeParameters& p, float inv_freq) {
  const float wavelength = 1.0f / inv_freq * (2.0f * std::numbers::pi_v<float>);
  if (wavelength < p.original_max_position / p.high_freq_factor) return inv_freq;
  if (wavelength > p.original_max_position / p.low_freq_factor) return inv_freq / p.factor;
  const float smooth = (1.0f / wavelength * p.original_max_position - p.low_freq_factor) /
                       (p.high_freq_factor - p.low_freq_factor);
  return (1.0f - smooth) * inv_freq / p.factor + smooth * inv_freq;
}

// The (fractional) pair of dimensions that turns `rotations` times within the original context.
double correction_dim(const RopeParameters& p, double rotations) {
  return p.dims *
         std::log(static_cast<double>(p.original_max_position) /
                  (rotations * 2.0 * std::numbers::pi)) /
         (2.0 * std::log(static_cast<double>(p.theta)));
}

void yarn(const RopeParameters& p, float* inv_freq) {
  const double low = std::max(std::floor(correction_dim(p, p.beta_fast)), 0.0);
  double high = std::min(std::ceil(correction_dim(p, p.beta_slow)), p.dims - 1.0);
  if (low == high) high += 0.001;
  const float width = static_cast<float>(high - low);
  for (int32_t i = 0; i < p.dims / 2; ++i) {
    const float ramp = (static_cast<float>(i) - static_cast<float>(low)) / width;
    const float keep = 1.0f - std::clamp(ramp, 0.0f, 1.0f);
    const float period = position_period(p, i);
    inv_freq[i] = 1.0f / (p.factor * period) * (1.0f - keep) + 1.0f / period * keep;
  }
}

float yarn_attention_factor(const RopeParameters& p) {
  if (p.attention_factor != 0.0f) return p.attention_factor;
  if (p.factor <= 1.0f) return 1.0f;
  return static_cast<float>(0.1 * std::log(static_cast<double>(p.factor)) + 1.0);
}

}  // namespace

float rope_inv_freq(const RopeParameters& parameters, const float* divisors, float* inv_freq) {
  const int32_t half = parameters.dims / 2;
  for (int32_t i = 0; i < half; ++i) inv_freq[i] = 1.0f / position_period(parameters, i);
  float factor = 1.0f;
  switch (parameters.scaling) {
    case RopeScaling::none:
      break;
    case RopeScaling::linear:
      for (int32_t i = 0; i < half; ++i) inv_freq[i] /= parameters.factor;
      break;
    case RopeScaling::llama3:
      for (int32_t i = 0; i < half; ++i) inv_freq[i] = llama3(parameters, inv_freq[i]);
      break;
    case RopeScaling::yarn:
      yarn(parameters, inv_freq);
      factor = yarn_attention_factor(parameters);
      break;
  }
  if (divisors != nullptr) {
    for (int32_t i = 0; i < half; ++i) inv_freq[i] /= divisors[i];
  }
  return factor;
}

std::string describe(const RopeTableProblem& problem) {
  return "[rope_table]" + field("rows", problem.rows) + field("dims", problem.dims) +
         (problem.map.period > 0 ? field("period", problem.map.period) : "");
}

std::string describe(const RopeProblem& problem) {
  return "[rope]" + field("rows", problem.rows) + field("heads", problem.heads) +
         field("head_dim", problem.head_dim) + field("dims", problem.dims) +
         (problem.interleaved ? " interleaved" : "");
}

const char* rejects(const RopeTableProblem& problem) {
  return problem.dims % 2 == 0 ? nullptr : "dims must be even";
}

const char* rejects(const RopeProblem& problem) {
  if (!is_row_type(problem.dtype)) return "rows must be f32, f16 or bf16";
  if (problem.dims % 2 != 0) return "dims must be even";
  return problem.dims <= problem.head_dim ? nullptr : "dims must be at most head_dim";
}

Cost cost(const RopeTableProblem& problem) {
  return {problem.rows * (4 + problem.dims * 4) + problem.dims * 2, problem.rows * problem.dims};
}

Cost cost(const RopeProblem& problem) {
  const int64_t size = problem.rows * problem.heads * problem.head_dim;
  const int64_t rotated = problem.rows * problem.heads * problem.dims;
  const int64_t element = dtype_info(problem.dtype).block_bytes;
  return {size * 2 * element + problem.rows * problem.dims * 4, rotated * 3};
}

}  // namespace effinfer::ops

namespace effinfer {
namespace {

constexpr std::array<std::string_view, 4> kScalings = {"none", "linear", "llama3", "yarn"};

void validate(const ops::Validator& check, const RopeParameters& p) {
  const auto positive = [&](std::string_view argument, float value) {
    check.expect(std::isfinite(value) && value > 0.0f, argument, "a positive number",
                 std::to_string(value));
  };
  check.expect(p.dims >= 2 && p.dims % 2 == 0, "dims", "a positive even number",
               std::to_string(p.dims));
  positive("theta", p.theta);
  if (p.scaling == RopeScaling::none) return;
  positive("factor", p.factor);
  if (p.scaling == RopeScaling::linear) return;
  positive("original_max_position", p.original_max_position);
  if (p.scaling == RopeScaling::llama3) {
    positive("low_freq_factor", p.low_freq_factor);
    check.expect(std::isfinite(p.high_freq_factor) && p.high_freq_factor > p.low_freq_factor,
                 "high_freq_factor", "more than low_freq_factor",
                 std::to_string(p.high_freq_factor));
  } else {
    check.expect(p.theta != 1.0f, "theta", "another number than 1", "1");
    positive("beta_fast", p.beta_fast);
    positive("beta_slow", p.beta_slow);
    check.expect(std::isfinite(p.attention_factor) && p.attention_factor >= 0.0f,
                 "attention_factor", "a number >= 0", std::to_string(p.attention_factor));
  }
}

}  // namespace

RopeScaling parse_rope_scaling(std::string_view text) {
  for (size_t i = 0; i < kScalings.size(); ++i) {
    if (kScalings[i] == text) return static_cast<RopeScaling>(i);
  }
  throw InvalidArgument("[rope] scaling: expected none, linear, llama3 or yarn, got \"" +
                        std::string(text) + "\"");
}

ops::RopeFrequencies ops::rope_frequencies(const RopeParameters& parameters,
                                           const TensorView& divisors) {
  const Validator check("rope_frequencies");
  validate(check, parameters);
  RopeFrequencies frequencies;
  frequencies.inv_freq.resize(static_cast<size_t>(parameters.dims / 2));
  if (divisors.data != nullptr) {
    check.dtype("divisors", divisors, DType::f32);
    check.shape("divisors", divisors, {parameters.dims / 2});
  }
  frequencies.factor = rope_inv_freq(parameters, static_cast<const float*>(divisors.data),
                                     frequencies.inv_freq.data());
  return frequencies;
}

void ops::rope_table(const TensorView& positions, const RopeFrequencies& frequencies, float* out,
                     const Executor& executor) {
  const Validator check("rope_table", executor.device());
  const Int32Operand rows(check, "positions", positions, INT32_MIN, INT32_MAX, executor);
  const auto half = static_cast<int64_t>(frequencies.inv_freq.size());
  check.data("out", out, {positions.dims[0], 2, half});
  RopeTableProblem problem;
  problem.positions = rows.data();
  problem.rows = positions.dims[0];
  problem.dims = static_cast<int32_t>(2 * half);
  problem.inv_freq = frequencies.inv_freq.data();
  problem.factor = frequencies.factor;
  problem.out = out;
  if (Queue* const queue = executor.queue()) {
    const size_t bytes = frequencies.inv_freq.size() * sizeof(float);
    const std::shared_ptr<void> there = queue->allocate(bytes);
    queue->upload(there.get(), frequencies.inv_freq.data(), bytes);
    problem.inv_freq = static_cast<const float*>(there.get());
    return run_alone(problem, executor);
  }
  // Cosines and sines in double precision take 20 ns each.
  run_alone(problem, pool_for(problem.rows * problem.dims * 20, *executor.pool()));
}

void ops::rope_positions(const TensorView& indptr, const TensorView& offsets, int64_t rows,
                         int32_t* out) {
  const Validator check("apply_rope");
  const Int32Values starts(check, "indptr", indptr, 0, INT32_MAX);
  const Int32Values first(check, "offsets", offsets, INT32_MIN, INT32_MAX);
  check.indptr_of_rows("indptr", starts.data(), indptr.dims[0], rows);
  check.shape("offsets", offsets, {indptr.dims[0] - 1});
  for (int64_t s = 0; s < offsets.dims[0]; ++s) {
    const int64_t count = starts.data()[s + 1] - int64_t{starts.data()[s]};
    check.expect(first.data()[s] + count <= INT32_MAX, "offsets", "positions within int32",
                 std::to_string(first.data()[s]));
    for (int64_t i = 0; i < count; ++i) *out++ = static_cast<int32_t>(first.data()[s] + i);
  }
}

void ops::apply_rope(const StridedView& q, const StridedView& k, const TensorView& cos_sin_cache,
                     const TensorView& positions, bool interleaved, const StridedView& q_out,
                     const StridedView& k_out, const Executor& executor) {
  const Validator check("apply_rope", executor.device());
  const Dims& table = cos_sin_cache.dims;
  check.dtype("cos_sin_cache", cos_sin_cache, DType::f32);
  check.expect(table.rank() == 2 && table[1] % 2 == 0, "cos_sin_cache",
               "shape [positions, an even number]", table.to_string());
  const bool listed = positions.dims.rank() > 0;
  std::optional<Int32Operand> entries;
  if (listed) entries.emplace(check, "positions", positions, 0, table[0] - 1, executor);
  const auto problem_of = [&](const char* argument, const StridedView& x, const char* out_argument,
                              const StridedView& out) {
    check_rows(check, argument, x);
    check.expect(x.dims.rank() == 3, argument, "3 dimensions", "shape " + x.dims.to_string());
    check.expect(table[1] <= x.dims[2], "cos_sin_cache",
                 "at most " + std::to_string(x.dims[2]) + " rotated dimensions", table.to_string());
    check.expect(x.dims[0] == (listed ? positions.dims[0] : table[0]), argument,
                 std::to_string(listed ? positions.dims[0] : table[0]) + " rows",
                 "shape " + x.dims.to_string());
    check_written_rows(check, out_argument, out, x.dtype, x.dims);
    RopeProblem problem;
    problem.dtype = x.dtype;
    problem.x = {x.data, x.stride(0), x.stride(1)};
    problem.rows = x.dims[0];
    problem.heads = static_cast<int32_t>(x.dims[1]);
    problem.head_dim = static_cast<int32_t>(x.dims[2]);
    problem.dims = static_cast<int32_t>(table[1]);
    problem.interleaved = interleaved;
    problem.cos_sin = static_cast<const float*>(cos_sin_cache.data);
    problem.positions = listed ? entries->data() : nullptr;
    problem.out = {out.data, out.stride(0), out.stride(1)};
    return problem;
  };
  const RopeProblem of_q = problem_of("q", q, "q_out", q_out);
  const RopeProblem of_k = problem_of("k", k, "k_out", k_out);
  run_rows(of_q, executor);
  run_rows(of_k, executor);
}

void ops::apply_rope(const StridedView& q, const StridedView& k, const RopeFrequencies& frequencies,
                     const TensorView& positions, bool interleaved, const StridedView& q_out,
                     const StridedView& k_out, const Executor& executor) {
  const Validator check("apply_rope", executor.device());
  check.rank("positions", positions, 1);
  const Dims dims = {positions.dims[0], 2 * static_cast<int64_t>(frequencies.inv_freq.size())};
  const auto size = static_cast<size_t>(dims.num_elements());
  Queue* const queue = executor.queue();
  std::shared_ptr<void> there;
  std::vector<float> here;
  if (queue != nullptr) {
    there = queue->allocate(size * sizeof(float));
  } else {
    here.resize(size);
  }
  auto* const table = queue != nullptr ? static_cast<float*>(there.get()) : here.data();
  rope_table(positions, frequencies, table, executor);
  apply_rope(q, k, {table, DType::f32, dims, executor.device()}, {}, interleaved, q_out, k_out,
             executor);
}

}  // namespace effinfer
