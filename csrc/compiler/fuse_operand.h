#pragma once

#include "compiler/rewriter.h"

namespace effinfer::compiler {

// When output `output` of a node is only converted to a matmul operand, the node writes the operand
// itself (`as_operand = true`) and the conversion goes. Returns whether it did.
bool fuse_operand(Rewriter& rewriter, int index, size_t output);

}  // namespace effinfer::compiler
