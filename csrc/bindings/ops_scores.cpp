// What keys get of attention.
#include <optional>

#include "bindings/attention_arguments.h"
#include "bindings/device_array.h"
#include "bindings/module.h"
#include "effinfer/ops/attention_scores.h"

namespace effinfer::bindings {
namespace {

// float32 of those dims, dense, where the operator runs.
float* output(const Arguments& arguments, const AnyArray& array, const char* argument,
              const Dims& dims, const Executor& executor) {
  const StridedView target = arguments.written(array, argument);
  const TensorView view = arguments.view(array, argument);
  if (view.device != executor.device()) {
    throw InvalidArgument(arguments.label(argument) + ": expected a tensor on " +
                          name(executor.device()) + ", got one on " + name(view.device));
  }
  if (view.dims == dims && view.dtype == DType::f32) return static_cast<float*>(target.data);
  throw InvalidArgument(arguments.label(argument) + ": expected float32 " + dims.to_string() +
                        ", got " + view.dims.to_string());
}

int64_t total(const TensorView& lengths) {
  if (lengths.dtype != DType::i32 || lengths.dims.rank() != 1) return 0;
  int64_t sum = 0;
  for (int64_t i = 0; i < lengths.dims[0]; ++i) {
    sum += static_cast<const int32_t*>(lengths.data)[i];
  }
  return sum;
}

void attention_scores(const AnyArray& q, const py::object& k, const py::array& qo_indptr,
                      const py::array& kv_indptr, const py::object& kv_indices,
                      const py::array& kv_len, const AnyArray& out, const py::object& diagonals,
                      int32_t page_size, int32_t num_qo_heads, int32_t num_kv_heads,
                      int32_t head_dim, bool causal, int32_t window_left, float sm_scale,
                      float logits_soft_cap, const py::object& k_scale, const std::string& reduce,
                      const py::object& positions, const py::object& lse,
                      const std::string& lse_base, const std::string& kv_layout,
                      const Where& pool) {
  const AttentionArguments arguments("attention_scores");
  const Executor executor = executor_of(pool);
  const ops::AttentionSequences sequences =
      arguments.sequences(qo_indptr, kv_indptr, kv_indices, kv_len);
  ops::AttentionScoresInputs inputs;
  static_cast<ops::LogitInputs&>(inputs) =
      arguments.logits(q, k, kv_layout, sm_scale, logits_soft_cap, k_scale);
  inputs.positions = arguments.optional(positions, "positions");
  inputs.lse = arguments.optional(lse, "lse");
  inputs.lse_factor = arguments.lse_factor(lse_base);
  inputs.reduce = arguments.named<ops::ScoreReduce>(
      reduce, "reduce", {{"sum", ops::ScoreReduce::sum}, {"max", ops::ScoreReduce::max}});
  const Dims dims = {num_qo_heads, total(sequences.kv_len)};
  float* to = output(arguments, out, "out", dims, executor);
  float* to_diagonals = nullptr;
  if (!diagonals.is_none()) {
    to_diagonals = output(arguments, diagonals, "diagonals", dims, executor);
  }
  const ops::AttentionGeometry geometry{num_qo_heads, num_kv_heads, head_dim,   head_dim,
                                        page_size,    causal,       window_left};
  const py::gil_scoped_release release;
  ops::attention_scores(geometry, sequences, inputs, to, to_diagonals, executor);
}

void pool_scores(const AnyArray& scores, const py::array& kv_len, const AnyArray& out,
                 const std::string& pooling, int32_t kernel_size, const std::string& block_reduce,
                 int32_t block_size, int32_t group, const Where& pool) {
  const AttentionArguments arguments("pooled_attention_scores");
  const TensorView from = arguments.view(scores, "scores");
  const TensorView lengths = arguments.view(kv_len, "kv_len");
  ops::ScorePool options;
  options.pooling = arguments.named<ops::ScorePooling>(pooling, "pooling",
                                                       {{"none", ops::ScorePooling::none},
                                                        {"max", ops::ScorePooling::max},
                                                        {"avg", ops::ScorePooling::avg}});
  options.kernel_size = kernel_size;
  options.block_reduce = arguments.named<ops::BlockReduce>(block_reduce, "block_reduce",
                                                           {{"sum", ops::BlockReduce::sum},
                                                            {"mean", ops::BlockReduce::mean},
                                                            {"max", ops::BlockReduce::max}});
  options.block_size = block_size;
  options.group = group;
  int64_t blocks = 0;
  if (lengths.dtype == DType::i32 && block_size > 0) {
    for (int64_t i = 0; i < lengths.dims.num_elements(); ++i) {
      blocks +=
          (int64_t{static_cast<const int32_t*>(lengths.data)[i]} + block_size - 1) / block_size;
    }
  }
  const bool valid = from.dims.rank() == 2 && group > 0 && blocks >= 0;
  const Executor executor = executor_of(pool);
  const Dims dims = {valid ? from.dims[0] / group : 0, blocks};
  float* to = output(arguments, out, "out", dims, executor);
  const py::gil_scoped_release release;
  ops::pool_scores(from, lengths, options, to, executor);
}

}  // namespace

void register_ops_scores(py::module_& m) {
  m.def("attention_scores", &attention_scores, py::arg("q"), py::arg("k"), py::arg("qo_indptr"),
        py::arg("kv_indptr"), py::arg("kv_indices"), py::arg("kv_len"), py::arg("out"),
        py::arg("diagonals") = py::none(), py::kw_only(), py::arg("page_size"),
        py::arg("num_qo_heads"), py::arg("num_kv_heads"), py::arg("head_dim"),
        py::arg("causal") = true, py::arg("window_left") = -1, py::arg("sm_scale"),
        py::arg("logits_soft_cap") = 0.0f, py::arg("k_scale") = 1.0f, py::arg("reduce") = "sum",
        py::arg("positions") = py::none(), py::arg("lse") = py::none(),
        py::arg("lse_base") = "log2", py::arg("kv_layout") = "NHD", py::arg("pool") = py::none());
  m.def("pool_scores", &pool_scores, py::arg("scores"), py::arg("kv_len"), py::arg("out"),
        py::kw_only(), py::arg("pooling") = "none", py::arg("kernel_size") = 1,
        py::arg("block_reduce") = "sum", py::arg("block_size") = 1, py::arg("group") = 1,
        py::arg("pool") = py::none());
}

}  // namespace effinfer::bindings
