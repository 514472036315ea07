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
  } else {
    problem.table = static_cast<const uint8_t*>(weights.raw(table).data);
  }
  problem.dtype = table.dtype;
  problem.vocab_size = table.shape[0].value;
  problem.cols = table.shape[1].value;
  problem.scale = static_cast<float>(node.get_float("scale"));
  const auto prepare = [ids = lowering.ids(node.inputs[0]), rows = lowering.rows(out_id),
                        out = lowering.floats(out_id)](ops::EmbeddingProblem& p, const Step& step) {
    p.ids = ids.at(step);
    p.rows = step.count(rows);
    p.out = out.at(step);
    return p.rows > 0;
  };
  lowering.add(node, problem, prepare);
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
  problem.eps = static_cast<float>(node.get_float("eps"));
  const bool as_operand = node.get_bool("as_operand");
  const OperandPlace act = as_operand ? lowering.operand(output) : OperandPlace{};
  problem.out_operand = act.largest;
  const Floats x = lowering.floats(node.inputs[0]);
  const Floats out = lowering.floats(output);
  const Floats added = sum == nullptr ? Floats{} : lowering.floats(node.inputs[1]);
  const Floats sum_out = sum == nullptr ? Floats{} : lowering.floats(*sum);
  const auto prepare = [=, has_sum = sum != nullptr, rows = lowering.rows(output)](
                           ops::RmsNormProblem& p, const Step& step) {
    p.x.data = x.at(step);
    p.rows = step.count(rows);
    if (has_sum) {
      p.add_to.data = added.at(step);
      p.sum_out.data = sum_out.at(step);
    }
    if (as_operand) {
      p.out_operand = act.at(step, p.rows);
    } else {
      p.out.data = out.at(step);
    }
    return p.rows > 0;
  };
  lowering.add(node, problem, prepare);
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
  const auto prepare = [x = lowering.floats(node.inputs[0]), out = lowering.floats(out_id),
                        rows = lowering.rows(out_id)](ops::UnaryProblem& p, const Step& step) {
    p.x = x.at(step);
    p.out = out.at(step);
    p.rows = step.count(rows);
    return p.rows > 0;
  };
  lowering.add(node, problem, prepare);
}

void lower_binary(Lowering& lowering, const Node& node) {
  const ValueId out_id = node.outputs[0];
  const int64_t cols = lowering.cols(out_id);
  ops::BinaryProblem problem;
  problem.op = ops::parse_binary_op(node.op);
  problem.size = lowering.max_rows(out_id) * cols;
  const auto prepare = [a = lowering.floats(node.inputs[0]), b = lowering.floats(node.inputs[1]),
                        out = lowering.floats(out_id), rows = lowering.rows(out_id),
                        cols](ops::BinaryProblem& p, const Step& step) {
    p.a = a.at(step);
    p.b = b.at(step);
    p.out = out.at(step);
    p.size = step.count(rows) * cols;
    return p.size > 0;
  };
  lowering.add(node, problem, prepare);
}

void lower_select_rows(Lowering& lowering, const Node& node) {
  const ValueId out_id = node.outputs[0];
  ops::SelectRowsProblem problem;
  problem.num_rows = lowering.max_rows(out_id);
  problem.cols = lowering.cols(out_id);
  const auto prepare = [x = lowering.floats(node.inputs[0]), ids = lowering.ids(node.inputs[1]),
                        out = lowering.floats(out_id),
                        rows = lowering.rows(out_id)](ops::SelectRowsProblem& p, const Step& step) {
    p.x = x.at(step);
    p.rows = ids.at(step);
    p.num_rows = step.count(rows);
    p.out = out.at(step);
    return p.num_rows > 0;
  };
  lowering.add(node, problem, prepare);
}

}  // namespace effinfer::compiler
