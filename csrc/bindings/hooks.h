// Hooks of an engine from Python: those of the core, and objects with `technique`, `triggers` (a
// dict), run(event, sequence) and, where they want it, forget(request).
#pragma once

#include <pybind11/pybind11.h>

#include "effinfer/hooks.h"

namespace effinfer::bindings {

// Throws InvalidArgument for an object that is none.
StepHooks to_hooks(const pybind11::object& parts);

}  // namespace effinfer::bindings
