#include "bindings/module.h"

namespace effinfer::bindings {

void register_ops_matmul(py::module_&) {}

}  // namespace effinfer::bindings
