// What sums up how much attention keys get.
#include "compiler/arithmetic.h"
#include "compiler/lowering.h"
#include "graph/op_specs.h"
#include "ops/attention_mass.h"

namespace effinfer::compiler {
namespace {

void add_mass(Lowering& lowering, const Node& node, bool of_kept) {
  const auto integer = [&](std::string_view key) {
    return static_cast<int32_t>(node.get_int(key));
  };
  ops::AttentionMassProblem problem;
  problem.q_stride = lowering.cols(node.inputs[0]);
  problem.num_qo_heads = integer("heads");
  problem.kv.num_kv_heads = integer("kv_heads");
  problem.kv.head_dim = integer("head_dim");
  problem.kv.dtype = lowering.kv_dtype();
  problem.sm_scale = static_cast<float>(node.get_float("sm_scale"));
  problem.noise = static_cast<float>(node.get_float("noise"));
  problem.name = node.get_string("plane");
  problem.rule = {static_cast<float>(node.get_float("decay")),
                  node.get_string("reduce") == "maximum"};
  problem.max_kv_len = lowering.max_seq_len();
  if (lowering.phase() == Phase::prefill && node.has(graph::kPrefillProductsKey)) {
    problem.arithmetic = parse_arithmetic(node.get_string(graph::kPrefillProductsKey));
  }
  executor::AttentionMassPlaces places;
  places.q = lowering.floats(node.inputs[0]);
  places.layer = static_cast<size_t>(node.get_int("layer"));
  places.of_kept = of_kept;
  lowering.add(node, problem, places);
}

}  // namespace

void lower_attention_mass(Lowering& lowering, const Node& node) {
  add_mass(lowering, node, false);
}

// Members have parts of their own, and what follows asks for none of them.
void lower_kept_mass(Lowering& lowering, const Node& node) {
  add_mass(lowering, node, true);
  lowering.leave_barrier_out();
}

}  // namespace effinfer::compiler
