#include "compiler/fuse_operand.h"

#include "compiler/arithmetic.h"
#include "graph/op_specs.h"

namespace effinfer::compiler {

bool fuse_operand(Rewriter& rewriter, int index, size_t output, OperandWriter writer) {
  const int conversion = rewriter.only_user(rewriter.node(index).outputs[output], "to_act");
  if (conversion < 0) return false;
  const bool ternary = graph::is_ternary_operand(rewriter.node(conversion));
  if (ternary && writer == OperandWriter::blocks) return false;
  Node node = rewriter.node(index);
  node.outputs[output] = rewriter.node(conversion).outputs[0];
  node.attributes["as_operand"] = true;
  if (ternary) set_arithmetic(node, graph::kTernaryArithmetic, graph::kTernaryArithmetic);
  rewriter.erase(conversion);
  rewriter.replace(index, std::move(node));
  return true;
}

}  // namespace effinfer::compiler
