#include "bindings/arguments.h"
#include "bindings/device_array.h"
#include "bindings/module.h"
#include "effinfer/ops/row_sampling.h"
#include "effinfer/ops/top_windows.h"

namespace effinfer::bindings {
namespace {

// What the functions have in common: the rows and their filters.
class RowArguments : public Arguments {
 public:
  RowArguments(std::string op, ops::RowKind row_kind) : Arguments(std::move(op)), kind_(row_kind) {}

  ops::RowKind kind() const { return kind_; }
  TensorView rows(const AnyArray& x) const {
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

void sample_rows(const std::string& op, const std::string& kind, const AnyArray& x,
                 const AnyArray& seed, const AnyArray& offset, const AnyArray& samples,
                 const py::object& valid, const py::object& temperature, const py::object& top_k,
                 const py::object& top_p, const py::object& min_p, bool joint,
                 const py::object& indices, bool check_values, const Where& pool) {
  const RowArguments arguments(op, kind_of(kind));
  const TensorView rows = arguments.rows(x);
  const ops::RowFilters filters = arguments.filters(temperature, top_k, top_p, min_p, joint);
  const TensorView places = arguments.optional(indices, "indices");
  const ops::RowSeeds seeds{arguments.view(seed, "seed"), arguments.view(offset, "offset")};
  const StridedView tokens = arguments.written(samples, "samples");
  const StridedView flags = arguments.written(valid, "valid");
  const py::gil_scoped_release release;
  ops::sample_rows(op, arguments.kind(), rows, filters, places, seeds, tokens, flags,
                   executor_of(pool), check_values);
}

void filter_rows(const std::string& op, const std::string& kind, const AnyArray& x,
                 const std::string& out_kind, const AnyArray& out, const py::object& temperature,
                 const py::object& top_k, const py::object& top_p, const py::object& min_p,
                 bool joint, const Where& pool) {
  const RowArguments arguments(op, kind_of(kind));
  const TensorView rows = arguments.rows(x);
  const ops::RowFilters filters = arguments.filters(temperature, top_k, top_p, min_p, joint);
  const StridedView result = arguments.written(out, "out");
  const ops::RowKind result_kind = kind_of(out_kind);
  const py::gil_scoped_release release;
  ops::filter_rows(op, arguments.kind(), rows, filters, result_kind, result, executor_of(pool));
}

void top_k(const AnyArray& x, int64_t k, bool sorted, const AnyArray& values, const AnyArray& ids,
           const Where& pool) {
  const Arguments arguments("top_k");
  const TensorView rows = arguments.view(x, "input");
  const StridedView out = arguments.written(values, "values");
  const StridedView places = arguments.written(ids, "ids");
  const py::gil_scoped_release release;
  ops::top_k("top_k", rows, k, sorted, out, places, executor_of(pool));
}

void window_rows(const std::string& op, const AnyArray& x, const py::object& lengths,
                 const py::object& starts, bool mirrored, const AnyArray& out, const Where& pool) {
  const Arguments arguments(op);
  const StridedView rows = arguments.strided(x, "input");
  const ops::RowWindows windows{arguments.optional(lengths, "lengths"),
                                arguments.optional(starts, "row_starts"), mirrored};
  const StridedView result = arguments.written(out, "out");
  const py::gil_scoped_release release;
  ops::window_rows(op, rows, windows, result, executor_of(pool));
}

void place_chosen(const std::string& op, const AnyArray& ids, int64_t width,
                  const py::object& lengths, const py::object& starts, bool mirrored,
                  const AnyArray& out, const py::object& raw, const py::object& offsets,
                  const py::object& table, const py::object& row_to_batch, const py::object& first,
                  int32_t page_size, const Where& pool) {
  const Arguments arguments(op);
  const TensorView chosen = arguments.view(ids, "ids");
  const ops::RowWindows windows{arguments.optional(lengths, "lengths"),
                                arguments.optional(starts, "row_starts"), mirrored};
  const ops::ChosenPlaces places{arguments.optional(offsets, "offsets"),
                                 arguments.optional(table, "src_page_table"),
                                 arguments.optional(row_to_batch, "row_to_batch"),
                                 arguments.optional(first, "page_table_row_starts"), page_size};
  const StridedView result = arguments.written(out, "out");
  const StridedView indices = arguments.written(raw, "out_raw_indices");
  const py::gil_scoped_release release;
  ops::place_chosen(op, chosen, width, windows, places, result, indices, executor_of(pool));
}

void unmirror_chosen(const AnyArray& x, bool sorted, const AnyArray& ids, const AnyArray& values,
                     const Where& pool) {
  const Arguments arguments("top_k");
  const TensorView rows = arguments.view(x, "input");
  const StridedView places = arguments.written(ids, "ids");
  const StridedView highest = arguments.written(values, "values");
  const py::gil_scoped_release release;
  ops::unmirror_chosen("top_k", rows, sorted, places, highest, executor_of(pool));
}

void chain_speculative_sampling(const AnyArray& draft_probs, const AnyArray& draft_token_ids,
                                const AnyArray& target_probs, const AnyArray& seed,
                                const AnyArray& offset, const AnyArray& tokens,
                                const AnyArray& accepted, const AnyArray& emitted,
                                const Where& pool) {
  const Arguments arguments("chain_speculative_sampling");
  const TensorView drafts = arguments.view(draft_probs, "draft_probs");
  const TensorView ids = arguments.view(draft_token_ids, "draft_token_ids");
  const TensorView targets = arguments.view(target_probs, "target_probs");
  const ops::RowSeeds seeds{arguments.view(seed, "seed"), arguments.view(offset, "offset")};
  const StridedView to = arguments.written(tokens, "tokens");
  const StridedView counts = arguments.written(accepted, "accepted");
  const StridedView more_counts = arguments.written(emitted, "emitted");
  const py::gil_scoped_release release;
  ops::chain_speculative_sampling(drafts, ids, targets, seeds, to, counts, more_counts,
                                  executor_of(pool));
}

void apply_token_bitmask(const AnyArray& logits, const AnyArray& bitmask, const py::object& indices,
                         const Where& pool) {
  const Arguments arguments("apply_token_bitmask");
  const StridedView rows = arguments.written(logits, "logits");
  const TensorView mask = arguments.view(bitmask, "bitmask");
  const TensorView places = arguments.optional(indices, "indices");
  const py::gil_scoped_release release;
  ops::apply_token_bitmask(rows, mask, places, executor_of(pool));
}

}  // namespace

void register_ops_sampling(py::module_& m) {
  m.def("sample_rows", &sample_rows, py::arg("op"), py::arg("kind"), py::arg("x"), py::arg("seed"),
        py::arg("offset"), py::arg("samples"), py::arg("valid") = py::none(), py::kw_only(),
        py::arg("temperature") = py::none(), py::arg("top_k") = py::none(),
        py::arg("top_p") = py::none(), py::arg("min_p") = py::none(), py::arg("joint") = false,
        py::arg("indices") = py::none(), py::arg("check_values") = false,
        py::arg("pool") = py::none());
  m.def("filter_rows", &filter_rows, py::arg("op"), py::arg("kind"), py::arg("x"),
        py::arg("out_kind"), py::arg("out"), py::kw_only(), py::arg("temperature") = py::none(),
        py::arg("top_k") = py::none(), py::arg("top_p") = py::none(), py::arg("min_p") = py::none(),
        py::arg("joint") = false, py::arg("pool") = py::none());
  m.def("top_k", &top_k, py::arg("input"), py::arg("k"), py::arg("sorted"), py::arg("values"),
        py::arg("ids"), py::arg("pool") = py::none());
  m.def("window_rows", &window_rows, py::arg("op"), py::arg("x"), py::arg("lengths"),
        py::arg("starts"), py::arg("mirrored"), py::arg("out"), py::arg("pool"));
  m.def("place_chosen", &place_chosen, py::arg("op"), py::arg("ids"), py::arg("width"),
        py::arg("lengths"), py::arg("starts"), py::arg("mirrored"), py::arg("out"),
        py::arg("raw") = py::none(), py::kw_only(), py::arg("offsets") = py::none(),
        py::arg("table") = py::none(), py::arg("row_to_batch") = py::none(),
        py::arg("first") = py::none(), py::arg("page_size") = 1, py::arg("pool") = py::none());
  m.def("unmirror_chosen", &unmirror_chosen, py::arg("x"), py::arg("sorted"), py::arg("ids"),
        py::arg("values"), py::arg("pool"));
  m.def("chain_speculative_sampling", &chain_speculative_sampling, py::arg("draft_probs"),
        py::arg("draft_token_ids"), py::arg("target_probs"), py::arg("seed"), py::arg("offset"),
        py::arg("tokens"), py::arg("accepted"), py::arg("emitted"), py::arg("pool") = py::none());
  m.def("apply_token_bitmask", &apply_token_bitmask, py::arg("logits"), py::arg("bitmask"),
        py::arg("indices") = py::none(), py::arg("pool") = py::none());
}

}  // namespace effinfer::bindings
