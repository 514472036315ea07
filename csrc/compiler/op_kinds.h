// The kinds of an operator's problem by the names that a graph has for them. Each function throws
// FormatError for a name that it does not know.
#pragma once

#include <string_view>

#include "ops/elementwise.h"
#include "ops/matmul.h"

namespace effinfer::compiler {

ops::UnaryOp parse_unary_op(std::string_view text);  // an op of one input, "copy" excepted
ops::BinaryOp parse_binary_op(std::string_view text);
ops::Glu parse_glu(std::string_view text);  // the name of an activation

}  // namespace effinfer::compiler
