// Parts of speculation that are written in Python, as the engine calls them.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "effinfer/speculative.h"

namespace effinfer::bindings {

// The native object of a part, or a wrapper that calls the Python one: propose() and observe() of
// a proposer once a step each. Throws InvalidArgument for what is neither.
std::shared_ptr<Proposer> to_proposer(const pybind11::object& part);
std::shared_ptr<Verifier> to_verifier(const pybind11::object& part);
std::shared_ptr<DraftController> to_controller(const pybind11::object& part);

}  // namespace effinfer::bindings
