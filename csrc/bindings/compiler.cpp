#include "effinfer/compiler.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>

#include "bindings/module.h"
#include "bindings/options.h"
#include "bindings/phase.h"
#include "bindings/strings.h"
#include "effinfer/error.h"

namespace effinfer::bindings {
namespace {

using IntArray = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using WordArray = py::array_t<uint64_t, py::array::c_style | py::array::forcecast>;

std::span<const int32_t> span_of(const IntArray& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

py::array_t<float> run(Executable& executable, const IntArray& token_ids, const IntArray& positions,
                       const IntArray& qo_indptr, const IntArray& kv_indptr,
                       const IntArray& kv_indices, const IntArray& kv_len,
                       const IntArray& logit_rows, KvCache& cache, const std::string& phase,
                       const std::optional<WordArray>& ancestors,
                       const std::optional<IntArray>& tree_start) {
  const auto words = ancestors.value_or(WordArray(0));
  const auto starts = tree_start.value_or(IntArray(0));
  const Batch batch{parse_phase("run", phase),
                    span_of(token_ids),
                    span_of(positions),
                    span_of(qo_indptr),
                    span_of(kv_indptr),
                    span_of(kv_indices),
                    span_of(kv_len),
                    span_of(logit_rows),
                    {words.data(), static_cast<size_t>(words.size())},
                    span_of(starts)};
  py::array_t<float> logits({logit_rows.size(), static_cast<py::ssize_t>(executable.vocab_size())});
  const std::span<float> out(logits.mutable_data(), static_cast<size_t>(logits.size()));
  const py::gil_scoped_release release;
  executable.run(batch, cache, out);
  return logits;
}

void register_compile_options(py::module_& m) {
  py::options docstrings;
  docstrings.disable_function_signatures();  // one of keyword arguments would name none of them
  const std::string init = "__init__(self: effinfer._core.CompileOptions, *, " +
                           compile_option_signature() + ") -> None";
  py::class_<CompileOptions>(m, "CompileOptions", "How compile() is to build an executable.")
      .def(py::init(&to_compile_options), init.c_str());
}

void register_executable(py::module_& m) {
  py::class_<Executable, std::shared_ptr<Executable>>(
      m, "Executable", "A compiled graph: packed weights, an arena, a flat list of kernel calls.")
      .def("explain", &Executable::explain,
           "What runs in each phase and why, the packed weights, the arena.")
      .def(
          "run", &run, py::kw_only(), py::arg("token_ids"), py::arg("positions"),
          py::arg("qo_indptr"), py::arg("kv_indptr"), py::arg("kv_indices"), py::arg("kv_len"),
          py::arg("logit_rows"), py::arg("cache"), py::arg("phase") = "decode",
          py::arg("ancestors") = py::none(), py::arg("tree_start") = py::none(),
          "One step: appends K and V to the cache, returns float32 logits [R, vocab]. ancestors:\n"
          "uint64 [T] when the rows of a sequence are a tree of drafts, a bit for each of the\n"
          "tree's tokens that a row descends from, and its own; all 0: a chain. tree_start: int32\n"
          "[S], the tokens of the sequences that their trees begin with; by default the step's\n"
          "first ones.")
      .def(
          "make_cache",
          [](const Executable& executable, int32_t num_pages) {
            const DType dtype = *executable.options().kv_dtype;
            return std::make_unique<KvCache>(executable.kv_config(dtype, num_pages));
          },
          py::arg("num_pages"), "A KV cache of the shape that run() takes.")
      .def_property_readonly("graph", &Executable::graph, "The graph after all passes.")
      .def_property_readonly("output_names", &Executable::output_names,
                             "The graph's outputs behind the logits.")
      .def(
          "output",
          [](const Executable& executable, const std::string& name) {
            const NamedRows rows = executable.output(name);
            const auto cols = static_cast<py::ssize_t>(rows.cols);
            return py::array_t<float>({static_cast<py::ssize_t>(rows.values.size()) / cols, cols},
                                      rows.values.data());
          },
          py::arg("name"), "float32 [T or R, size]: an output as the last step left it.")
      .def_property_readonly("vocab_size", &Executable::vocab_size)
      .def_property_readonly("arena_bytes", &Executable::arena_bytes)
      .def_property_readonly("packed_bytes", &Executable::packed_bytes)
      .def_property_readonly("pack_cache", &Executable::pack_cache,
                             py::return_value_policy::reference_internal);
}

}  // namespace

void register_compiler(py::module_& m) {
  py::class_<PackCacheReport>(m, "PackCacheReport", "What a load had of the pack cache.")
      .def_property_readonly(
          "state", [](const PackCacheReport& self) { return std::string(name(self.state)); },
          "\"off\", \"absent\" (only of find_pack_cache), \"hit\", \"stored\" or \"failed\".")
      .def_property_readonly(
          "path", [](const PackCacheReport& self) { return to_python(self.path); },
          "Of the cached file; \"\" when it has no name.")
      .def_property_readonly(
          "reason", [](const PackCacheReport& self) { return to_python(self.reason); },
          "Why it is not a hit.");
  register_compile_options(m);
  register_executable(m);
  m.def(
      "compile",
      [](const Graph& graph, std::shared_ptr<WeightSource> weights,
         std::shared_ptr<ThreadPool> pool, const CompileOptions& options) {
        const py::gil_scoped_release release;
        return compile(graph, std::move(weights), std::move(pool), options);
      },
      py::arg("graph"), py::arg("weights"), py::arg("pool"), py::arg("options") = CompileOptions(),
      "Runs the passes, packs the weights, plans the memory, selects the kernels.");
  m.def(
      "compile_beside",
      [](const Executable& first, const Graph& graph, std::shared_ptr<WeightSource> weights) {
        const py::gil_scoped_release release;
        return compile_beside(first, graph, std::move(weights));
      },
      py::arg("first"), py::arg("graph"), py::arg("weights") = py::none(),
      "Another graph over the weights that an executable has packed, on its pool and with its\n"
      "options; weights: None is the first's source.");
  m.def(
      "find_pack_cache",
      [](const Graph& graph, const std::shared_ptr<WeightSource>& weights, const py::object& folder,
         const std::shared_ptr<ThreadPool>& pool) {
        const std::string path = to_path(folder);
        const py::gil_scoped_release release;
        return find_pack_cache(graph, *weights, path, *pool);
      },
      py::arg("graph"), py::arg("weights"), py::arg("folder"), py::arg("pool"),
      "What compile() with this folder would find.");
  m.def("pass_names", &pass_names, "The passes, in order.");
  m.def("run_pass", &run_pass, py::arg("name"), py::arg("graph"),
        py::arg("options") = CompileOptions(), "One pass alone.");
}

}  // namespace effinfer::bindings
