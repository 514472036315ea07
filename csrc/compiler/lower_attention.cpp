#include "compiler/arithmetic.h"
#include "compiler/lowering.h"
#include "graph/op_specs.h"
#include "ops/attention.h"
#include "ops/rope.h"

namespace effinfer::compiler {
namespace {

int32_t int_attribute(const Node& node, std::string_view key) {
  return static_cast<int32_t>(node.get_int(key));
}

float float_attribute(const Node& node, std::string_view key) {
  return static_cast<float>(node.get_float(key));
}

RopeParameters rope_parameters(const Node& node) {
  RopeParameters p;
  p.scaling = parse_rope_scaling(node.get_string("scaling"));
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
  const RopeParameters parameters = rope_parameters(node);
  const float* divisors = node.inputs.size() == 2
                              ? lowering.weights().floats(lowering.graph().value(node.inputs[1]))
                              : nullptr;
  std::vector<float> inv_freq(static_cast<size_t>(parameters.dims / 2));
  ops::RopeTableProblem problem;
  problem.factor = ops::rope_inv_freq(parameters, divisors, inv_freq.data());
  problem.rows = lowering.max_rows(out_id);
  problem.dims = parameters.dims;
  problem.inv_freq = lowering.constant(inv_freq);
  const auto prepare = [ids = lowering.ids(node.inputs[0]), out = lowering.floats(out_id),
                        rows = lowering.rows(out_id)](ops::RopeTableProblem& p, const Step& step) {
    p.positions = ids.at(step);
    p.rows = step.count(rows);
    p.out = out.at(step);
    return p.rows > 0;
  };
  lowering.add(node, problem, prepare);
}

void lower_rope(Lowering& lowering, const Node& node) {
  const ValueId out_id = node.outputs[0];
  ops::RopeProblem problem;
  problem.rows = lowering.max_rows(out_id);
  problem.heads = int_attribute(node, "heads");
  problem.head_dim = int_attribute(node, "head_dim");
  problem.x.stride = problem.out.stride = lowering.cols(out_id);
  problem.x.group_stride = problem.out.group_stride = problem.head_dim;
  problem.dims = static_cast<int32_t>(lowering.cols(node.inputs[1]));
  problem.interleaved = node.get_bool("interleaved");
  const auto prepare = [x = lowering.floats(node.inputs[0]),
                        table = lowering.floats(node.inputs[1]), out = lowering.floats(out_id),
                        rows = lowering.rows(out_id)](ops::RopeProblem& p, const Step& step) {
    p.x.data = x.at(step);
    p.cos_sin = table.at(step);
    p.out.data = out.at(step);
    p.rows = step.count(rows);
    return p.rows > 0;
  };
  lowering.add(node, problem, prepare);
}

// Without queries, norms and rotation the fused kernel is a plain append.
void lower_kv_append(Lowering& lowering, const Node& node) {
  ops::RopeAppendProblem problem;
  problem.k_stride = problem.v_stride = lowering.cols(node.inputs[0]);
  problem.kv.num_kv_heads = int_attribute(node, "heads");
  problem.kv.head_dim = int_attribute(node, "head_dim");
  problem.kv.dtype = lowering.kv_dtype();
  const auto prepare = [k = lowering.floats(node.inputs[0]), v = lowering.floats(node.inputs[1]),
                        layer = int_attribute(node, "layer")](ops::RopeAppendProblem& p,
                                                              const Step& step) {
    p.k = k.at(step);
    p.v = v.at(step);
    p.kv = step.kv_layer(layer);
    p.batch = step.layout;
    return true;
  };
  lowering.add(node, problem, prepare);
}

namespace {

// Fills in what of a RopeAppendProblem depends on the step.
struct RopeAppendPlaces {
  Floats q, k, v, table, q_out;
  int32_t layer;

