#include "bindings/module.h"

namespace effinfer::bindings {

void register_sampling(py::module_&) {}

}  // namespace effinfer::bindings
