#include "effinfer/ops/rope.h"

#include <array>
#include <cmath>

#include "kernels/elementwise.h"
#include "kernels/registry.h"
#include "ops/validate.h"

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
  frequencies.factor = kernels::rope_inv_freq(parameters, static_cast<const float*>(divisors.data),
                                              frequencies.inv_freq.data());
  return frequencies;
}

void ops::rope_table(const TensorView& positions, const RopeFrequencies& frequencies, float* out,
                     ThreadPool& pool) {
  const Validator check("rope_table");
  check.dtype("positions", positions, DType::i32);
  check.rank("positions", positions, 1);
  const auto half = static_cast<int64_t>(frequencies.inv_freq.size());
  check.data("out", out, {positions.dims[0], 2, half});
  kernels::RopeTableProblem problem;
  problem.positions = static_cast<const int32_t*>(positions.data);
  problem.rows = positions.dims[0];
  problem.dims = static_cast<int32_t>(2 * half);
  problem.inv_freq = frequencies.inv_freq.data();
  problem.factor = frequencies.factor;
  problem.out = out;
  kernels::run_alone(problem, pool);
}

void ops::rope(const TensorView& x, const TensorView& table, bool interleaved, float* out,
               ThreadPool& pool) {
  const Validator check("rope");
  check.dtype("x", x, DType::f32);
  check.rank("x", x, 3);
  check.dtype("table", table, DType::f32);
  const Dims& angles = table.dims;
  const bool matches =
      angles.rank() == 3 && angles[0] == x.dims[0] && angles[1] == 2 && 2 * angles[2] <= x.dims[2];
  check.expect(
      matches, "table",
      "shape [" + std::to_string(x.dims[0]) + ", 2, at most " + std::to_string(x.dims[2] / 2) + "]",
      angles.to_string());
  check.data("out", out, x.dims);
  kernels::RopeProblem problem;
  problem.x = static_cast<const float*>(x.data);
  problem.rows = x.dims[0];
  problem.heads = static_cast<int32_t>(x.dims[1]);
  problem.head_dim = static_cast<int32_t>(x.dims[2]);
  problem.x_stride = x.dims[1] * x.dims[2];
  problem.dims = static_cast<int32_t>(2 * angles[2]);
  problem.interleaved = interleaved;
  problem.cos_sin = static_cast<const float*>(table.data);
  problem.out = out;
  kernels::run_alone(problem, pool);
}

}  // namespace effinfer
