#include "effinfer/profile.h"

#include <pybind11/stl.h>

#include <map>

#include "bindings/module.h"
#include "effinfer/error.h"

namespace effinfer::bindings {
namespace {

py::dict kernel_dict(const KernelSummary& row) {
  py::dict dict;
  dict["kernel"] = row.info.kernel;
  dict["what"] = row.info.what;
  dict["arithmetic"] = row.info.arithmetic;
  dict["isa"] = std::string(name(row.info.isa));
  dict["calls"] = row.calls;
  dict["time_ns"] = row.time_ns;
  dict["threads_ns"] = row.threads_ns;
  dict["wait_ns"] = row.wait_ns;
  dict["least_ns"] = row.least_ns;
  dict["bytes"] = row.bytes;
  dict["ops"] = row.ops;
  return dict;
}

py::dict summary_dict(const Profile& profile, const std::string& phase) {
  if (phase != "decode" && phase != "prefill") {
    throw InvalidArgument("[profile] phase: expected \"decode\" or \"prefill\", got \"" + phase +
                          "\"");
  }
  const PhaseSummary sum = summarize(profile, phase == "decode" ? Phase::decode : Phase::prefill);
  py::dict dict;
  dict["steps"] = sum.steps;
  dict["tokens"] = sum.tokens;
  dict["barriers"] = sum.barriers;
  dict["step_ns"] = sum.step_ns;
  dict["host_ns"] = sum.host_ns;
  dict["between_ns"] = sum.between_ns;
  dict["between_count"] = sum.between_count;
  py::list kernels;
  for (const KernelSummary& row : sum.kernels) kernels.append(kernel_dict(row));
  dict["kernels"] = kernels;
  return dict;
}

}  // namespace

void register_profile(py::module_& m) {
  py::class_<Profile>(m, "Profile", "Times, bytes and operations of every kernel call of steps.")
      .def_readonly("device", &Profile::device, "\"cpu\" or \"cuda:0\".")
      .def_readonly("threads", &Profile::threads, "1 of a GPU, which times calls itself.")
      .def_readonly("num_layers", &Profile::num_layers)
      .def_readonly("dropped_steps", &Profile::dropped_steps,
                    "Steps that ran after the memory for records was used up.")
      .def_property_readonly("num_steps", [](const Profile& p) { return p.steps.size(); })
      .def("summary", &summary_dict, py::arg("phase"),
           "Sums over the steps of a phase; `kernels` has a row for each kernel and kind of\n"
           "weights, the longest first.")
      .def(
          "trace_json", [](const Profile& profile) { return trace_json(profile); },
          "Chrome's trace-event format, for Perfetto.")
      .def("overlapped_share", &overlapped_share, py::arg("beside"),
           "The share of its steps' time in which a step of another profile ran, too.");
  m.def(
      "trace_json",
      [](const std::map<std::string, Profile>& profiles) {
        std::vector<NamedProfile> list;
        for (const auto& [name, profile] : profiles) list.push_back({name, profile});
        return trace_json(list);
      },
      py::arg("profiles"), "A trace of several profiles, by name, on one axis of time.");
  m.def("measure_read_bandwidth", &measure_read_bandwidth, py::arg("pool"),
        py::call_guard<py::gil_scoped_release>(),
        "Bytes a second that the pool's threads read from memory together.");
  m.def(
      "measure_peak_ops",
      [](ThreadPool& pool, const std::string& arithmetic, const std::string& isa) {
        const Isa level = parse_isa(isa);
        const py::gil_scoped_release release;
        return measure_peak_ops(pool, arithmetic, level);
      },
      py::arg("pool"), py::arg("arithmetic"), py::arg("isa"),
      "Operations a second that the pool's threads do together in \"int8\", \"bf16\" or \"f32\";\n"
      "0 where that is not known.");
}

}  // namespace effinfer::bindings
