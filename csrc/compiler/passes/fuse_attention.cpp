// y = attention(q, kv); a = to_act(y)  ->  a = attention(q, kv) {as_operand = true}
//
// Who finishes a row of a KV head quantises it on the spot; so the columns of a group of query
// heads must be whole blocks of the operand.
#include "compiler/fuse_operand.h"
#include "compiler/passes.h"
#include "ops/operand.h"

namespace effinfer::compiler {

void fuse_attention(Graph& graph, const CompileOptions&) {
  Rewriter rewriter(graph);
  for (int index = 0; index < rewriter.size(); ++index) {
    if (!rewriter.is(index, "attention")) continue;
    const Node& node = rewriter.node(index);
    const int64_t group = node.get_int("heads") / node.get_int("kv_heads");
    if (group * node.get_int("head_dim") % ops::kOperandBlock != 0) continue;
    fuse_operand(rewriter, index, 0, OperandWriter::blocks);
  }
  rewriter.finish();
}

}  // namespace effinfer::compiler
