#include <array>

#include "compiler/lowering.h"
#include "graph/op_specs.h"
#include "ops/matmul.h"

namespace effinfer::compiler {
namespace {

struct PartPlaces {
  Floats out;
  Floats residual;
  bool has_residual = false;
};

}  // namespace

void lower_to_operand(Lowering& lowering, const Node& node) {
  const ValueId out_id = node.outputs[0];
  ops::ToOperandProblem problem;
  problem.x_stride = lowering.cols(out_id);
  const OperandPlace out = lowering.operand(out_id);
  problem.out = out.largest;
  const auto prepare = [x = lowering.floats(node.inputs[0]), out, rows = lowering.rows(out_id)](
                           ops::ToOperandProblem& p, const Step& step) {
    p.x = x.at(step);
    p.out = out.at(step, step.count(rows));
    return p.out.rows > 0;
  };
  lowering.add(node, problem, prepare);
}

void lower_matmul(Lowering& lowering, const Node& node) {
  const graph::MatmulInputs inputs = graph::matmul_inputs(node);
  ops::MatmulProblem problem;
  const OperandPlace x = lowering.operand(node.inputs[0]);
  problem.x = x.largest;
  problem.num_parts = static_cast<int>(inputs.parts);
  const bool gated = node.op == "matmul_glu";
  if (gated) problem.glu = ops::parse_activation(node.get_string("activation"));
  if (gated && node.get_bool("as_operand"))
    problem.out_operand = lowering.operand(node.outputs[0]).largest;

  std::array<PartPlaces, ops::kMaxMatmulParts> places;
  for (size_t i = 0; i < inputs.parts; ++i) {
    ops::MatmulPart& part = problem.parts[i];
    part.weight = lowering.weights().packed(lowering.graph().value(node.inputs[inputs.weight(i)]));
    part.out_stride = part.weight.rows;
    if (const auto bias = inputs.bias(i)) {
      part.bias = lowering.weights().floats(lowering.graph().value(node.inputs[*bias]));
    }
    if (const auto residual = inputs.residual(i)) {
      places[i].residual = lowering.floats(node.inputs[*residual]);
      places[i].has_residual = true;
    }
    if (i < node.outputs.size() && problem.out_operand.data == nullptr) {
      places[i].out = lowering.floats(node.outputs[i]);
    }
  }
  // The step may ask for the highest logits only.
  const bool is_head = node.outputs[0] == lowering.graph().outputs[0] && problem.num_parts == 1;
  if (is_head) lowering.offer_top(problem.parts[0].weight.rows);
  const int written = gated ? 1 : problem.num_parts;
  const auto prepare = [x, places, written, is_head, rows = lowering.rows(node.inputs[0])](
                           ops::MatmulProblem& p, const Step& step) {
    p.x = x.at(step, step.count(rows));
    if (is_head) {
      p.top = step.top;
      p.top_k = step.top_k;
    }
    if (p.out_operand.data != nullptr) {
      p.out_operand.rows = p.x.rows;
      return p.x.rows > 0;
    }
    for (int i = 0; i < written; ++i) {
      const PartPlaces& place = places[static_cast<size_t>(i)];
      p.parts[i].out = place.out.at(step);
      if (place.has_residual) p.parts[i].residual = place.residual.at(step);
    }
    return p.x.rows > 0;
  };
  lowering.add(node, problem, prepare);
}

}  // namespace effinfer::compiler
