// Pages, and the index lists and masks of sparse and tree attention.
#include "bindings/attention_arguments.h"
#include "bindings/device_array.h"
#include "bindings/module.h"
#include "effinfer/ops/page.h"

namespace effinfer::bindings {
namespace {

void append_paged_kv_cache(const AnyArray& append_key, const AnyArray& append_value,
                           const AnyArray& batch_indices, const AnyArray& positions,
                           const AnyArray& k_cache, const AnyArray& v_cache,
                           const AnyArray& kv_indices, const AnyArray& kv_indptr,
                           const AnyArray& kv_last_page_len, const std::string& kv_layout, bool mla,
                           const Where& pool) {
  ops::AppendNames names;
  if (mla) {
    names = {"append_paged_mla_kv_cache", "append_ckv", "append_kpe", "ckv_cache", "kpe_cache"};
  }
  const Arguments arguments(names.op);
  const ops::AppendTensors keys{arguments.strided(append_key, names.key),
                                arguments.written(k_cache, names.k_cache)};
  const ops::AppendTensors values{arguments.strided(append_value, names.value),
                                  arguments.written(v_cache, names.v_cache)};
  const ops::AppendPlaces places{
      arguments.view(batch_indices, "batch_indices"), arguments.view(positions, "positions"),
      arguments.view(kv_indices, "kv_indices"), arguments.view(kv_indptr, "kv_indptr"),
      arguments.view(kv_last_page_len, "kv_last_page_len")};
  const ops::KvOrder order = AttentionArguments("append_paged_kv_cache").order(kv_layout);
  const py::gil_scoped_release release;
  ops::append_paged_kv_cache(keys, values, places, order, executor_of(pool), names);
}

void batch_indices_positions(const AnyArray& append_indptr, const AnyArray& seq_lens,
                             const AnyArray& batch_indices, const AnyArray& positions,
                             const Where& pool) {
  const Arguments arguments("get_batch_indices_positions");
  const TensorView starts = arguments.view(append_indptr, "append_indptr");
  const TensorView lengths = arguments.view(seq_lens, "seq_lens");
  const StridedView owners = arguments.written(batch_indices, "batch_indices");
  const StridedView places = arguments.written(positions, "positions");
  const py::gil_scoped_release release;
  ops::batch_indices_positions(starts, lengths, owners, places, executor_of(pool));
}

void page_lengths(const AnyArray& kv_indptr, const AnyArray& kv_last_page_len, int32_t page_size,
                  const AnyArray& out, const Where& pool) {
  const Arguments arguments("get_seq_lens");
  const TensorView pages = arguments.view(kv_indptr, "kv_indptr");
  const TensorView last = arguments.view(kv_last_page_len, "kv_last_page_len");
  const StridedView lengths = arguments.written(out, "out");
  const py::gil_scoped_release release;
  ops::page_lengths(pages, last, page_size, lengths, executor_of(pool));
}

py::tuple lists_tuple(const ops::BlockLists& lists) {
  const auto count = static_cast<py::ssize_t>(lists.lists.size() / 4);
  const auto spans = static_cast<py::ssize_t>(lists.spans.size() / 2);
  return py::make_tuple(array_of(lists.list_indptr), array_of(lists.spans, {spans, 2}),
                        array_of(lists.lists, {count, 4}), array_of(lists.span_masks));
}

ops::BlockMatrix matrix_of(const py::array& indptr, const py::array& indices, int64_t M, int64_t N,
                           int64_t R, int64_t C) {
  const Arguments arguments("block_sparse_attention");
  return {arguments.view(indptr, "indptr"), arguments.view(indices, "indices"), M, N, R, C};
}

py::tuple block_sparse_lists(const py::array& indptr, const py::array& indices, int64_t M,
                             int64_t N, int64_t R, int64_t C, int32_t num_kv_heads, bool masked) {
  const ops::BlockMatrix matrix = matrix_of(indptr, indices, M, N, R, C);
  ops::BlockLists lists;
  {
    const py::gil_scoped_release release;
    lists = ops::block_sparse_lists(matrix, num_kv_heads, masked);
  }
  return lists_tuple(lists);
}

py::array_t<uint8_t> block_mask(const py::array& indptr, const py::array& indices, int64_t M,
                                int64_t N, int64_t R, int64_t C, const py::array& packed) {
  const ops::BlockMatrix matrix = matrix_of(indptr, indices, M, N, R, C);
  const TensorView bits = view_of(packed, "[block_sparse_attention] packed_mask");
  std::vector<uint8_t> mask;
  {
    const py::gil_scoped_release release;
    mask = ops::block_mask(matrix, bits);
  }
  return array_of(mask);
}

py::tuple variable_block_lists(const py::array& block_mask_map, const py::array& block_row_sz,
                               const py::array& block_col_sz) {
  const Arguments arguments("variable_block_sparse_attention");
  const TensorView map = arguments.view(block_mask_map, "block_mask_map");
  const TensorView rows = arguments.view(block_row_sz, "block_row_sz");
  const TensorView columns = arguments.view(block_col_sz, "block_col_sz");
  ops::VariableBlockLists lists;
  {
    const py::gil_scoped_release release;
    lists = ops::variable_block_lists(map, rows, columns);
  }
  return py::make_tuple(lists_tuple(lists), lists.num_rows, lists.num_columns);
}

py::tuple ancestor_mask(const py::array& parents, const py::array& qo_indptr,
                        const py::array& kv_len) {
  const Arguments arguments("tree_attention");
  const TensorView tree = arguments.view(parents, "parents");
  const TensorView rows = arguments.view(qo_indptr, "qo_indptr");
  const TensorView lengths = arguments.view(kv_len, "kv_len");
  ops::PackedMask mask;
  {
    const py::gil_scoped_release release;
    mask = ops::ancestor_mask(tree, rows, lengths);
  }
  return py::make_tuple(array_of(mask.bits), array_of(mask.indptr));
}

}  // namespace

void register_ops_page(py::module_& m) {
  m.def("append_paged_kv_cache", &append_paged_kv_cache, py::arg("append_key"),
        py::arg("append_value"), py::arg("batch_indices"), py::arg("positions"), py::arg("k_cache"),
        py::arg("v_cache"), py::arg("kv_indices"), py::arg("kv_indptr"),
        py::arg("kv_last_page_len"), py::arg("kv_layout") = "NHD", py::arg("mla") = false,
        py::arg("pool") = py::none());
  m.def("batch_indices_positions", &batch_indices_positions, py::arg("append_indptr"),
        py::arg("seq_lens"), py::arg("batch_indices"), py::arg("positions"),
        py::arg("pool") = py::none());
  m.def("page_lengths", &page_lengths, py::arg("kv_indptr"), py::arg("kv_last_page_len"),
        py::arg("page_size"), py::arg("out"), py::arg("pool") = py::none());
  m.def("block_sparse_lists", &block_sparse_lists, py::arg("indptr"), py::arg("indices"),
        py::arg("M"), py::arg("N"), py::arg("R"), py::arg("C"), py::arg("num_kv_heads"),
        py::arg("masked") = false, "(list_indptr, spans, lists, span_masks) of AttentionPlan.");
  m.def("block_mask", &block_mask, py::arg("indptr"), py::arg("indices"), py::arg("M"),
        py::arg("N"), py::arg("R"), py::arg("C"), py::arg("packed"),
        "The bits of a packed mask by block, row and column.");
  m.def("variable_block_lists", &variable_block_lists, py::arg("block_mask_map"),
        py::arg("block_row_sz"), py::arg("block_col_sz"),
        "((list_indptr, spans, lists, span_masks), num_rows, num_columns).");
  m.def("ancestor_mask", &ancestor_mask, py::arg("parents"), py::arg("qo_indptr"),
        py::arg("kv_len"), "(packed bits, bytes where each sequence starts) of trees of drafts.");
}

}  // namespace effinfer::bindings
