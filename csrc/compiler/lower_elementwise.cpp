#include "compiler/lowering.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/norm.h"

namespace effinfer::compiler {

void lower_embedding(Lowering& lowering, const Node& node) {
  const ValueId out_id = node.outputs[0];
  const Value& table = lowering.graph().value(node.inputs[1]);
  WeightStore& weights = lowering.weights();
  ops::EmbeddingProblem problem;
  problem.rows = lowering.max_rows(out_id);
  if (weights.is_packed(table)) {
    problem.packed = &weights.packed(table);
  } else if (!lowering.on_cpu()) {
    problem.packed = &weights.pack_alone(table);
  } else {
    problem.table = static_cast<const uint8_t*>(weights.raw(table).data);
  }
  problem.dtype = table.dtype;
  problem.vocab_size = table.shape[0].value;
  problem.cols = table.shape[1].value;
  problem.scale = static_cast<float>(node.get_float("scale"));
  const executor::EmbeddingPlaces places{lowering.ids(node.inputs[0]), lowering.floats(out_id),
                                         lowering.rows(out_id)};
  lowering.add(node, problem, places);
}

namespace {

// Lowers a norm, alone or after a sum: `output` is the normalised row, `sum` the sum or null.
void add_norm(Lowering& lowering, const Node& node, ValueId weight, ValueId output,
              const ValueId* sum) {
  const int64_t groups = node.has("groups") ? node.get_int("groups") : 1;
  ops::RmsNormProblem problem;
  problem.rows = lowering.max_rows(output);
  problem.groups = groups;
  problem.cols = lowering.cols(output) / groups;
  problem.x.stride = problem.add_to.stride = lowering.cols(output);
  problem.x.group_stride = problem.add_to.group_stride = problem.cols;
  problem.out.stride = problem.sum_out.stride = lowering.cols(output);
  problem.out.group_stride = problem.sum_out.group_stride = problem.cols;
  problem.weight = lowering.weights().floats(lowering.graph().value(weight));
  problem.weight_is_fixed = true;
  problem.eps = static_cast<float>(node.get_float("eps"));
  executor::RmsNormPlaces places;
  places.x = lowering.floats(node.inputs[0]);
  if (sum != nullptr) places.sum = {lowering.floats(node.inputs[1]), lowering.floats(*sum)};
  if (node.get_bool("as_operand")) {
    places.out_operand = lowering.operand(output);
    problem.out_operand = places.out_operand->largest;
  } else {
    places.out = lowering.floats(output);
  }
  places.rows = lowering.rows(output);
  lowering.add(node, problem, places);
}

}  // namespace

void lower_rms_norm(Lowering& lowering, const Node& node) {
  add_norm(lowering, node, node.inputs[1], node.outputs[0], nullptr);
}

void lower_add_rms_norm(Lowering& lowering, const Node& node) {
  add_norm(lowering, node, node.inputs[2], node.outputs[1], &node.outputs[0]);
}

void lower_unary(Lowering& lowering, const Node& node) {
  const ValueId out_id = node.outputs[0];
  ops::UnaryProblem problem;
  problem.op = ops::parse_unary_op(node.op);
  const std::string_view parameter = names(problem.op).parameter;
  if (!parameter.empty()) problem.parameter = static_cast<float>(node.get_float(parameter));
  problem.rows = lowering.max_rows(out_id);
  problem.cols = problem.x_stride = problem.out_stride = lowering.cols(out_id);
  const executor::UnaryPlaces places{lowering.floats(node.inputs[0]), lowering.floats(out_id),
                                     lowering.rows(out_id)};
  lowering.add(node, problem, places);
}

void lower_binary(Lowering& lowering, const Node& node) {
  const ValueId out_id = node.outputs[0];
  const int64_t cols = lowering.cols(out_id);
  ops::BinaryProblem problem;
  problem.op = ops::parse_binary_op(node.op);
  problem.size = lowering.max_rows(out_id) * cols;
  const executor::BinaryPlaces places{lowering.floats(node.inputs[0]),
                                      lowering.floats(node.inputs[1]), lowering.floats(out_id),
                                      lowering.rows(out_id), cols};
  lowering.add(node, problem, places);
}

void lower_select_rows(Lowering& lowering, const Node& node) {
  const ValueId out_id = node.outputs[0];
  ops::SelectRowsProblem problem;
  problem.num_rows = lowering.max_rows(out_id);
  problem.cols = lowering.cols(out_id);
  const executor::SelectRowsPlaces places{lowering.floats(node.inputs[0]),
                                          lowering.ids(node.inputs[1]), lowering.floats(out_id),
                                          lowering.rows(out_id)};
  lowering.add(node, problem, places);
}

}  // namespace effinfer::compiler
