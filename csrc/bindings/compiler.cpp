#include "effinfer/compiler.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bindings/module.h"
#include "bindings/options.h"
#include "bindings/phase.h"
#include "bindings/strings.h"
#include "compiler/compile_halves.h"
#include "effinfer/error.h"

namespace effinfer::bindings {
namespace {

using IntArray = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using FloatArray = py::array_t<float, py::array::c_style | py::array::forcecast>;
using FlagArray = py::array_t<uint8_t, py::array::c_style | py::array::forcecast>;
using WordArray = py::array_t<uint64_t, py::array::c_style | py::array::forcecast>;

std::span<const int32_t> span_of(const IntArray& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

py::array_t<float> run(Executable& executable, const IntArray& token_ids, const IntArray& positions,
                       const IntArray& qo_indptr, const IntArray& kv_indptr,
                       const IntArray& kv_indices, const IntArray& kv_len,
                       const IntArray& logit_rows, KvCache& cache, const std::string& phase,
                       const std::optional<WordArray>& ancestors,
                       const std::optional<IntArray>& tree_start,
                       const std::optional<FlagArray>& dense,
                       const std::map<std::string, FloatArray>& float_inputs) {
  const auto words = ancestors.value_or(WordArray(0));
  std::vector<FloatInput> floats;
  for (const auto& [name, values] : float_inputs) {
    floats.push_back({name, {values.data(), static_cast<size_t>(values.size())}});
  }
  const auto starts = tree_start.value_or(IntArray(0));
  const auto flags = dense.value_or(FlagArray(0));
  const Batch batch{parse_phase("run", phase),
                    span_of(token_ids),
                    span_of(positions),
                    span_of(qo_indptr),
                    span_of(kv_indptr),
                    span_of(kv_indices),
                    span_of(kv_len),
                    span_of(logit_rows),
                    {words.data(), static_cast<size_t>(words.size())},
                    span_of(starts),
                    {flags.data(), static_cast<size_t>(flags.size())},
                    floats};
  py::array_t<float> logits({logit_rows.size(), static_cast<py::ssize_t>(executable.vocab_size())});
  const std::span<float> out(logits.mutable_data(), static_cast<size_t>(logits.size()));
  const py::gil_scoped_release release;
  executable.run(batch, cache, out);
  return logits;
}

void register_front_layers(py::module_& m) {
  py::class_<FrontLayers>(m, "FrontLayers", "The first layers of a model on a device of their own.")
      .def(py::init([](const std::string& device, std::optional<int32_t> count,
                       std::shared_ptr<ThreadPool> pool) {
             return FrontLayers{parse_device(device, "[FrontLayers] device"), count,
                                std::move(pool)};
           }),
           py::arg("device"), py::kw_only(), py::arg("count") = py::none(),
           py::arg("pool") = nullptr,
           "count: how many; None: what memory and its rates say. pool: the CPU's threads; None:\n"
           "those of the other layers.");
  m.def("layers_of", &layers_of, py::arg("graph"),
        "The numbers of a graph's layers, in the order in which they run.");
  m.def(
      "cut_graph",
      [](const Graph& graph, int32_t front_layers) {
        GraphHalves halves = cut_graph(graph, front_layers);
        return std::make_pair(std::move(halves.front), std::move(halves.back));
      },
      py::arg("graph"), py::arg("front_layers"),
      "A graph in two behind its first layers: (front, back). The front returns no logits but "
      "what\n"
      "are float inputs of the back.");
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
          py::arg("dense") = py::none(),
          py::arg("float_inputs") = std::map<std::string, FloatArray>(),
          "One step: appends K and V to the cache, returns float32 logits [R, vocab]. ancestors:\n"
          "uint64 [T] when the rows of a sequence are a tree of drafts, a bit for each of the\n"
          "tree's tokens that a row descends from, and its own; all 0: a chain. tree_start: int32\n"
          "[S], the tokens of the sequences that their trees begin with; by default the step's\n"
          "first ones. dense: uint8 [S], 1 for sequences whose rows visit all keys, whatever the\n"
          "graph's indices choose. float_inputs: float32 [T, size] of each float input of the "
          "graph.")
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
      .def_property_readonly("placement", &ExecutableHalves::placement,
                             "Which layers are on which of two devices, and why; else \"\".")
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
  register_front_layers(m);
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
