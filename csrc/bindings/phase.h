// "decode" or "prefill" in Python.
#pragma once

#include <string>

#include "effinfer/error.h"
#include "effinfer/profile.h"

namespace effinfer::bindings {

// `op` begins the message of the InvalidArgument for another text.
inline Phase parse_phase(const std::string& op, const std::string& phase) {
  if (phase == "decode") return Phase::decode;
  if (phase == "prefill") return Phase::prefill;
  throw InvalidArgument("[" + op + "] phase: expected \"decode\" or \"prefill\", got \"" + phase +
                        "\"");
}

}  // namespace effinfer::bindings
