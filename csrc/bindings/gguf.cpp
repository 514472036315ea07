#include "bindings/module.h"

namespace effinfer::bindings {

void register_gguf(py::module_&) {}

}  // namespace effinfer::bindings
