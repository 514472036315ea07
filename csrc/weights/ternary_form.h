// How the weights of ternary matmuls are packed. Results are the same bits: it is about speed.
#pragma once

#include <cstddef>

#include "effinfer/compiler.h"
#include "effinfer/device.h"
#include "ops/packed_weight.h"

namespace effinfer::weights {

// The form of all ternary weights of a model, `num_bytes` at 2 bits. Automatic: 1.6 bits where they
// are read from memory in every step and the kernels that decode them for free exist, 2 bits
// elsewhere.
ops::TernaryForm ternary_form(TernaryPacking packing, size_t num_bytes, const Target& target);

}  // namespace effinfer::weights
