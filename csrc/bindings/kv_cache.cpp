#include "effinfer/kv_cache.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings/module.h"
#include "bindings/tokens.h"
#include "kv/kv_access.h"

namespace effinfer::bindings {
namespace {

// A view of one page of a layer, [num_kv_heads, bytes of a head], in the tile order of kv_layout.h.
py::array page_view(py::object self, int32_t layer, int32_t page, bool values) {
  const KvCache& cache = self.cast<const KvCache&>();
  const std::span<const ops::KvLayer> layers = KvCacheAccess::layers(cache);
  if (layer < 0 || layer >= cache.config().num_layers) throw py::index_error("layer out of range");
  const ops::KvLayer& kv = layers[static_cast<size_t>(layer)];
  if (page < 0 || page >= kv.num_pages) throw py::index_error("page out of range");
  uint8_t* data = values ? kv.v_head(page, 0) : kv.k_head(page, 0);
  return py::array_t<uint8_t>(
      {static_cast<py::ssize_t>(kv.num_kv_heads), static_cast<py::ssize_t>(kv.head_bytes())}, data,
      self);
}

std::unique_ptr<KvCache> make_cache(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim,
                                    const std::string& dtype, int32_t num_pages, int32_t index_unit,
                                    bool index_means, int32_t index_bits) {
  KvCacheConfig config = {num_layers, num_kv_heads, head_dim, parse_dtype(dtype), num_pages};
  config.index_unit = index_unit;
  config.index_means = index_means;
  config.index_bits = index_bits;
  return std::make_unique<KvCache>(config);
}

void register_residency(py::class_<KvCache>& cache) {
  cache.def_property_readonly("num_groups", &KvCache::num_groups)
      .def_property_readonly("used_bytes", [](const KvCache& c) { return c.used_bytes(); })
      .def(
          "sequence_bytes", [](const KvCache& c, SequenceId id) { return c.used_bytes(id); },
          py::arg("sequence"), "Bytes of the pages that a sequence holds, shared ones included.")
      .def("encoded_pages", &KvCache::encoded_pages, py::arg("sequence"),
           "How many of the sequence's first pages take 4 or 2 bits a number.")
      .def("slots", &KvCache::slots, py::arg("sequence"), py::arg("group") = 0)
      .def("next_position", &KvCache::next_position, py::arg("sequence"))
      .def("is_prefix", &KvCache::is_prefix, py::arg("sequence"))
      .def(
          "retain",
          [](KvCache& c, SequenceId sequence, const std::vector<std::vector<int32_t>>& slots,
             int32_t group) { c.retain(sequence, group, slots); },
          py::arg("sequence"), py::arg("slots"), py::arg("group") = 0,
          "Keeps these slots: one list for all heads, or one for each (layer, KV head).")
      .def(
          "reorder",
          [](KvCache& c, SequenceId sequence, const std::vector<std::vector<int32_t>>& slots,
             int32_t group) { c.reorder(sequence, group, slots); },
          py::arg("sequence"), py::arg("slots"), py::arg("group") = 0,
          "Puts all slots into another order: one list for all heads, or one for each (layer, KV "
          "head).")
      .def(
          "evict",
          [](KvCache& c, SequenceId sequence, int64_t begin, int64_t end, int32_t group) {
            c.evict(sequence, group, begin, end);
          },
          py::arg("sequence"), py::arg("begin"), py::arg("end"), py::arg("group") = 0)
      .def(
          "merge",
          [](KvCache& c, SequenceId sequence, int32_t head, int32_t into,
             std::vector<int32_t> slots, std::vector<float> weights, int32_t group) {
            const KvMerge merge = {head, into, std::move(slots), std::move(weights)};
            c.merge(sequence, group, {&merge, 1});
          },
          py::arg("sequence"), py::arg("head"), py::arg("into"), py::arg("slots"),
          py::arg("weights"), py::arg("group") = 0)
      .def(
          "reposition",
          [](KvCache& c, SequenceId sequence, const std::vector<int64_t>& from, int64_t delta) {
            c.reposition(sequence, from, delta);
          },
          py::arg("sequence"), py::arg("from_slots"), py::arg("delta"))
      .def(
          "export_sequence",
          [](const KvCache& c, SequenceId sequence) {
            const std::vector<std::byte> blob = c.export_(sequence);
            return py::bytes(reinterpret_cast<const char*>(blob.data()), blob.size());
          },
          py::arg("sequence"))
      .def(
          "import_sequence",
          [](KvCache& c, const std::string& blob) {
            return c.import_(std::as_bytes(std::span(blob.data(), blob.size())));
          },
          py::arg("blob"));
}

}  // namespace

void register_kv_cache(py::module_& m) {
  py::class_<KvCache> type(m, "KvCache",
                           "The paged KV cache: 64-token pages, prefixes in a radix tree.");
  type.def(py::init(&make_cache), py::kw_only(), py::arg("num_layers"), py::arg("num_kv_heads"),
           py::arg("head_dim"), py::arg("dtype") = "bf16", py::arg("num_pages"),
           py::arg("index_unit") = 0, py::arg("index_means") = false, py::arg("index_bits") = 0)
      .def_property_readonly_static("page_size", [](py::object) { return KvCache::kPageSize; })
      .def_property_readonly("num_bytes", &KvCache::num_bytes)
      .def_property_readonly("num_pages", [](const KvCache& c) { return c.config().num_pages; })
      .def_property_readonly("free_pages", &KvCache::free_pages)
      .def_property_readonly("available_pages", &KvCache::available_pages)
      .def_property_readonly("cached_prefix_pages", &KvCache::cached_prefix_pages)
      .def(
          "create",
          [](KvCache& cache, const py::object& tokens) {
            int32_t cached = 0;
            const SequenceId id = cache.create(to_tokens(tokens, "tokens"), &cached);
            return py::make_tuple(id, cached);
          },
          py::arg("tokens"), "A sequence for a prompt: (id, tokens found in the prefix cache).")
      .def(
          "append",
          [](KvCache& cache, SequenceId sequence, const py::object& tokens) {
            cache.append(sequence, to_tokens(tokens, "tokens"));
          },
          py::arg("sequence"), py::arg("tokens"))
      .def("can_append", &KvCache::can_append, py::arg("sequence"), py::arg("count"))
      .def("commit", &KvCache::commit, py::arg("sequence"), py::arg("count"))
      .def(
          "keep",
          [](KvCache& cache, SequenceId sequence, const py::object& rows) {
            cache.keep(sequence, to_tokens(rows, "rows"));
          },
          py::arg("sequence"), py::arg("rows"),
          "Of the tokens that are not committed keeps and commits those with these indices.")
      .def("fork", &KvCache::fork, py::arg("sequence"))
      .def("rollback", &KvCache::rollback, py::arg("sequence"), py::arg("count"))
      .def("can_rollback", &KvCache::can_rollback, py::arg("sequence"), py::arg("count"))
      .def("publish", &KvCache::publish, py::arg("sequence"))
      .def("release", &KvCache::release, py::arg("sequence"), py::arg("keep_prefix") = true)
      .def("clear_prefixes", &KvCache::clear_prefixes)
      .def("length", &KvCache::length, py::arg("sequence"))
      .def("committed", &KvCache::committed, py::arg("sequence"))
      .def(
          "pages",
          [](const KvCache& cache, SequenceId sequence, int32_t group) {
            const auto pages = cache.pages(sequence, group);
            return std::vector<int32_t>(pages.begin(), pages.end());
          },
          py::arg("sequence"), py::arg("group") = 0,
          "Page ids of a group of layers; -1: a page that a window has freed.")
      .def(
          "tokens",
          [](const KvCache& cache, SequenceId sequence) {
            const auto tokens = cache.tokens(sequence);
            return std::vector<int32_t>(tokens.begin(), tokens.end());
          },
          py::arg("sequence"))
      .def(
          "k_page",
          [](py::object self, int32_t layer, int32_t page) {
            return page_view(std::move(self), layer, page, false);
          },
          py::arg("layer"), py::arg("page"), "A writable view: uint8 [num_kv_heads, bytes].")
      .def(
          "v_page",
          [](py::object self, int32_t layer, int32_t page) {
            return page_view(std::move(self), layer, page, true);
          },
          py::arg("layer"), py::arg("page"), "A writable view: uint8 [num_kv_heads, bytes].")
      .def("check_integrity", &KvCache::check_integrity);
  register_residency(type);
}

}  // namespace effinfer::bindings
