#include "compiler/lowering.h"
#include "graph/op_specs.h"
#include "ops/matmul.h"

namespace effinfer::compiler {

void lower_to_operand(Lowering& lowering, const Node& node) {
  const ValueId out_id = node.outputs[0];
  ops::ToOperandProblem problem;
  problem.x_stride = lowering.cols(out_id);
  const executor::ToOperandPlaces places{lowering.floats(node.inputs[0]), lowering.operand(out_id),
                                         lowering.rows(out_id)};
  problem.out = places.out.largest;
  lowering.add(node, problem, places);
}

void lower_matmul(Lowering& lowering, const Node& node) {
  const graph::MatmulInputs inputs = graph::matmul_inputs(node);
  ops::MatmulProblem problem;
  executor::MatmulPlaces places;
  places.rows = lowering.rows(node.inputs[0]);
  places.x = lowering.operand(node.inputs[0]);
  problem.x = places.x.largest;
  problem.num_parts = static_cast<int>(inputs.parts);
  problem.rounds_weights =
      lowering.phase() == Phase::prefill && node.has(graph::kPrefillWeightsKey);
  const bool gated = node.op == "matmul_glu";
  if (gated) problem.glu = ops::parse_activation(node.get_string("activation"));
  if (gated && node.get_bool("as_operand")) {
    places.out_operand = lowering.operand(node.outputs[0]);
    problem.out_operand = places.out_operand->largest;
  } else {
    places.num_written = node.outputs.size();
  }

  for (size_t i = 0; i < inputs.parts; ++i) {
    ops::MatmulPart& part = problem.parts[i];
    part.weight = lowering.weights().packed(lowering.graph().value(node.inputs[inputs.weight(i)]));
    part.out_stride = part.weight.rows;
    if (const auto bias = inputs.bias(i)) {
      part.bias = lowering.weights().floats(lowering.graph().value(node.inputs[*bias]));
    }
    if (i >= places.num_written) continue;
    places.parts[i].out = lowering.floats(node.outputs[i]);
    if (const auto residual = inputs.residual(i)) {
      places.parts[i].residual = lowering.floats(node.inputs[*residual]);
    }
  }
  places.is_head = node.outputs[0] == lowering.graph().outputs[0] && problem.num_parts == 1 &&
                   returns_logits(lowering.graph());
  if (places.is_head) lowering.offer_top(problem.parts[0].weight.rows);
  lowering.add(node, problem, places);
}

}  // namespace effinfer::compiler
