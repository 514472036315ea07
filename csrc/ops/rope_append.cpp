#include "ops/rope_append.h"

#include "ops/paged_batch.h"
#include "ops/registry.h"

namespace effinfer::ops {
namespace {

const float* floats(const TensorView& view) {
  return static_cast<const float*>(view.data);
}

void check_keys(const Validator& check, std::string_view argument, const TensorView& x,
                int64_t tokens, const PagedKv& kv) {
  check.dtype(argument, x, DType::f32);
  check.shape(argument, x, {tokens, kv.num_kv_heads(), kv.head_dim()});
}

RopeAppendProblem append_problem(const Validator& check, const PagedKv& kv, const TensorView& k,
                                 const TensorView& v, const PagedBatch& batch, int64_t tokens) {
  check_keys(check, "k", k, tokens, kv);
  check_keys(check, "v", v, tokens, kv);
  RopeAppendProblem problem;
  problem.k = floats(k);
  problem.v = floats(v);
  problem.k_stride = problem.v_stride = static_cast<int64_t>(kv.num_kv_heads()) * kv.head_dim();
  problem.kv = layer_of(kv);
  problem.batch = check_batch(check, batch, tokens, kv);
  return problem;
}

const float* check_norm(const Validator& check, std::string_view argument, const TensorView& weight,
                        const PagedKv& kv) {
  if (weight.data == nullptr) return nullptr;
  check.dtype(argument, weight, DType::f32);
  check.shape(argument, weight, {kv.head_dim()});
  return floats(weight);
}

}  // namespace

std::string describe_kv(const KvLayer& kv) {
  return " kv_heads=" + std::to_string(kv.num_kv_heads) +
         " head_dim=" + std::to_string(kv.head_dim) + " kv_dtype=" + std::string(name(kv.dtype));
}

int64_t kv_token_bytes(const KvLayer& kv) {
  const int64_t head = int64_t{kv.head_dim} * dtype_info(kv.dtype).block_bytes;
  return 2 * kv.num_kv_heads * (head + (kv.dtype == DType::i8 ? 4 : 0));
}

std::string describe(const RopeAppendProblem& problem) {
  return "[rope_append] heads=" + std::to_string(problem.num_qo_heads) + describe_kv(problem.kv) +
         " rope_dims=" + std::to_string(problem.rope_dims) +
         (problem.interleaved ? " interleaved" : "") +
         (problem.q_norm != nullptr ? " q_norm" : "") +
         (problem.k_norm != nullptr ? " k_norm" : "");
}

Cost cost(const RopeAppendProblem& problem) {
  const int64_t rows = problem.batch.num_tokens;
  const int64_t q = problem.q != nullptr ? int64_t{problem.num_qo_heads} * problem.kv.head_dim : 0;
  const int64_t k = int64_t{problem.kv.num_kv_heads} * problem.kv.head_dim;
  const int64_t table = problem.cos_sin != nullptr ? problem.rope_dims : 0;
  const int64_t row = q * 8 + k * 8 + table * 4 + kv_token_bytes(problem.kv);
  const int64_t norms =
      (problem.q_norm != nullptr ? q * 4 : 0) + (problem.k_norm != nullptr ? k * 4 : 0);
  return {rows * row, rows * (norms + (table > 0 ? (q + k) * 3 : 0))};
}

void kv_append(PagedKv& kv, const TensorView& k, const TensorView& v, const PagedBatch& batch,
               ThreadPool& pool) {
  const Validator check("kv_append");
  check.rank("k", k, 3);
  run_alone(append_problem(check, kv, k, v, batch, k.dims[0]), pool);
}

void rope_append(PagedKv& kv, const TensorView& q, const TensorView& k, const TensorView& v,
                 const TensorView& table, const PagedBatch& batch, const RopeAppendOptions& options,
                 float* q_out, ThreadPool& pool) {
  const Validator check("rope_append");
  const int32_t heads = check_queries(check, q, kv);
  const int64_t tokens = q.dims[0];
  check.dtype("table", table, DType::f32);
  const bool matches = table.dims.rank() == 3 && table.dims[0] == tokens && table.dims[1] == 2 &&
                       2 * table.dims[2] <= kv.head_dim();
  check.expect(matches, "table",
               "shape [" + std::to_string(tokens) + ", 2, at most " +
                   std::to_string(kv.head_dim() / 2) + "]",
               table.dims.to_string());
  RopeAppendProblem problem = append_problem(check, kv, k, v, batch, tokens);
  problem.q = floats(q);
  problem.q_out = q_out;
  problem.q_stride = problem.q_out_stride = static_cast<int64_t>(heads) * kv.head_dim();
  problem.num_qo_heads = heads;
  problem.q_norm = check_norm(check, "q_norm", options.q_norm, kv);
  problem.k_norm = check_norm(check, "k_norm", options.k_norm, kv);
  problem.norm_eps = options.norm_eps;
  problem.cos_sin = floats(table);
  problem.rope_dims = static_cast<int32_t>(2 * table.dims[2]);
  problem.interleaved = options.interleaved;
  run_alone(problem, pool);
}

}  // namespace effinfer::ops
