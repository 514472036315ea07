// What chooses the keys that attention visits in prefill.
#include <vector>

#include "compiler/lowering.h"
#include "ops/prefill_index.h"

namespace effinfer::compiler {
namespace {

using ops::IndexedHead;

// An index without a predecessor also writes the lists of the KV heads that it is not for: the
// indices that follow may be for these; what none is for visits all keys.
const IndexedHead* indexed_heads(Lowering& lowering, const Node& node) {
  const auto heads = static_cast<size_t>(node.get_int("kv_heads"));
  const std::vector<int64_t>& only = node.get_ints("only");
  const IndexedHead others = node.inputs.size() == 3 ? IndexedHead::other : IndexedHead::dense;
  std::vector<IndexedHead> indexed(heads, only.empty() ? IndexedHead::chosen : others);
  for (const int64_t head : only) indexed[static_cast<size_t>(head)] = IndexedHead::chosen;
  return lowering.constant(indexed);
}

int32_t int_attribute(const Node& node, std::string_view key) {
  return static_cast<int32_t>(node.get_int(key));
}

ops::PrefillIndexInputs index_inputs(Lowering& lowering, const Node& node) {
  ops::PrefillIndexInputs in;
  in.q_stride = lowering.cols(node.inputs[0]);
  in.num_qo_heads = int_attribute(node, "heads");
  in.kv.num_kv_heads = int_attribute(node, "kv_heads");
  in.kv.head_dim = int_attribute(node, "head_dim");
  in.kv.dtype = lowering.kv_dtype();
  in.sm_scale = static_cast<float>(node.get_float("sm_scale"));
  in.sink_tokens = int_attribute(node, "sink_tokens");
  in.local_tokens = int_attribute(node, "local_tokens");
  in.min_tokens = int_attribute(node, "min_tokens");
  in.heads = indexed_heads(lowering, node);
  in.max_kv_len = lowering.max_seq_len();
  return in;
}

TopScores top_scores(const Node& node, std::string_view count, std::string_view mass) {
  return {int_attribute(node, count), static_cast<float>(node.get_float(mass))};
}

// An index does nothing in a step whose sequences all visit all keys.
template <class Problem>
void add_index(Lowering& lowering, const Node& node, const Problem& problem) {
  const auto prepare = [q = lowering.floats(node.inputs[0]), layer = int_attribute(node, "layer"),
                        slot = lowering.visit_slot(node)](Problem& p, const Step& step) {
    p.in.q = q.at(step);
    p.in.kv = step.kv_layer(layer);
    p.in.batch = step.layout;
    p.in.visits = step.visits[slot];
    return p.in.visits.num_blocks > 0;
  };
  lowering.add(node, problem, prepare);
}

}  // namespace

void lower_column_index(Lowering& lowering, const Node& node) {
  ops::ColumnIndexProblem problem;
  problem.in = index_inputs(lowering, node);
  problem.last_rows = int_attribute(node, "last_rows");
  problem.row_stride = int_attribute(node, "row_stride");
  problem.columns = top_scores(node, "columns", "column_mass");
  problem.slashes = top_scores(node, "slashes", "slash_mass");
  add_index(lowering, node, problem);
}

void lower_block_index(Lowering& lowering, const Node& node) {
  ops::BlockIndexProblem problem;
  problem.in = index_inputs(lowering, node);
  problem.stride = int_attribute(node, "stride");
  problem.pages = top_scores(node, "pages", "mass");
  add_index(lowering, node, problem);
}

}  // namespace effinfer::compiler
