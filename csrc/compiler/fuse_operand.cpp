#include "compiler/fuse_operand.h"

namespace effinfer::compiler {

bool fuse_operand(Rewriter& rewriter, int index, size_t output) {
  const int conversion = rewriter.only_user(rewriter.node(index).outputs[output], "to_act");
  if (conversion < 0) return false;
  Node node = rewriter.node(index);
  node.outputs[output] = rewriter.node(conversion).outputs[0];
  node.attributes["as_operand"] = true;
  rewriter.erase(conversion);
  rewriter.replace(index, std::move(node));
  return true;
}

}  // namespace effinfer::compiler
