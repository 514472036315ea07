// q = matmul(a, wq); k = matmul(a, wk); v = matmul(a, wv)  ->  q, k, v = matmul(a, wq, wk, wv)
//
// One pass over the threads instead of three, and one reading of the operand. Parts keep their own
// weights, of any types. The merged node stands where the first one did: the operand and the
// weights are known there.
#include "compiler/matmul_parts.h"
#include "compiler/passes.h"
#include "compiler/rewriter.h"
#include "ops/matmul.h"

namespace effinfer::compiler {

void merge_projections(Graph& graph, const CompileOptions&) {
  Rewriter rewriter(graph);
  for (int index = 0; index < rewriter.size(); ++index) {
    if (!rewriter.is(index, "matmul")) continue;
    MatmulParts merged = MatmulParts::from(rewriter.node(index));
    const std::vector<int> users = rewriter.users(merged.x);
    const size_t before = merged.parts.size();
    for (const int other : users) {
      if (other <= index || !rewriter.is(other, "matmul")) continue;
      const MatmulParts more = MatmulParts::from(rewriter.node(other));
      const size_t parts = merged.parts.size() + more.parts.size();
      const bool has_residual = !rewriter.node(other).get_ints("residual").empty();
      if (parts > static_cast<size_t>(ops::kMaxMatmulParts) || has_residual) continue;
      merged.parts.insert(merged.parts.end(), more.parts.begin(), more.parts.end());
      rewriter.erase(other);
    }
    if (merged.parts.size() > before) rewriter.replace(index, merged.to_node());
  }
  rewriter.finish();
}

}  // namespace effinfer::compiler
