#include "bindings/module.h"

namespace effinfer::bindings {

void register_ops_attention(py::module_&) {}

}  // namespace effinfer::bindings
