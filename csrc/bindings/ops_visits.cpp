#include <pybind11/stl.h>

#include <cmath>
#include <string>

#include "bindings/attention_arguments.h"
#include "bindings/module.h"
#include "effinfer/ops/visits.h"

namespace effinfer::bindings {
namespace {

using ops::PagedKv;
using ops::Visits;
using Pool = std::shared_ptr<ThreadPool>;

Visits make_visits(const py::array& qo_indptr, const py::array& kv_len, int32_t num_qo_heads,
                   int32_t num_kv_heads, bool generated, bool weighted) {
  ops::PagedBatch batch;
  const AttentionArguments arguments("visits");
  batch.qo_indptr = arguments.view(qo_indptr, "qo_indptr");
  batch.kv_len = arguments.view(kv_len, "kv_len");
  return Visits(batch, num_qo_heads, num_kv_heads, generated, weighted);
}

// A view, which keeps the lists alive.
py::array words(const py::object& self) {
  auto& visits = self.cast<Visits&>();
  return py::array_t<uint64_t>(
      {visits.num_blocks(), int64_t{visits.num_kv_heads()}, visits.list_words()}, visits.words(),
      self);
}

py::object log_weights(const py::object& self) {
  auto& visits = self.cast<Visits&>();
  if (visits.log_weights() == nullptr) return py::none();
  return py::array_t<float>(
      {visits.num_blocks(), int64_t{visits.num_kv_heads()}, visits.list_words() * 64},
      visits.log_weights(), self);
}

py::array blocks(const Visits& visits) {
  const std::vector<int32_t> values = visits.blocks();
  py::array_t<int32_t> out({visits.num_blocks(), int64_t{4}});
  std::copy(values.begin(), values.end(), out.mutable_data());
  return out;
}

ops::VisitOptions options_of(std::optional<float> sm_scale, const PagedKv& kv, int32_t sink_tokens,
                             int32_t local_tokens, int32_t min_tokens,
                             const std::string& arithmetic) {
  return {sm_scale.value_or(1.0f / std::sqrt(static_cast<float>(kv.head_dim()))), sink_tokens,
          local_tokens, min_tokens, parse_dtype(arithmetic)};
}

void column_visits(Visits& visits, const py::array& q, const PagedKv& kv,
                   const py::array& qo_indptr, const py::array& kv_indptr,
                   const py::array& kv_indices, const py::array& kv_len,
                   std::optional<float> sm_scale, int32_t last_rows, int32_t row_stride,
                   int32_t columns, float column_mass, int32_t slashes, float slash_mass,
                   int32_t sink_tokens, int32_t local_tokens, int32_t min_tokens,
                   const std::string& arithmetic, const Pool& pool) {
  const AttentionArguments arguments("column_visits");
  const TensorView queries = arguments.view(q, "q");
  const ops::PagedBatch batch = arguments.batch(qo_indptr, kv_indptr, kv_indices, kv_len);
  const ops::VisitOptions options =
      options_of(sm_scale, kv, sink_tokens, local_tokens, min_tokens, arithmetic);
  const py::gil_scoped_release release;
  ops::column_visits(visits, queries, kv, batch,
                     {last_rows, row_stride, {columns, column_mass}, {slashes, slash_mass}},
                     options, pool_or_default(pool));
}

void block_visits(Visits& visits, const py::array& q, const PagedKv& kv, const py::array& qo_indptr,
                  const py::array& kv_indptr, const py::array& kv_indices, const py::array& kv_len,
                  std::optional<float> sm_scale, int32_t stride, const std::string& queries,
                  int32_t pages, float mass, int32_t keys, float share, int32_t sink_tokens,
                  int32_t local_tokens, int32_t min_tokens, const std::string& arithmetic,
                  const Pool& pool) {
  const AttentionArguments arguments("block_visits");
  const TensorView q_view = arguments.view(q, "q");
  const bool probe = arguments.named<bool>(queries, "queries", {{"mean", false}, {"probe", true}});
  const ops::PagedBatch batch = arguments.batch(qo_indptr, kv_indptr, kv_indices, kv_len);
  const ops::VisitOptions options =
      options_of(sm_scale, kv, sink_tokens, local_tokens, min_tokens, arithmetic);
  const py::gil_scoped_release release;
  ops::block_visits(visits, q_view, kv, batch, {stride, {pages, mass}, probe, keys, share}, options,
                    pool_or_default(pool));
}

ops::HeadVote vote_of(const AttentionArguments& arguments, const std::string& vote) {
  return arguments.named<ops::HeadVote>(
      vote, "vote", {{"highest", ops::HeadVote::highest}, {"sum", ops::HeadVote::sum}});
}

void page_visits(Visits& visits, const py::array& q, const PagedKv& kv, const py::array& qo_indptr,
                 const py::array& kv_indptr, const py::array& kv_indices, const py::array& kv_len,
                 std::optional<float> sm_scale, int32_t unit, bool means, int32_t keys, float share,
                 const std::string& vote, int32_t sink_tokens, int32_t local_tokens,
                 int32_t min_tokens, int32_t window_left, const Pool& pool) {
  const AttentionArguments arguments("page_visits");
  const TensorView queries = arguments.view(q, "q");
  const ops::PagedBatch batch = arguments.batch(qo_indptr, kv_indptr, kv_indices, kv_len);
  const ops::VisitOptions options =
      options_of(sm_scale, kv, sink_tokens, local_tokens, min_tokens, "f32");
  const ops::RowChoice choice = {keys, share, vote_of(arguments, vote), window_left};
  const py::gil_scoped_release release;
  ops::page_visits(visits, queries, kv, batch, {choice, unit, means}, options,
                   pool_or_default(pool));
}

void key_visits(Visits& visits, const py::array& q, const PagedKv& kv, const py::array& qo_indptr,
                const py::array& kv_indptr, const py::array& kv_indices, const py::array& kv_len,
                std::optional<float> sm_scale, const py::object& channels, int32_t keys,
                float share, const std::string& vote, int32_t sink_tokens, int32_t local_tokens,
                int32_t min_tokens, int32_t window_left, const Pool& pool) {
  const AttentionArguments arguments("key_visits");
  const TensorView queries = arguments.view(q, "q");
  const ops::PagedBatch batch = arguments.batch(qo_indptr, kv_indptr, kv_indices, kv_len);
  const ops::VisitOptions options =
      options_of(sm_scale, kv, sink_tokens, local_tokens, min_tokens, "f32");
  const ops::KeyVisits tokens = {{keys, share, vote_of(arguments, vote), window_left},
                                 arguments.optional(channels, "channels")};
  const py::gil_scoped_release release;
  ops::key_visits(visits, queries, kv, batch, tokens, options, pool_or_default(pool));
}

void hash_visits(Visits& visits, const py::array& q, const PagedKv& kv, const py::array& qo_indptr,
                 const py::array& kv_indptr, const py::array& kv_indices, const py::array& kv_len,
                 int32_t bits, int32_t tables, uint64_t seed, const py::object& means,
                 int32_t sink_tokens, int32_t local_tokens, int32_t min_tokens, const Pool& pool) {
  const AttentionArguments arguments("hash_visits");
  const TensorView queries = arguments.view(q, "q");
  const ops::PagedBatch batch = arguments.batch(qo_indptr, kv_indptr, kv_indices, kv_len);
  const ops::VisitOptions options =
      options_of(std::nullopt, kv, sink_tokens, local_tokens, min_tokens, "f32");
  const ops::HashVisits hashes = {bits, tables, seed, arguments.optional(means, "means")};
  const py::gil_scoped_release release;
  ops::hash_visits(visits, queries, kv, batch, hashes, options, pool_or_default(pool));
}

}  // namespace

void register_ops_visits(py::module_& m) {
  py::class_<Visits>(m, "Visits",
                     "Lists of the keys that blocks of rows visit, of one batch; empty at first.")
      .def(py::init(&make_visits), py::arg("qo_indptr"), py::arg("kv_len"), py::arg("num_qo_heads"),
           py::arg("num_kv_heads"), py::kw_only(), py::arg("generated") = false,
           py::arg("weighted") = false)
      .def_property_readonly("blocks", &blocks,
                             "int32 [B, 4]: sequence, first row, rows, position of the first.")
      .def_property_readonly("words", &words,
                             "uint64 [B, num_kv_heads, W], writable: a bit for each token.")
      .def_property_readonly("log_weights", &log_weights,
                             "float32 [B, num_kv_heads, 64 W], writable: what is added to a "
                             "token's logits; None where each counts once.");
  m.def("column_visits", &column_visits, py::arg("visits"), py::arg("q"), py::arg("kv"),
        py::arg("qo_indptr"), py::arg("kv_indptr"), py::arg("kv_indices"), py::arg("kv_len"),
        py::kw_only(), py::arg("sm_scale") = py::none(), py::arg("last_rows") = 64,
        py::arg("row_stride") = 0, py::arg("columns") = 0, py::arg("column_mass") = 0.0f,
        py::arg("slashes") = 0, py::arg("slash_mass") = 0.0f, py::arg("sink_tokens") = 0,
        py::arg("local_tokens") = 0, py::arg("min_tokens") = 0, py::arg("arithmetic") = "f32",
        py::arg("pool") = py::none());
  m.def("block_visits", &block_visits, py::arg("visits"), py::arg("q"), py::arg("kv"),
        py::arg("qo_indptr"), py::arg("kv_indptr"), py::arg("kv_indices"), py::arg("kv_len"),
        py::kw_only(), py::arg("sm_scale") = py::none(), py::arg("stride") = 0,
        py::arg("queries") = "mean", py::arg("pages") = 0, py::arg("mass") = 0.0f,
        py::arg("keys") = 0, py::arg("share") = 0.0f, py::arg("sink_tokens") = 0,
        py::arg("local_tokens") = 0, py::arg("min_tokens") = 0, py::arg("arithmetic") = "f32",
        py::arg("pool") = py::none());
  m.def("page_visits", &page_visits, py::arg("visits"), py::arg("q"), py::arg("kv"),
        py::arg("qo_indptr"), py::arg("kv_indptr"), py::arg("kv_indices"), py::arg("kv_len"),
        py::kw_only(), py::arg("sm_scale") = py::none(), py::arg("unit") = 64,
        py::arg("means") = false, py::arg("keys") = 0, py::arg("share") = 0.0f,
        py::arg("vote") = "highest", py::arg("sink_tokens") = 0, py::arg("local_tokens") = 0,
        py::arg("min_tokens") = 0, py::arg("window_left") = -1, py::arg("pool") = py::none());
  m.def("key_visits", &key_visits, py::arg("visits"), py::arg("q"), py::arg("kv"),
        py::arg("qo_indptr"), py::arg("kv_indptr"), py::arg("kv_indices"), py::arg("kv_len"),
        py::kw_only(), py::arg("sm_scale") = py::none(), py::arg("channels") = py::none(),
        py::arg("keys") = 0, py::arg("share") = 0.0f, py::arg("vote") = "highest",
        py::arg("sink_tokens") = 0, py::arg("local_tokens") = 0, py::arg("min_tokens") = 0,
        py::arg("window_left") = -1, py::arg("pool") = py::none());
  m.def("hash_visits", &hash_visits, py::arg("visits"), py::arg("q"), py::arg("kv"),
        py::arg("qo_indptr"), py::arg("kv_indptr"), py::arg("kv_indices"), py::arg("kv_len"),
        py::kw_only(), py::arg("bits") = 8, py::arg("tables") = 40, py::arg("seed") = 0,
        py::arg("means") = py::none(), py::arg("sink_tokens") = 0, py::arg("local_tokens") = 0,
        py::arg("min_tokens") = 0, py::arg("pool") = py::none());
}

}  // namespace effinfer::bindings
