// Which arithmetic each phase uses for a matmul operand.
#pragma once

#include <string_view>

#include "effinfer/compiler.h"
#include "effinfer/graph.h"
#include "kernels/activation.h"

namespace effinfer::compiler {

// Of an attribute "int8", "bf16" or "f32"; throws FormatError.
kernels::Arithmetic parse_arithmetic(std::string_view text);

std::string_view phase_key(Phase phase);  // the attribute that holds it

// Of the operand of ternary_linear, in both phases and with any options: it is part of the model.
inline constexpr std::string_view kTernaryArithmetic = "int8_token";

// Annotates a node that makes an operand.
void set_arithmetic(Node& node, std::string_view decode, std::string_view prefill);

// Whether canonicalize has decided the arithmetic of the node's operand.
bool is_ternary_operand(const Node& node);

// Whether this machine multiplies bfloat16 faster than float32: AVX512-BF16 within the ISA cap.
bool bf16_panels();

}  // namespace effinfer::compiler
