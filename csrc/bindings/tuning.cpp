#include "effinfer/tuning.h"

#include "bindings/module.h"
#include "bindings/strings.h"

namespace effinfer::bindings {

void register_tuning(py::module_& m) {
  m.def("describe_tuning", &describe_tuning,
        "How far ahead weights are asked for, in bytes into L2/L1, from how many rows "
        "ternary weights are unpacked, and why.");
  m.def(
      "recall_tuning", [](const py::object& folder) { recall_tuning(to_path(folder)); },
      py::arg("folder"), "Uses what was measured before and kept in the folder, if anything was.");
  m.def(
      "calibrate",
      [](ThreadPool& pool, const py::object& folder) {
        const std::string path = folder.is_none() ? std::string() : to_path(folder);
        const py::gil_scoped_release release;
        calibrate(pool, path);
      },
      py::arg("pool"), py::arg("folder").none(true),
      "Measures all of it anew, uses it and keeps it in the folder (None: nowhere).");
}

}  // namespace effinfer::bindings
