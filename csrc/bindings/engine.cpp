#include "bindings/module.h"

namespace effinfer::bindings {

void register_engine(py::module_&) {}

}  // namespace effinfer::bindings
