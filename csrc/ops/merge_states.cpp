#include "effinfer/ops/merge_states.h"

#include <vector>

#include "ops/merge_states.h"
#include "ops/registry.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

void check_vectors(const Validator& check, std::string_view argument, const TensorView& v,
                   int rank) {
  check.row_type(argument, v.dtype);
  check.rank(argument, v, rank);
  check.data(argument, v);
}

void check_sums(const Validator& check, std::string_view argument, const TensorView& s,
                const Dims& expected) {
  check.dtype(argument, s, DType::f32);
  check.shape(argument, s, expected);
}

void run(MergeStatesProblem& problem, const std::vector<const void*>& v,
         const std::vector<const float*>& s, LseBase base, const Executor& executor) {
  problem.v = v.data();
  problem.s = s.data();
  problem.num_states = static_cast<int64_t>(v.size());
  problem.natural = base == LseBase::e;
  if (problem.tokens * problem.heads > 0) run_alone(problem, executor);
}

}  // namespace

std::string describe(const MergeStatesProblem& problem) {
  return "[merge_states] num_states=" + std::to_string(problem.num_states) +
         " tokens=" + std::to_string(problem.tokens) + " heads=" + std::to_string(problem.heads) +
         " head_dim=" + std::to_string(problem.head_dim) +
         " dtype=" + std::string(name(problem.dtype));
}

const char* rejects(const MergeStatesProblem& problem) {
  return is_row_type(problem.dtype) ? nullptr : "v must be f32, f16 or bf16";
}

size_t scratch_bytes(const MergeStatesProblem& problem) {
  return static_cast<size_t>(problem.num_states) * sizeof(float);
}

void merge_states(const TensorView& v, const TensorView& s, LseBase base, void* out_v, float* out_s,
                  const Executor& executor) {
  const Validator check("merge_states", executor.device());
  check_vectors(check, "v", v, 4);
  const int64_t tokens = v.dims[0], states = v.dims[1], heads = v.dims[2], head_dim = v.dims[3];
  check_sums(check, "s", s, {tokens, states, heads});
  MergeStatesProblem problem;
  problem.tokens = tokens;
  problem.heads = heads;
  problem.head_dim = head_dim;
  problem.v_stride = states * heads * head_dim;
  problem.s_stride = states * heads;
  problem.dtype = v.dtype;
  problem.out_v = out_v;
  problem.out_s = out_s;
  std::vector<const void*> vectors;
  std::vector<const float*> sums;
  const auto element = static_cast<int64_t>(dtype_info(v.dtype).block_bytes);
  for (int64_t i = 0; i < states; ++i) {
    vectors.push_back(static_cast<const char*>(v.data) + i * heads * head_dim * element);
    sums.push_back(static_cast<const float*>(s.data) + i * heads);
  }
  run(problem, vectors, sums, base, executor);
}

void merge_state(const TensorView& v_a, const TensorView& s_a, const TensorView& v_b,
                 const TensorView& s_b, const TensorView& mask, LseBase base, void* out_v,
                 float* out_s, const Executor& executor) {
  // merge_state_in_place has other names for the same arguments.
  const bool in_place = out_v == v_a.data;
  const Validator check(in_place ? "merge_state_in_place" : "merge_state", executor.device());
  const char* name_v_a = in_place ? "v" : "v_a";
  const char* name_v_b = in_place ? "v_other" : "v_b";
  check_vectors(check, name_v_a, v_a, 3);
  const Dims sums = {v_a.dims[0], v_a.dims[1]};
  check_sums(check, in_place ? "s" : "s_a", s_a, sums);
  check.dtype(name_v_b, v_b, v_a.dtype);
  check.shape(name_v_b, v_b, v_a.dims);
  check_sums(check, in_place ? "s_other" : "s_b", s_b, sums);
  if (mask.data != nullptr) {
    check.dtype("mask", mask, DType::u8);
    check.shape("mask", mask, {v_a.dims[0]});
  }
  MergeStatesProblem problem;
  problem.tokens = v_a.dims[0];
  problem.heads = v_a.dims[1];
  problem.head_dim = v_a.dims[2];
  problem.v_stride = problem.heads * problem.head_dim;
  problem.s_stride = problem.heads;
  problem.dtype = v_a.dtype;
  problem.mask = static_cast<const uint8_t*>(mask.data);
  problem.out_v = out_v;
  problem.out_s = out_s;
  run(problem, {v_a.data, v_b.data},
      {static_cast<const float*>(s_a.data), static_cast<const float*>(s_b.data)}, base, executor);
}

}  // namespace effinfer::ops