  bool operator()(ops::RopeAppendProblem& p, const Step& step) const {
    p.q = q.at(step);
    p.k = k.at(step);
    p.v = v.at(step);
    p.q_out = q_out.at(step);
    if (p.rope_dims > 0) p.cos_sin = table.at(step);
    p.kv = step.kv_layer(layer);
    p.batch = step.layout;
    return true;
  }
};

struct RopeAppend {
  ops::RopeAppendProblem problem;
  RopeAppendPlaces places;
};

RopeAppend make_rope_append(Lowering& lowering, const Node& node) {
  const graph::RopeAppendInputs inputs = graph::rope_append_inputs(node);
  RopeAppend made = {};
  ops::RopeAppendProblem& problem = made.problem;
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
  if (inputs.table) {
    made.places.table = lowering.floats(node.inputs[*inputs.table]);
    problem.rope_dims = static_cast<int32_t>(lowering.cols(node.inputs[*inputs.table]));
  }
  made.places.q = lowering.floats(node.inputs[0]);
  made.places.k = lowering.floats(node.inputs[1]);
  made.places.v = lowering.floats(node.inputs[2]);
  made.places.q_out = lowering.floats(node.outputs[0]);
  made.places.layer = int_attribute(node, "layer");
  return made;
}

bool runs_in_attention(const Node& node) {
  return node.op == "rope_append" && node.has(graph::kInAttentionKey) &&
         node.get_bool(graph::kInAttentionKey);
}

// The rope_append that makes the queries of an attention and may run inside it, or null.
const Node* inner_append(const Graph& graph, const Node& attention) {
  for (const Node& node : graph.nodes) {
    if (runs_in_attention(node) && node.outputs[0] == attention.inputs[0]) return &node;
  }
  return nullptr;
}

const Node& attention_of(const Graph& graph, const Node& append) {
  for (const Node& node : graph.nodes) {
    if (node.op == "attention" && node.inputs[0] == append.outputs[0]) return node;
  }
  throw InvalidArgument("[compile] rope_append: expected an attention that reads its queries");
}

size_t attention_slot(Lowering& lowering, const Node& node) {
  return lowering.attention_slot({ops::KeySource::pages, int_attribute(node, "heads"),
                                  int_attribute(node, "kv_heads"), int_attribute(node, "head_dim"),
                                  true, int_attribute(node, "window_left"),
                                  int_attribute(node, "sink_tokens")});
}

}  // namespace

// Tiles of several rows of a sequence read what others append: one that may run inside attention
// goes first then.
void lower_rope_append(Lowering& lowering, const Node& node) {
  const RopeAppend made = make_rope_append(lowering, node);
  if (!runs_in_attention(node)) return lowering.add(node, made.problem, made.places);
  const size_t slot = attention_slot(lowering, attention_of(lowering.graph(), node));
  const auto prepare = [places = made.places, slot](ops::RopeAppendProblem& p, const Step& step) {
    return !step.attention[slot].work.one_tile && places(p, step);
  };
  lowering.add(node, made.problem, prepare);
}

void lower_attention(Lowering& lowering, const Node& node) {
  const ValueId out_id = node.outputs[0];
  ops::KvLayer kv;
  kv.num_kv_heads = int_attribute(node, "kv_heads");
  kv.head_dim = int_attribute(node, "head_dim");
  kv.dtype = lowering.kv_dtype();
  ops::AttentionProblem problem;
  problem.num_qo_heads = int_attribute(node, "heads");
  problem.num_kv_heads = kv.num_kv_heads;
  problem.q = {nullptr, DType::f32, kv.head_dim, lowering.cols(out_id), kv.head_dim};
  problem.out_stride = lowering.cols(out_id);
  problem.k = ops::keys_of(kv);
  problem.v = ops::values_of(kv);
  problem.sm_scale = float_attribute(node, "sm_scale");
  problem.logits_soft_cap = float_attribute(node, "logits_soft_cap");
  problem.window_left = int_attribute(node, "window_left");
  problem.sink_tokens = int_attribute(node, "sink_tokens");
  if (lowering.phase() == Phase::prefill && node.has(graph::kPrefillProductsKey)) {
    problem.arithmetic = parse_arithmetic(node.get_string(graph::kPrefillProductsKey));
  }
  const bool as_operand = node.get_bool("as_operand");
  const OperandPlace act = as_operand ? lowering.operand(out_id) : OperandPlace{};
  problem.out_operand = act.largest;
  const size_t slot = attention_slot(lowering, node);
  const bool has_visits = node.inputs.size() == 3;
  const size_t visits = has_visits ? lowering.visit_slot(node) : 0;
  // For what variants reject and describe() tells.
  if (has_visits) problem.visits.list_words = 1;
  const Node* append = inner_append(lowering.graph(), node);
  const RopeAppend inner = append != nullptr ? make_rope_append(lowering, *append) : RopeAppend{};
  problem.append = inner.problem;
  const auto prepare = [q = lowering.floats(node.inputs[0]), out = lowering.floats(out_id), act,
                        as_operand, slot, layer = int_attribute(node, "layer"), has_visits, visits,
                        has_append = append != nullptr,
                        places = inner.places](ops::AttentionProblem& p, const Step& step) {
    const ops::KvLayer pages = step.kv_layer(layer);
    p.q.data = reinterpret_cast<const uint8_t*>(q.at(step));
    p.k = ops::keys_of(pages);
    p.v = ops::values_of(pages);
    p.batch = step.layout;
    const AttentionBuffers& buffers = step.attention[slot];
    p.work = &buffers.work;
    p.done = buffers.done;
    p.partial_out = buffers.partial_out;
    p.partial_ms = buffers.partial_ms;
    if (has_visits) p.visits = step.visits[visits];
    if (as_operand) {
      p.out_operand = act.at(step, step.layout.num_tokens);
    } else {
      p.out = reinterpret_cast<uint8_t*>(out.at(step));
    }
    p.append.k = nullptr;
    if (has_append && p.work->one_tile) places(p.append, step);
    return true;
  };
  lowering.add(node, problem, prepare);
}

}  // namespace effinfer::compiler
