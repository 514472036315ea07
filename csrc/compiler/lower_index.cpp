// What chooses the keys that attention visits.
#include <algorithm>
#include <vector>

#include "compiler/arithmetic.h"
#include "compiler/lowering.h"
#include "effinfer/error.h"
#include "graph/op_specs.h"
#include "kv/page_pool.h"
#include "ops/bucket_index.h"
#include "ops/hash_index.h"
#include "ops/history_index.h"
#include "ops/page_index.h"
#include "ops/prefill_index.h"
#include "ops/strided_index.h"

namespace effinfer::compiler {
namespace {

using ops::IndexedHead;

bool share_a_kind(const Node& a, const Node& b) {
  return (chooses_rows(a) && chooses_rows(b)) || (chooses_blocks(a) && chooses_blocks(b));
}

const Node* maker_of(const Graph& graph, ValueId id) {
  const auto maker =
      std::ranges::find_if(graph.nodes, [&](const Node& each) { return each.outputs[0] == id; });
  return maker == graph.nodes.end() ? nullptr : &*maker;
}

// The index of the same layer whose lists come to this one first; null: none.
const Node* index_before(const Lowering& lowering, const Node& index) {
  const Graph& graph = lowering.graph();
  for (const ValueId id : index.inputs) {
    const Value& value = graph.value(id);
    if (value.dtype != DType::visits) continue;
    const auto layer = static_cast<size_t>(value.shape[0].value);
    if (layer == lowering.visited_layer(index)) return maker_of(graph, id);
  }
  return nullptr;
}

// Whether an index before it writes lists of the same kind.
bool follows_its_kind(const Lowering& lowering, const Node& node) {
  for (const Node* index = &node; (index = index_before(lowering, *index)) != nullptr;) {
    if (share_a_kind(*index, node)) return true;
  }
  return false;
}

// The first index of its kind also writes the lists of the KV heads that it is not for: the
// indices that follow may be for these; what none is for visits all keys.
const IndexedHead* indexed_heads(Lowering& lowering, const Node& node) {
  const auto heads = static_cast<size_t>(node.get_int("kv_heads"));
  const std::vector<int64_t>& only = node.get_ints("only");
  const IndexedHead others =
      follows_its_kind(lowering, node) ? IndexedHead::other : IndexedHead::dense;
  std::vector<IndexedHead> indexed(heads, only.empty() ? IndexedHead::chosen : others);
  for (const int64_t head : only) indexed[static_cast<size_t>(head)] = IndexedHead::chosen;
  return lowering.constant(indexed);
}

// Of the means that an index subtracts from keys, in 1.
constexpr double kMeanSteps = 1024.0;

int32_t int_attribute(const Node& node, std::string_view key) {
  return static_cast<int32_t>(node.get_int(key));
}

// Beside attention on vectors 1.3 to 2.0 were measured with 4,096 and 8,000 tokens on Zen 5
// (AVX-512, BF16). Tiles multiply several times as fast as the vectors that choose; there the
// number is the quotient of both rates, not measured.
float product_cost(const Lowering& lowering, const Node& index) {
  const auto on_tiles = [&](const Node& node) {
    return node.op == "attention" && graph::attention_inputs(node).visits &&
           node.get_int("layer") == index.get_int("layer") && node.has(graph::kPrefillProductsKey);
  };
  const bool tiles = lowering.target().isa == Isa::amx && lowering.phase() == Phase::prefill &&
                     std::ranges::any_of(lowering.graph().nodes, on_tiles);
  return tiles ? 4.0f : 1.5f;
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
  if (lowering.phase() == Phase::prefill && node.has(graph::kPrefillProductsKey)) {
    in.arithmetic = parse_arithmetic(node.get_string(graph::kPrefillProductsKey));
  }
  if (in.min_tokens > 0) in.product_cost = product_cost(lowering, node);
  return in;
}

TopScores top_scores(const Node& node, std::string_view count, std::string_view mass) {
  return {int_attribute(node, count), static_cast<float>(node.get_float(mass))};
}

int32_t unit_of(const Node& node) {
  return node.op == "page_index" ? int_attribute(node, "unit") : 1;
}

bool takes_means(const Node& node) {
  return node.op == "page_index" && node.get_string("score") == "means";
}

ops::HashShape hash_shape(const Node& node) {
  return {int_attribute(node, "heads") / int_attribute(node, "kv_heads"),
          int_attribute(node, "tables"), int_attribute(node, "bits")};
}

// Another index of its kind would leave the weights of its lists as they are.
void require_alone(const Lowering& lowering, const Node& index) {
  for (const Node& node : lowering.graph().nodes) {
    const bool other =
        &node != &index && share_a_kind(node, index) && node.outputs != index.outputs;
    if (!other || lowering.visited_layer(node) != lowering.visited_layer(index)) continue;
    throw InvalidArgument("[" + index.op + "] layer: expected no other index of its layer's " +
                          (chooses_rows(index) ? "generated rows" : "prompts") + ", got " +
                          node.op);
  }
}

// What all have in common that choose for generated rows.
ops::PageIndexProblem row_index(Lowering& lowering, const Node& node) {
  ops::PageIndexProblem problem;
  problem.q_stride = lowering.cols(node.inputs[0]);
  problem.num_qo_heads = int_attribute(node, "heads");
  problem.kv.num_kv_heads = int_attribute(node, "kv_heads");
  problem.kv.head_dim = int_attribute(node, "head_dim");
  problem.kv.dtype = lowering.kv_dtype();
  problem.sm_scale = static_cast<float>(node.get_float("sm_scale"));
  problem.sink_tokens = int_attribute(node, "sink_tokens");
  problem.local_tokens = int_attribute(node, "local_tokens");
  problem.min_tokens = int_attribute(node, "min_tokens");
  problem.keys = int_attribute(node, "keys");
  problem.share = static_cast<float>(node.get_float("share"));
  problem.heads = indexed_heads(lowering, node);
  problem.max_kv_len = lowering.max_seq_len();
  return problem;
}

ops::PageIndexProblem page_index(Lowering& lowering, const Node& node) {
  ops::PageIndexProblem problem = row_index(lowering, node);
  problem.unit = unit_of(node);
  problem.means = takes_means(node);
  problem.vote = node.get_string("vote") == "sum" ? ops::HeadVote::sum : ops::HeadVote::highest;
  problem.window_left = int_attribute(node, "window_left");
  return problem;
}

executor::IndexPlaces index_places(Lowering& lowering, const Node& node) {
  executor::IndexPlaces places;
  places.q = lowering.floats(node.inputs[0]);
  places.layer = static_cast<size_t>(node.get_int("layer"));
  places.visits = lowering.visit_slot(node);
  return places;
}

}  // namespace

void lower_column_index(Lowering& lowering, const Node& node) {
  ops::ColumnIndexProblem problem;
  problem.in = index_inputs(lowering, node);
  problem.last_rows = int_attribute(node, "last_rows");
  problem.row_stride = int_attribute(node, "row_stride");
  problem.columns = top_scores(node, "columns", "column_mass");
  problem.slashes = top_scores(node, "slashes", "slash_mass");
  lowering.add(node, problem, index_places(lowering, node));
}

void lower_block_index(Lowering& lowering, const Node& node) {
  ops::BlockIndexProblem problem;
  problem.in = index_inputs(lowering, node);
  problem.stride = int_attribute(node, "stride");
  problem.probe = node.get_string("queries") == "probe";
  problem.pages = top_scores(node, "pages", "mass");
  problem.keys = int_attribute(node, "keys");
  problem.share = static_cast<float>(node.get_float("share"));
  lowering.add(node, problem, index_places(lowering, node));
}

void index_keys(const Graph& graph, KvCacheConfig& cache) {
  for (const Node& node : graph.nodes) {
    if (node.op != "page_index" && node.op != "key_index" && node.op != "hash_index") continue;
    KvCacheConfig kept = cache;
    kept.index_means = takes_means(node);
    kept.index_unit = kept.index_means ? int32_t{ops::kMeanUnit} : unit_of(node);
    kept.index_bits = node.op == "hash_index" ? static_cast<int32_t>(hash_shape(node).planes()) : 0;
    const bool same =
        kept.index_unit == cache.index_unit && kv::index_kind(kept) == kv::index_kind(cache);
    if (cache.index_unit != 0 && !same) {
      throw InvalidArgument(
          "[" + node.op + "] " + (kept.index_bits > 0 ? "bits, tables" : "unit, score") +
          ": expected those of the graph's first index, " + std::to_string(cache.index_unit) +
          " keys by " + kv::index_kind(cache) + ", got " + std::to_string(kept.index_unit) +
          " by " + kv::index_kind(kept));
    }
    cache = kept;
  }
}

void lower_page_index(Lowering& lowering, const Node& node) {
  lowering.add(node, page_index(lowering, node), index_places(lowering, node));
}

void lower_key_index(Lowering& lowering, const Node& node) {
  ops::PageIndexProblem problem = page_index(lowering, node);
  problem.reuse = static_cast<float>(node.get_float("reuse"));
  problem.planes.name = node.get_string("plane");
  const std::vector<int64_t>& channels = node.get_ints("channels");
  if (!channels.empty()) {
    problem.channels = lowering.constant(std::vector<int32_t>(channels.begin(), channels.end()));
    problem.num_channels = static_cast<int32_t>(channels.size()) / problem.kv.num_kv_heads;
  }
  lowering.add(node, problem, index_places(lowering, node));
}

void lower_hash_index(Lowering& lowering, const Node& node) {
  require_alone(lowering, node);
  ops::HashIndexProblem problem;
  problem.q_stride = lowering.cols(node.inputs[0]);
  problem.num_qo_heads = int_attribute(node, "heads");
  problem.kv.num_kv_heads = int_attribute(node, "kv_heads");
  problem.kv.head_dim = int_attribute(node, "head_dim");
  problem.kv.dtype = lowering.kv_dtype();
  problem.sink_tokens = int_attribute(node, "sink_tokens");
  problem.local_tokens = int_attribute(node, "local_tokens");
  problem.min_tokens = int_attribute(node, "min_tokens");
  problem.tables = hash_shape(node);
  const executor::HashConstants& hash =
      lowering.hash_constants(problem.tables, problem.kv.head_dim, node.get_int("seed"));
  problem.planes = hash.planes;
  problem.chances = hash.chances;
  const std::vector<int64_t>& given = node.get_ints("means");
  std::vector<float> means(static_cast<size_t>(problem.kv.num_kv_heads * problem.kv.head_dim));
  for (size_t i = 0; i < given.size(); ++i) {
    means[i] = static_cast<float>(static_cast<double>(given[i]) / kMeanSteps);
  }
  problem.means = lowering.constant(means);
  problem.heads = indexed_heads(lowering, node);
  lowering.add(node, problem, index_places(lowering, node));
}

void lower_bucket_index(Lowering& lowering, const Node& node) {
  require_alone(lowering, node);
  ops::BucketIndexProblem problem;
  problem.q_stride = lowering.cols(node.inputs[0]);
  problem.num_qo_heads = int_attribute(node, "heads");
  problem.kv.num_kv_heads = int_attribute(node, "kv_heads");
  problem.kv.head_dim = int_attribute(node, "head_dim");
  problem.kv.dtype = lowering.kv_dtype();
  problem.bits = int_attribute(node, "bits");
  problem.keys = int_attribute(node, "keys");
  problem.samples = int_attribute(node, "samples");
  problem.sink_tokens = int_attribute(node, "sink_tokens");
  problem.local_tokens = int_attribute(node, "local_tokens");
  problem.min_tokens = int_attribute(node, "min_tokens");
  problem.seed = static_cast<uint64_t>(node.get_int("seed"));
  problem.layer = int_attribute(node, "layer");
  problem.planes =
      lowering.hash_constants(ops::kBucketPlanes, problem.kv.head_dim, node.get_int("seed")).planes;
  problem.heads = indexed_heads(lowering, node);
  problem.max_kv_len = lowering.max_seq_len();
  lowering.add(node, problem, index_places(lowering, node));
}

void lower_history_index(Lowering& lowering, const Node& node) {
  ops::HistoryIndexProblem problem;
  problem.pages = row_index(lowering, node);
  problem.network = lowering.weights().floats(lowering.graph().value(node.inputs[2]));
  problem.every = int_attribute(node, "every");
  problem.pages.planes.name = node.get_string("plane");
  lowering.add(node, problem, index_places(lowering, node));
}

void lower_strided_index(Lowering& lowering, const Node& node) {
  ops::StridedIndexProblem problem;
  problem.stride = int_attribute(node, "stride");
  problem.shift = int_attribute(node, "shift");
  problem.sink_tokens = int_attribute(node, "sink_tokens");
  problem.local_tokens = int_attribute(node, "local_tokens");
  problem.min_tokens = int_attribute(node, "min_tokens");
  problem.heads = indexed_heads(lowering, node);
  lowering.add(node, problem, index_places(lowering, node));
}

// Layers whose lists have one shape write them to one place, one after the other: those of the
// earlier layer must still be there.
void lower_copy_index(Lowering& lowering, const Node& node) {
  const Graph& graph = lowering.graph();
  const size_t slot = lowering.visit_slot(node);
  const Node* from = maker_of(graph, node.inputs[0]);
  while (from->op == "copy_index") from = maker_of(graph, from->inputs[0]);
  const std::string layer = std::to_string(lowering.visited_layer(*from));
  if (lowering.visit_slot(*from) != slot) {
    throw Unsupported("[copy_index] from: expected lists of the heads and kinds (of prompts, of " +
                      std::string("generated rows) that layer ") +
                      std::to_string(node.get_int("layer")) + " has, got those of layer " + layer);
  }
  const Node* last = nullptr;
  for (const Node& each : graph.nodes) {
    if (&each == &node) break;
    const bool writes = chooses_rows(each) && each.op != "copy_index";
    if (writes && lowering.visit_slot(each) == slot) last = &each;
  }
  if (last == nullptr || lowering.visited_layer(*last) != lowering.visited_layer(*from)) {
    throw Unsupported("[copy_index] from: expected the last lists of generated rows, got those " +
                      std::string("of layer ") + layer + ", which a later layer's replaced");
  }
}

}  // namespace effinfer::compiler
