// The lists of sparse attention, chosen from queries and keys.
#include "bindings/attention_arguments.h"
#include "bindings/device_array.h"
#include "bindings/module.h"
#include "effinfer/ops/token_index.h"

namespace effinfer::bindings {
namespace {

using Pool = std::shared_ptr<ThreadPool>;

ops::IndexRows rows_of(std::string_view op, const py::array& qo_indptr, const py::array& kv_len,
                       int32_t num_kv_heads, int32_t block_size, bool causal, int32_t sink_tokens,
                       int32_t local_tokens) {
  const AttentionArguments arguments{std::string(op)};
  return {op,
          arguments.view(qo_indptr, "qo_indptr"),
          arguments.view(kv_len, "kv_len"),
          num_kv_heads,
          block_size,
          causal,
          sink_tokens,
          local_tokens};
}

// (lists [L, 4], indptr [L + 1], spans [n, 2]) of what make() returns.
template <class Make>
py::tuple lists_of(Make&& make) {
  ops::BlockLists lists;
  {
    const py::gil_scoped_release release;
    lists = make();
  }
  const auto count = static_cast<py::ssize_t>(lists.lists.size() / 4);
  const auto spans = static_cast<py::ssize_t>(lists.spans.size() / 2);
  return py::make_tuple(array_of(lists.lists, {count, 4}), array_of(lists.list_indptr),
                        array_of(lists.spans, {spans, 2}));
}

py::tuple a_shape_lists(const py::array& qo_indptr, const py::array& kv_len, int32_t num_kv_heads,
                        int32_t block_size, bool causal, int32_t sink_tokens, int32_t local_tokens,
                        const Pool& pool) {
  const ops::IndexRows rows = rows_of("a_shape_index", qo_indptr, kv_len, num_kv_heads, block_size,
                                      causal, sink_tokens, local_tokens);
  return lists_of([&] { return ops::a_shape_lists(rows, pool_or_default(pool)); });
}

py::tuple column_lists(const std::string& op, const py::array& qo_indptr, const py::array& kv_len,
                       int32_t num_kv_heads, int32_t block_size, bool causal, int32_t sink_tokens,
                       int32_t local_tokens, const py::array& columns, int32_t num_columns,
                       float column_mass, const py::object& slashes, int32_t num_slashes,
                       const Pool& pool) {
  const ops::IndexRows rows =
      rows_of(op, qo_indptr, kv_len, num_kv_heads, block_size, causal, sink_tokens, local_tokens);
  const AttentionArguments arguments(op);
  ops::ColumnScores scores;
  scores.columns = arguments.view(columns, "columns");
  scores.top_columns = {num_columns, column_mass};
  scores.slashes = arguments.optional(slashes, "slashes");
  scores.top_slashes = {num_slashes, 0.0f};
  return lists_of([&] { return ops::column_lists(rows, scores, pool_or_default(pool)); });
}

py::tuple page_lists(const py::array& qo_indptr, const py::array& kv_len, int32_t num_kv_heads,
                     bool causal, int32_t sink_tokens, int32_t local_tokens,
                     const py::array& scores, int32_t page_size, int32_t num_pages,
                     const Pool& pool) {
  const ops::IndexRows rows =
      rows_of("topk_pages", qo_indptr, kv_len, num_kv_heads, 1, causal, sink_tokens, local_tokens);
  const TensorView given = AttentionArguments("topk_pages").view(scores, "scores");
  return lists_of([&] {
    return ops::page_lists(rows, given, page_size, {num_pages, 0.0f}, pool_or_default(pool));
  });
}

py::tuple block_score_lists(const AnyArray& q, const AnyArray& k, const py::array& qo_indptr,
                            const py::array& kv_indptr, const py::object& kv_indices,
                            const py::array& kv_len, int32_t page_size, int32_t num_qo_heads,
                            int32_t num_kv_heads, int32_t head_dim, bool causal, float sm_scale,
                            const std::string& kv_layout, int32_t block_size, int32_t sink_tokens,
                            int32_t local_tokens, const std::string& method, int32_t stride,
                            int32_t num_blocks, float mass, const Where& pool) {
  const AttentionArguments arguments("block_score_index");
  const ops::IndexRows rows = rows_of("block_score_index", qo_indptr, kv_len, num_kv_heads,
                                      block_size, causal, sink_tokens, local_tokens);
  const ops::AttentionSequences sequences =
      arguments.sequences(qo_indptr, kv_indptr, kv_indices, kv_len);
  const ops::AttentionGeometry geometry{num_qo_heads, num_kv_heads, head_dim, head_dim,
                                        page_size,    causal,       -1};
  ops::BlockScoreInputs inputs;
  inputs.q = arguments.strided(q, "q");
  inputs.k = arguments.strided(k, "k");
  inputs.order = arguments.order(kv_layout);
  inputs.sm_scale = sm_scale;
  inputs.method = arguments.named<ops::BlockMethod>(
      method, "method",
      {{"mean", ops::BlockMethod::mean}, {"antidiagonal", ops::BlockMethod::antidiagonal}});
  inputs.stride = stride;
  inputs.top = {num_blocks, mass};
  const Executor executor = executor_of(pool);
  ThreadPool* const threads = executor.pool();
  return lists_of([&] {
    return ops::block_score_lists(rows, geometry, sequences, inputs, executor,
                                  threads != nullptr ? *threads : default_pool());
  });
}

py::object page_bounds(const AnyArray& k, const py::array& qo_indptr, const py::array& kv_indptr,
                       const py::object& kv_indices, const py::array& kv_len, int32_t page_size,
                       int32_t num_kv_heads, int32_t head_dim, const std::string& kv_layout,
                       const Where& pool, const py::object& out) {
  const AttentionArguments arguments("page_bounds");
  const ops::AttentionSequences sequences =
      arguments.sequences(qo_indptr, kv_indptr, kv_indices, kv_len);
  const StridedView keys = arguments.strided(k, "k");
  const ops::KvOrder order = arguments.order(kv_layout);
  const ops::AttentionGeometry geometry{num_kv_heads, num_kv_heads, head_dim, head_dim, page_size};
  Result result =
      float32_result(ops::page_bounds_dims(geometry, sequences), pool, out, "[page_bounds] out");
  const py::gil_scoped_release release;
  ops::page_bounds(geometry, sequences, keys, order, result.data, executor_of(pool));
  return std::move(result.array);
}

py::object page_scores(const AnyArray& q, const AnyArray& bounds, const py::array& qo_indptr,
                       const py::array& kv_indptr, const py::object& kv_indices,
                       const py::array& kv_len, int32_t page_size, int32_t num_qo_heads,
                       int32_t num_kv_heads, int32_t head_dim, const Where& pool,
                       const py::object& out) {
  const AttentionArguments arguments("topk_pages");
  const ops::AttentionSequences sequences =
      arguments.sequences(qo_indptr, kv_indptr, kv_indices, kv_len);
  const StridedView queries = arguments.strided(q, "q");
  const TensorView limits = arguments.view(bounds, "bounds");
  const ops::AttentionGeometry geometry{num_qo_heads, num_kv_heads, head_dim, head_dim, page_size};
  Result result =
      float32_result(ops::page_scores_dims(geometry, sequences), pool, out, "[topk_pages] scores");
  const py::gil_scoped_release release;
  ops::page_scores(geometry, sequences, queries, limits, result.data, executor_of(pool));
  return std::move(result.array);
}

}  // namespace

void register_ops_index(py::module_& m) {
  m.def("a_shape_lists", &a_shape_lists, py::arg("qo_indptr"), py::arg("kv_len"),
        py::arg("num_kv_heads"), py::arg("block_size"), py::arg("causal"), py::arg("sink_tokens"),
        py::arg("local_tokens"), py::arg("pool") = py::none());
  m.def("column_lists", &column_lists, py::arg("op"), py::arg("qo_indptr"), py::arg("kv_len"),
        py::arg("num_kv_heads"), py::arg("block_size"), py::arg("causal"), py::arg("sink_tokens"),
        py::arg("local_tokens"), py::arg("columns"), py::arg("num_columns") = 0,
        py::arg("column_mass") = 0.0f, py::arg("slashes") = py::none(), py::arg("num_slashes") = 0,
        py::arg("pool") = py::none());
  m.def("page_lists", &page_lists, py::arg("qo_indptr"), py::arg("kv_len"), py::arg("num_kv_heads"),
        py::arg("causal"), py::arg("sink_tokens"), py::arg("local_tokens"), py::arg("scores"),
        py::arg("page_size"), py::arg("num_pages"), py::arg("pool") = py::none());
  m.def("block_score_lists", &block_score_lists, py::arg("q"), py::arg("k"), py::arg("qo_indptr"),
        py::arg("kv_indptr"), py::arg("kv_indices"), py::arg("kv_len"), py::kw_only(),
        py::arg("page_size"), py::arg("num_qo_heads"), py::arg("num_kv_heads"), py::arg("head_dim"),
        py::arg("causal"), py::arg("sm_scale"), py::arg("kv_layout"), py::arg("block_size"),
        py::arg("sink_tokens"), py::arg("local_tokens"), py::arg("method"), py::arg("stride"),
        py::arg("num_blocks") = 0, py::arg("mass") = 0.0f, py::arg("pool") = py::none());
  m.def("page_bounds", &page_bounds, py::arg("k"), py::arg("qo_indptr"), py::arg("kv_indptr"),
        py::arg("kv_indices"), py::arg("kv_len"), py::kw_only(), py::arg("page_size"),
        py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("kv_layout"),
        py::arg("pool") = py::none(), py::arg("out") = py::none());
  m.def("page_scores", &page_scores, py::arg("q"), py::arg("bounds"), py::arg("qo_indptr"),
        py::arg("kv_indptr"), py::arg("kv_indices"), py::arg("kv_len"), py::kw_only(),
        py::arg("page_size"), py::arg("num_qo_heads"), py::arg("num_kv_heads"), py::arg("head_dim"),
        py::arg("pool") = py::none(), py::arg("out") = py::none());
}

}  // namespace effinfer::bindings
