// The options of executables and engines from Python's keyword arguments. A new option is a field
// in effinfer/compiler.h or engine.h and a line in the table of options.cpp.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "effinfer/engine.h"

namespace effinfer::bindings {

// Each throws InvalidArgument for an unknown keyword or value, TypeError for a value of another
// type. None is the default of an option that may be left open.
CompileOptions to_compile_options(const pybind11::kwargs& keywords);
EngineOptions to_engine_options(const pybind11::kwargs& keywords);

// The keywords as a signature has them: "precision: str = 'fast', deterministic: ...".
std::string compile_option_signature();
std::string engine_option_signature();

}  // namespace effinfer::bindings
