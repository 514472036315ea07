#include "bindings/module.h"

namespace effinfer::bindings {

void register_graph(py::module_&) {}

}  // namespace effinfer::bindings
