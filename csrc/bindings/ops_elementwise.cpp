#include "bindings/module.h"

namespace effinfer::bindings {

void register_ops_elementwise(py::module_&) {}

}  // namespace effinfer::bindings
