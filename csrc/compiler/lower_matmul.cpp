#include "compiler/lowering.h"
#include "compiler/next_weights.h"
#include "graph/op_specs.h"
#include "ops/matmul.h"

namespace effinfer::compiler {
namespace {

// A third of the second cache: on an H100 17 MB, which memory delivers in the 6 us of a short
// context's attention that no other weights are asked for. The rest is for keys and for the weights
// at hand.
constexpr int64_t kNextShare = 3;

ops::NextWeights next_weights(Lowering& lowering, const Node& node) {
  ops::NextWeights next;
  next.bytes = lowering.target().l2_bytes / kNextShare;
  const Node* const matmul = next.bytes == 0 ? nullptr : next_matmul(lowering.graph(), node);
  if (matmul == nullptr) return {};
  const graph::MatmulInputs inputs = graph::matmul_inputs(*matmul);
  for (size_t i = 0; i < inputs.parts; ++i) {
    const Value& weight = lowering.graph().value(matmul->inputs[inputs.weight(i)]);
    next.parts[next.num_parts++] = lowering.weights().packed(weight);
  }
  return next;
}

}  // namespace

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
  // Other kernels ask for nothing ahead.
  if (problem.x.arithmetic == ops::Arithmetic::bf16 && !problem.rounds_weights) {
    problem.next = next_weights(lowering, node);
  }
  places.is_head = node.outputs[0] == lowering.graph().outputs[0] && problem.num_parts == 1 &&
                   returns_logits(lowering.graph());
  if (places.is_head) lowering.offer_top(problem.parts[0].weight.rows);
  lowering.add(node, problem, places);
}

}  // namespace effinfer::compiler
