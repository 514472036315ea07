#include "bindings/module.h"

namespace effinfer::bindings {

void register_compiler(py::module_&) {}

}  // namespace effinfer::bindings
