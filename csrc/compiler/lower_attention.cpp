#include <cmath>
#include <vector>

#include "compiler/arithmetic.h"
#include "compiler/kept_weights.h"
#include "compiler/kv_facts.h"
#include "compiler/lowering.h"
#include "effinfer/error.h"
#include "graph/op_specs.h"
#include "ops/attention.h"
#include "ops/rope.h"

namespace effinfer::compiler {
namespace {

int32_t int_attribute(const Node& node, std::string_view key) {
  return static_cast<int32_t>(node.get_int(key));
}

size_t layer_of(const Node& node) {
  return static_cast<size_t>(node.get_int("layer"));
}

float float_attribute(const Node& node, std::string_view key) {
  return static_cast<float>(node.get_float(key));
}

}  // namespace

void lower_rope_table(Lowering& lowering, const Node& node) {
  const ValueId out_id = node.outputs[0];
  const RopeFrequencies made = rope_frequencies(lowering.graph(), lowering.weights(), node);
  ops::RopeTableProblem problem;
  problem.factor = made.factor;
  problem.map = {int_attribute(node, "period"), int_attribute(node, "shift"),
                 int_attribute(node, "most"), int_attribute(node, "tempered_from")};
  problem.rows = lowering.max_rows(out_id);
  problem.dims = int_attribute(node, "dims");
  problem.inv_freq = lowering.constant(made.inv_freq);
  const executor::RopeTablePlaces places{lowering.ids(node.inputs[0]), lowering.floats(out_id),
                                         lowering.rows(out_id)};
  lowering.add(node, problem, places);
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
  const executor::RopePlaces places{lowering.floats(node.inputs[0]),
                                    lowering.floats(node.inputs[1]), lowering.floats(out_id),
                                    lowering.rows(out_id)};
  lowering.add(node, problem, places);
}

// Without queries, norms and rotation the fused kernel is a plain append.
void lower_kv_append(Lowering& lowering, const Node& node) {
  ops::RopeAppendProblem problem;
  problem.k_stride = problem.v_stride = lowering.cols(node.inputs[0]);
  problem.kv.num_kv_heads = int_attribute(node, "heads");
  problem.kv.head_dim = int_attribute(node, "head_dim");
  problem.kv.dtype = lowering.kv_dtype();
  const executor::KvAppendPlaces places{lowering.floats(node.inputs[0]),
                                        lowering.floats(node.inputs[1]), layer_of(node)};
  lowering.add(node, problem, places);
}

namespace {

struct RopeAppend {
  ops::RopeAppendProblem problem;
  executor::RopeAppendPlaces places;
};

RopeAppend make_rope_append(Lowering& lowering, const Node& node) {
  const graph::RopeAppendInputs inputs = graph::rope_append_inputs(node);
  RopeAppend made;
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
  made.places.q_out = lowering.floats(node.outputs[0]);
  made.places.kv = {lowering.floats(node.inputs[1]), lowering.floats(node.inputs[2]),
                    layer_of(node)};
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

// For what variants reject and describe() tells.
void set_visits(const Lowering& lowering, const Node& node, ops::VisitPlan& visits) {
  if (!graph::attention_inputs(node).visits) return;
  const ops::VisitShape shape = lowering.visit_shape(node);
  visits.list_words = 1;
  visits.weighs_blocks = shape.block_weights;
  visits.weighs_rows = shape.row_weights;
}

// The most rows of a tile of prompts for which the device has a kernel, and whether the rows of
// prompts are in such tiles only, as that kernel's bits are its own, which it may have where the
// phase has.
void set_long_tiles(const Lowering& lowering, const Node& node, ops::AttentionShape& shape) {
  ops::KvLayer kv;
  kv.num_kv_heads = shape.num_kv_heads;
  kv.head_dim = shape.head_dim;
  kv.dtype = lowering.kv_dtype();
  ops::AttentionProblem problem;
  problem.num_qo_heads = shape.num_qo_heads;
  problem.num_kv_heads = shape.num_kv_heads;
  problem.k = ops::keys_of(kv);
  problem.v = ops::values_of(kv);
  problem.weights = node.get_string("weights");
  problem.chunk = shape.chunk;
  set_visits(lowering, node, problem.visits);
  const auto finds = [&](int32_t rows, bool own_sums) {
    problem.work.long_rows = rows;
    problem.work.only_long = problem.own_sums = own_sums;
    const auto& table = ops::table<ops::AttentionProblem>();
    return table.find(problem, lowering.target()) != nullptr;
  };
  const bool own_sums = lowering.phase() == Phase::prefill && node.has(graph::kPrefillSumsKey);
  for (int32_t rows = ops::kGpuLongTileRows; rows >= ops::kGpuLeastLongTileRows; rows /= 2) {
    shape.only_long = own_sums && finds(rows, true);
    if (!shape.only_long && !finds(rows, false)) continue;
    shape.long_rows = rows;
    if (shape.only_long) {
      const size_t page_bytes = ops::arranged_page_bytes(shape.head_dim);
      shape.most_arranged = ops::kGpuArrangedBytes / static_cast<int64_t>(page_bytes);
    }
    return;
  }
}

ops::AttentionShape attention_shape(const Lowering& lowering, const Node& node) {
  const bool visits = graph::attention_inputs(node).visits.has_value();
  ops::AttentionShape shape = {ops::KeySource::pages,
                               int_attribute(node, "heads"),
                               int_attribute(node, "kv_heads"),
                               int_attribute(node, "head_dim"),
                               true,
                               int_attribute(node, "window_left"),
                               int_attribute(node, "sink_tokens"),
                               visits,
                               visits && lowering.visit_shape(node).rows};
  shape.chunk = int_attribute(node, "chunk");
  if (!lowering.on_cpu()) {
    shape.most_rows = ops::kGpuTileRows;
    shape.shares = ops::kGpuShares;
    shape.most_partials = ops::kGpuPartials;
    set_long_tiles(lowering, node, shape);
  }
  return shape;
}

// What makes a head's first key count so many times as much; null: nothing does.
const float* first_logits(Lowering& lowering, const Node& node) {
  std::vector<float> logits;
  for (const int64_t percent : node.get_ints("first_percent")) {
    logits.push_back(std::log(static_cast<float>(percent) / 100.0f));
  }
  return logits.empty() ? nullptr : lowering.constant(logits);
}

}  // namespace

void lower_rope_append(Lowering& lowering, const Node& node) {
  const RopeAppend made = make_rope_append(lowering, node);
  if (!runs_in_attention(node)) return lowering.add(node, made.problem, made.places);
  const Node& attention = attention_of(lowering.graph(), node);
  const size_t slot = lowering.attention_slot(attention_shape(lowering, attention), layer_of(node));
  lowering.add(node, made.problem, executor::EarlyAppendPlaces{made.places, slot});
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
  problem.weights = node.get_string("weights");
  problem.first_logits = first_logits(lowering, node);
  const Node* mass = lowering.keeps_weights() ? mass_of_kept(lowering.graph(), node) : nullptr;
  if (mass != nullptr) problem.mass = mass->get_string("plane");
  executor::AttentionPlaces places;
  places.q = lowering.floats(node.inputs[0]);
  places.layer = layer_of(node);
  if (problem.weighs_keys()) places.weights = lowering.weight_slot(problem.weights);
  const ops::AttentionShape shape = attention_shape(lowering, node);
  places.shape = lowering.attention_slot(shape, places.layer);
  problem.own_sums = problem.work.only_long = shape.only_long;
  problem.work.long_rows = shape.long_rows;
  if (node.get_bool("as_operand")) {
    places.out_operand = lowering.operand(out_id);
    problem.out_operand = places.out_operand->largest;
  } else {
    places.out = lowering.floats(out_id);
  }
  const graph::AttentionInputs inputs = graph::attention_inputs(node);
  if (inputs.q_before) {
    problem.chunk = int_attribute(node, "chunk");
    problem.q_before = problem.q_far = problem.q;
    places.chunks = {lowering.floats(node.inputs[*inputs.q_before]),
                     lowering.floats(node.inputs[*inputs.q_far])};
  }
  if (inputs.visits) {
    places.visits = lowering.visit_slot(node);
    set_visits(lowering, node, problem.visits);
    if (lowering.visit_shape(node).weights() && !problem.weights.empty()) {
      throw Unsupported("[attention] weights: expected no plane of them, as what an index draws " +
                        ("has its own, got \"" + std::string(problem.weights)) + '"');
    }
  }
  if (const Node* append = inner_append(lowering.graph(), node)) {
    const RopeAppend inner = make_rope_append(lowering, *append);
    places.append = inner.places;
    problem.append = inner.problem;
  }
  lowering.add(node, problem, places);
  if (mass != nullptr) lower_kept_mass(lowering, *mass);
}

}  // namespace effinfer::compiler
