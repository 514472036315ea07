#pragma once

#include "compiler/rewriter.h"

namespace effinfer::compiler {

// How a node writes its output: a whole row at once, or blocks of columns as they are finished. The
// operand of a ternary matmul has one scale a row, so it cannot be written by blocks.
enum class OperandWriter { rows, blocks };

// When output `output` of a node is only converted to a matmul operand, the node writes the operand
// itself (`as_operand = true`) and the conversion goes; its arithmetic stays, where it has been
// decided. Returns whether it did.
bool fuse_operand(Rewriter& rewriter, int index, size_t output, OperandWriter writer);

}  // namespace effinfer::compiler
