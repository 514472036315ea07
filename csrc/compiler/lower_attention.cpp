#include "compiler/lowering.h"
#include "graph/op_specs.h"
#include "kernels/attention.h"
#include "kernels/elementwise.h"

namespace effinfer::compiler {
namespace {

int32_t int_attribute(const Node& node, std::string_view key) {
  return static_cast<int32_t>(node.get_int(key));
}

float float_attribute(const Node& node, std::string_view key) {
  return static_cast<float>(node.get_float(key));
}

kernels::RopeParameters rope_parameters(const Node& node) {
  kernels::RopeParameters p;
  const std::string& scaling = node.get_string("scaling");
  p.scaling = scaling == "linear"   ? kernels::RopeScaling::linear
              : scaling == "llama3" ? kernels::RopeScaling::llama3
              : scaling == "yarn"   ? kernels::RopeScaling::yarn
                                    : kernels::RopeScaling::none;
  p.theta = float_attribute(node, "theta");
  p.dims = int_attribute(node, "dims");
  p.factor = float_attribute(node, "factor");
  p.original_max_position = float_attribute(node, "original_max_position");
  p.low_freq_factor = float_attribute(node, "low_freq_factor");
  p.high_freq_factor = float_attribute(node, "high_freq_factor");
  p.beta_fast = float_attribute(node, "beta_fast");
  p.beta_slow = float_attribute(node, "beta_slow");
  p.attention_factor = float_attribute(node, "attention_factor");
  return p;
}

}  // namespace

void lower_rope_table(Lowering& lowering, const Node& node) {
  const ValueId out_id = node.outputs[0];
  const kernels::RopeParameters parameters = rope_parameters(node);
  const float* divisors = node.inputs.size() == 2
                              ? lowering.weights().floats(lowering.graph().value(node.inputs[1]))
                              : nullptr;
  float* inv_freq = lowering.constant(static_cast<size_t>(parameters.dims / 2));
  kernels::RopeTableProblem problem;
  problem.factor = kernels::rope_inv_freq(parameters, divisors, inv_freq);
  problem.rows = lowering.max_rows(out_id);
  problem.dims = parameters.dims;
  problem.inv_freq = inv_freq;
  const auto prepare = [ids = lowering.ids(node.inputs[0]), out = lowering.floats(out_id),
                        rows = lowering.rows(out_id)](kernels::RopeTableProblem& p,
                                                      const Step& step) {
    p.positions = ids.at(step);
    p.rows = step.count(rows);
    p.out = out.at(step);
    return p.rows > 0;
  };
  lowering.add(node, problem, prepare);
}

void lower_rope(Lowering& lowering, const Node& node) {
  const ValueId out_id = node.outputs[0];
  kernels::RopeProblem problem;
  problem.rows = lowering.max_rows(out_id);
  problem.x_stride = lowering.cols(out_id);
  problem.heads = int_attribute(node, "heads");
  problem.head_dim = int_attribute(node, "head_dim");
  problem.dims = static_cast<int32_t>(lowering.cols(node.inputs[1]));
  problem.interleaved = node.get_bool("interleaved");
  const auto prepare = [x = lowering.floats(node.inputs[0]),
                        table = lowering.floats(node.inputs[1]), out = lowering.floats(out_id),
                        rows = lowering.rows(out_id)](kernels::RopeProblem& p, const Step& step) {
    p.x = x.at(step);
    p.cos_sin = table.at(step);
    p.out = out.at(step);
    p.rows = step.count(rows);
    return p.rows > 0;
  };
  lowering.add(node, problem, prepare);
}

// Without queries, norms and rotation the fused kernel is a plain append.
void lower_kv_append(Lowering& lowering, const Node& node) {
  kernels::RopeAppendProblem problem;
  problem.k_stride = problem.v_stride = lowering.cols(node.inputs[0]);
  problem.kv.num_kv_heads = int_attribute(node, "heads");
  problem.kv.head_dim = int_attribute(node, "head_dim");
  problem.kv.dtype = lowering.kv_dtype();
  const auto prepare = [k = lowering.floats(node.inputs[0]), v = lowering.floats(node.inputs[1]),
                        layer = int_attribute(node, "layer")](kernels::RopeAppendProblem& p,
                                                              const Step& step) {
    p.k = k.at(step);
    p.v = v.at(step);
    p.kv = step.cache->layer(layer);
    p.batch = step.layout;
    return true;
  };
  lowering.add(node, problem, prepare);
}

void lower_rope_append(Lowering& lowering, const Node& node) {
  const graph::RopeAppendInputs inputs = graph::rope_append_inputs(node);
  kernels::RopeAppendProblem problem;
  problem.q_stride = problem.q_out_stride = lowering.cols(node.inputs[0]);
  problem.k_stride = problem.v_stride = lowering.cols(node.inputs[1]);
  problem.num_qo_heads = int_attribute(node, "heads");
  problem.kv.num_kv_heads = int_attribute(node, "kv_heads");
  problem.kv.head_dim = int_attribute(node, "head_dim");
  problem.kv.dtype = lowering.kv_dtype();
  problem.norm_eps = float_attribute(node, "eps");
  problem.interleaved = node.get_bool("interleaved");
  const auto weight = [&](size_t index) {
    return lowering.weights().floats(lowering.graph().value(node.inputs[index]));
  };
  if (inputs.q_norm) problem.q_norm = weight(*inputs.q_norm);
  if (inputs.k_norm) problem.k_norm = weight(*inputs.k_norm);
  Floats table;
  if (inputs.table) {
    table = lowering.floats(node.inputs[*inputs.table]);
    problem.rope_dims = static_cast<int32_t>(lowering.cols(node.inputs[*inputs.table]));
  }
  const auto prepare = [q = lowering.floats(node.inputs[0]), k = lowering.floats(node.inputs[1]),
                        v = lowering.floats(node.inputs[2]), out = lowering.floats(node.outputs[0]),
                        table, layer = int_attribute(node, "layer")](kernels::RopeAppendProblem& p,
                                                                     const Step& step) {
    p.q = q.at(step);
    p.k = k.at(step);
    p.v = v.at(step);
    p.q_out = out.at(step);
    if (p.rope_dims > 0) p.cos_sin = table.at(step);
    p.kv = step.cache->layer(layer);
    p.batch = step.layout;
    return true;
  };
  lowering.add(node, problem, prepare);
}

void lower_attention(Lowering& lowering, const Node& node) {
  const ValueId out_id = node.outputs[0];
  kernels::AttentionProblem problem;
  problem.num_qo_heads = int_attribute(node, "heads");
  problem.q_stride = problem.out_stride = lowering.cols(out_id);
  problem.kv.num_kv_heads = int_attribute(node, "kv_heads");
  problem.kv.head_dim = int_attribute(node, "head_dim");
  problem.kv.dtype = lowering.kv_dtype();
  problem.sm_scale = float_attribute(node, "scale");
  problem.logits_soft_cap = float_attribute(node, "soft_cap");
  problem.window_left = int_attribute(node, "window");
  const kernels::AttentionShape shape{problem.num_qo_heads, problem.kv.num_kv_heads,
                                      problem.kv.head_dim, problem.window_left};
  const auto prepare = [q = lowering.floats(node.inputs[0]), out = lowering.floats(out_id),
                        slot = lowering.attention_slot(shape),
                        layer = int_attribute(node, "layer")](kernels::AttentionProblem& p,
                                                              const Step& step) {
    p.q = q.at(step);
    p.kv = step.cache->layer(layer);
    p.batch = step.layout;
    p.plan = step.plans[slot];
    p.out = out.at(step);
    return true;
  };
  lowering.add(node, problem, prepare);
}

}  // namespace effinfer::compiler
