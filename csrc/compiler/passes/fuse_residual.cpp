// y = matmul(a, w); s = add(y, r)     ->  s = matmul(a, w, r) {residual = [0]}
// s = add(x, r); n = rms_norm(s, w)   ->  s, n = add_rms_norm(x, r, w)
//
// The sum is added to the finished value of the matmul, as it is without the pass: the same bits.
// The second form takes what the first leaves, such as the sums after Gemma's post-norms.
#include "compiler/matmul_parts.h"
#include "compiler/passes.h"
#include "compiler/rewriter.h"

namespace effinfer::compiler {
namespace {

// The sum at `index` whose input `side` comes from a matmul.
bool fuse_matmul(Rewriter& rewriter, int index, size_t side) {
  const Node& sum = rewriter.node(index);
  const ValueId product = sum.inputs[side];
  const ValueId residual = sum.inputs[1 - side];
  const int matmul = rewriter.producer(product);
  if (!rewriter.is(matmul, "matmul") || rewriter.only_user(product, "add") != index) return false;
  MatmulParts parts = MatmulParts::from(rewriter.node(matmul));
  const bool single = parts.parts.size() == 1;
  // A matmul of one part moves down to the sum; one of many stays, and needs the residual there.
  if (!single && rewriter.producer(residual) >= matmul) return false;
  for (MatmulParts::Part& part : parts.parts) {
    if (part.output != product) continue;
    if (part.residual) return false;
    part.residual = residual;
    part.output = sum.outputs[0];
  }
  Node fused = parts.to_node();
  rewriter.erase(single ? matmul : index);
  rewriter.replace(single ? index : matmul, std::move(fused));
  return true;
}

void fuse_norm_of_sum(Rewriter& rewriter, int index) {
  const Node sum = rewriter.node(index);
  for (const int user : rewriter.users(sum.outputs[0])) {
    if (!rewriter.is(user, "rms_norm") || rewriter.node(user).get_int("groups") != 1) continue;
    const Node norm = rewriter.node(user);
    Node fused{"add_rms_norm",
               {sum.inputs[0], sum.inputs[1], norm.inputs[1]},
               norm.attributes,
               {sum.outputs[0], norm.outputs[0]}};
    fused.attributes.erase("groups");
    rewriter.erase(user);
    rewriter.replace(index, std::move(fused));
    return;
  }
}

}  // namespace

void fuse_residual(Graph& graph, const CompileOptions&) {
  Rewriter rewriter(graph);
  for (int index = 0; index < rewriter.size(); ++index) {
    for (size_t side = 0; side < 2 && rewriter.is(index, "add"); ++side) {
      fuse_matmul(rewriter, index, side);
    }
    if (rewriter.is(index, "add")) fuse_norm_of_sum(rewriter, index);
  }
  rewriter.finish();
}

}  // namespace effinfer::compiler
