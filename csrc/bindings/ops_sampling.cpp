#include "bindings/arguments.h"
#include "bindings/module.h"
#include "effinfer/ops/row_sampling.h"

namespace effinfer::bindings {
namespace {

using Pool = std::shared_ptr<ThreadPool>;

// What the functions have in common: the rows and their filters.
class RowArguments : public Arguments {
 public:
  RowArguments(std::string op, ops::RowKind row_kind) : Arguments(std::move(op)), kind_(row_kind) {}

  ops::RowKind kind() const { return kind_; }
  TensorView rows(const py::array& x) const {
    return view(x, kind_ == ops::RowKind::logits ? "logits" : "probs");
  }
  ops::RowFilters filters(const py::object& temperature, const py::object& top_k,
                          const py::object& top_p, const py::object& min_p, bool joint) const {
    return {optional(temperature, "temperature"), optional(top_k, "top_k"),
            optional(top_p, "top_p"), optional(min_p, "min_p"), joint};
  }

 private:
  ops::RowKind kind_;
};

ops::RowKind kind_of(const std::string& kind) {
  if (kind == "logits") return ops::RowKind::logits;
  if (kind == "probs") return ops::RowKind::probs;
  throw InvalidArgument("[row_sampling] kind: expected \"logits\" or \"probs\", got \"" + kind +
                        "\"");
}

void* writable_data(py::array& array, const std::string& label) {
  if (!array.writeable())
    throw InvalidArgument(label + ": expected a writable array, got read-only");
  return array.mutable_data();
}

py::tuple sample_rows(const std::string& op, const std::string& kind, const py::array& x,
                      const py::array& seed, const py::array& offset, const py::object& temperature,
                      const py::object& top_k, const py::object& top_p, const py::object& min_p,
                      bool joint, const py::object& indices, bool with_valid, const Pool& pool) {
  const RowArguments arguments(op, kind_of(kind));
  const TensorView rows = arguments.rows(x);
  const ops::RowFilters filters = arguments.filters(temperature, top_k, top_p, min_p, joint);
  const TensorView places = arguments.optional(indices, "indices");
  const ops::RowSeeds seeds{arguments.view(seed, "seed"), arguments.view(offset, "offset")};
  const int64_t outputs = places.data != nullptr ? places.dims.num_elements()
                          : rows.dims.rank() > 0 ? rows.dims[0]
                                                 : 0;
  py::array_t<int32_t> samples(outputs);
  py::array_t<bool> valid(with_valid ? outputs : 0);
  int32_t* data = samples.mutable_data();
  auto* flags = with_valid ? reinterpret_cast<uint8_t*>(valid.mutable_data()) : nullptr;
  {
    const py::gil_scoped_release release;
    ops::sample_rows(op, arguments.kind(), rows, filters, places, seeds, data, flags,
                     pool_or_default(pool));
  }
  return py::make_tuple(samples, valid);
}

void filter_rows(const std::string& op, const std::string& kind, const py::array& x,
                 const std::string& out_kind, py::array out, const py::object& temperature,
                 const py::object& top_k, const py::object& top_p, const py::object& min_p,
                 bool joint, const Pool& pool) {
  const RowArguments arguments(op, kind_of(kind));
  const TensorView rows = arguments.rows(x);
  const ops::RowFilters filters = arguments.filters(temperature, top_k, top_p, min_p, joint);
  const TensorView result = arguments.view(out, "out");
  if (!(result.dims == rows.dims)) {
    throw InvalidArgument(arguments.label("out") + ": expected shape " + rows.dims.to_string() +
                          ", got " + result.dims.to_string());
  }
  void* data = writable_data(out, arguments.label("out"));
  const ops::RowKind result_kind = kind_of(out_kind);
  const py::gil_scoped_release release;
  ops::filter_rows(op, arguments.kind(), rows, filters, result_kind, result.dtype, data,
                   pool_or_default(pool));
}

py::array_t<int64_t> top_k(const py::array& x, int64_t k, bool sorted, py::array values,
                           const Pool& pool) {
  const TensorView rows = view_of(x, "[top_k] input");
  const TensorView out = view_of(values, "[top_k] values");
  const int64_t batch = rows.dims.rank() > 0 ? rows.dims[0] : 0;
  if (!(out.dims == Dims{batch, k}) || out.dtype != rows.dtype) {
    throw InvalidArgument("[top_k] values: expected " + std::string(name(rows.dtype)) + " " +
                          Dims{batch, k}.to_string() + ", got " + std::string(name(out.dtype)) +
                          " " + out.dims.to_string());
  }
  py::array_t<int64_t> ids({batch, k});
  void* data = writable_data(values, "[top_k] values");
  int64_t* id_data = ids.mutable_data();
  const py::gil_scoped_release release;
  ops::top_k("top_k", rows, k, sorted, data, id_data, pool_or_default(pool));
  return ids;
}

py::tuple chain_speculative_sampling(const py::array& draft_probs, const py::array& draft_token_ids,
                                     const py::array& target_probs, const py::array& seed,
                                     const py::array& offset, const Pool& pool) {
  const RowArguments arguments("chain_speculative_sampling", ops::RowKind::probs);
  const TensorView drafts = arguments.view(draft_probs, "draft_probs");
  const TensorView ids = arguments.view(draft_token_ids, "draft_token_ids");
  const TensorView targets = arguments.view(target_probs, "target_probs");
  const ops::RowSeeds seeds{arguments.view(seed, "seed"), arguments.view(offset, "offset")};
  const bool shaped = drafts.dims.rank() == 3;
  const int64_t batch = shaped ? drafts.dims[0] : 0;
  const int64_t count = shaped ? drafts.dims[1] : 0;
  py::array_t<int32_t> tokens({batch, count + 1});
  py::array_t<int32_t> accepted(batch);
  py::array_t<int32_t> emitted(batch);
  int32_t* token_data = tokens.mutable_data();
  int32_t* accepted_data = accepted.mutable_data();
  int32_t* emitted_data = emitted.mutable_data();
  std::fill(accepted_data, accepted_data + batch, 0);
  std::fill(emitted_data, emitted_data + batch, 0);
  {
    const py::gil_scoped_release release;
    ops::chain_speculative_sampling(drafts, ids, targets, seeds, token_data, accepted_data,
                                    emitted_data, pool_or_default(pool));
  }
  return py::make_tuple(tokens, accepted, emitted);
}

void apply_token_bitmask(py::array logits, const py::array& bitmask, const py::object& indices,
                         const Pool& pool) {
  const std::string prefix = "[apply_token_bitmask] ";
  const TensorView rows = view_of(logits, prefix + "logits");
  const TensorView mask = view_of(bitmask, prefix + "bitmask");
  const TensorView places = optional_view(indices, prefix + "indices");
  void* data = writable_data(logits, prefix + "logits");
  const py::gil_scoped_release release;
  ops::apply_token_bitmask(rows, data, mask, places, pool_or_default(pool));
}

}  // namespace

void register_ops_sampling(py::module_& m) {
  m.def("sample_rows", &sample_rows, py::arg("op"), py::arg("kind"), py::arg("x"), py::arg("seed"),
        py::arg("offset"), py::kw_only(), py::arg("temperature") = py::none(),
        py::arg("top_k") = py::none(), py::arg("top_p") = py::none(), py::arg("min_p") = py::none(),
        py::arg("joint") = false, py::arg("indices") = py::none(), py::arg("with_valid") = false,
        py::arg("pool") = py::none());
  m.def("filter_rows", &filter_rows, py::arg("op"), py::arg("kind"), py::arg("x"),
        py::arg("out_kind"), py::arg("out"), py::kw_only(), py::arg("temperature") = py::none(),
        py::arg("top_k") = py::none(), py::arg("top_p") = py::none(), py::arg("min_p") = py::none(),
        py::arg("joint") = false, py::arg("pool") = py::none());
  m.def("top_k", &top_k, py::arg("input"), py::arg("k"), py::arg("sorted"), py::arg("values"),
        py::arg("pool") = py::none());
  m.def("chain_speculative_sampling", &chain_speculative_sampling, py::arg("draft_probs"),
        py::arg("draft_token_ids"), py::arg("target_probs"), py::arg("seed"), py::arg("offset"),
        py::arg("pool") = py::none());
  m.def("apply_token_bitmask", &apply_token_bitmask, py::arg("logits"), py::arg("bitmask"),
        py::arg("indices") = py::none(), py::arg("pool") = py::none());
}

}  // namespace effinfer::bindings
