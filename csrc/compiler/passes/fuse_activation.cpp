// g, u = matmul(a, wg, wu); s = silu(g); y = mul(s, u)  ->  y = matmul_glu(a, wg, wu)
//
// and then, when y only feeds a matmul, matmul_glu writes its operand. A kernel has the sums of
// both parts in registers: neither gate nor up reaches memory. Works for every gate (op_table.cpp),
// whichever way round the product and the parts are.
#include "compiler/fuse_operand.h"
#include "compiler/matmul_parts.h"
#include "compiler/passes.h"
#include "graph/op_specs.h"

namespace effinfer::compiler {
namespace {

// The gated product at `index` with its activation on side `side`. Returns whether it was fused.
bool fuse(Rewriter& rewriter, int index, size_t side) {
  const Node& product = rewriter.node(index);
  const ValueId activated = product.inputs[side];
  const ValueId up = product.inputs[1 - side];
  const int activation = rewriter.producer(activated);
  if (activation < 0 || !graph::spec_of(rewriter.node(activation)).gate) return false;
  const ValueId gate = rewriter.node(activation).inputs[0];
  const int matmul = rewriter.producer(gate);
  if (!rewriter.is(matmul, "matmul") || rewriter.producer(up) != matmul || gate == up) return false;
  MatmulParts parts = MatmulParts::from(rewriter.node(matmul));
  const bool alone = rewriter.only_user(activated, "mul") == index &&
                     rewriter.only_user(up, "mul") == index && rewriter.users(gate).size() == 1 &&
                     rewriter.only_user(gate, rewriter.node(activation).op) == activation;
  if (parts.parts.size() != 2 || !alone) return false;
  if (parts.parts[0].residual || parts.parts[1].residual) return false;
  if (parts.parts[0].output != gate) std::swap(parts.parts[0], parts.parts[1]);

  Node fused = parts.to_node("matmul_glu");
  fused.outputs = product.outputs;
  fused.attributes["activation"] = rewriter.node(activation).op;
  fused.attributes["as_operand"] = false;
  rewriter.erase(activation);
  rewriter.erase(index);
  rewriter.replace(matmul, std::move(fused));
  fuse_operand(rewriter, matmul, 0, OperandWriter::blocks);
  return true;
}

}  // namespace

void fuse_activation(Graph& graph, const CompileOptions&) {
  Rewriter rewriter(graph);
  for (int index = 0; index < rewriter.size(); ++index) {
    for (size_t side = 0; side < 2 && rewriter.is(index, "mul"); ++side) {
      fuse(rewriter, index, side);
    }
  }
  rewriter.finish();
}

}  // namespace effinfer::compiler
