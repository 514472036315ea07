// Which arithmetic each phase uses for a matmul operand.
#pragma once

#include <string_view>

#include "effinfer/compiler.h"
#include "kernels/activation.h"

namespace effinfer::compiler {

// Of an attribute "int8", "bf16" or "f32"; throws FormatError.
kernels::Arithmetic parse_arithmetic(std::string_view text);

std::string_view phase_key(Phase phase);  // the attribute that holds it

// Whether this machine multiplies bfloat16 faster than float32: AVX512-BF16 within the ISA cap.
bool bf16_panels();

}  // namespace effinfer::compiler
