// y = rms_norm(x, w); a = to_act(y)  ->  a = rms_norm(x, w) {as_operand = true}
//
// The norm has the row in cache: it quantises it on the spot, also with one scale for the whole row
// as ternary matmuls want it. On a GPU that is a kernel of its own.
#include "compiler/fuse_operand.h"
#include "compiler/passes.h"

namespace effinfer::compiler {

void fuse_norm(Graph& graph, const CompileOptions& options) {
  const bool on_cpu = options.device.kind == DeviceKind::cpu;
  const OperandWriter writer = on_cpu ? OperandWriter::rows : OperandWriter::blocks;
  Rewriter rewriter(graph);
  for (int index = 0; index < rewriter.size(); ++index) {
    // A norm of groups (q/k norm) never feeds a matmul.
    if (rewriter.is(index, "rms_norm") && rewriter.node(index).get_int("groups") == 1) {
      fuse_operand(rewriter, index, 0, writer);
    }
  }
  rewriter.finish();
}

}  // namespace effinfer::compiler
