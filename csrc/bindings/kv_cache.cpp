#include "bindings/module.h"

namespace effinfer::bindings {

void register_kv_cache(py::module_&) {}

}  // namespace effinfer::bindings
