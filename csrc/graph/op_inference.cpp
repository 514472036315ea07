#include "graph/op_inference.h"

#include <algorithm>

#include "effinfer/ops/rope.h"
#include "graph/text.h"
#include "ops/attention.h"
#include "ops/hash_tables.h"
#include "ops/history_index.h"
#include "ops/kv_layout.h"
#include "ops/limits.h"

namespace effinfer::graph {
namespace {

ValueType floats(Dim rows, int64_t cols) {
  return {DType::f32, {rows, Dim::constant(cols)}};
}

// Floats, or a matmul operand when the node writes one.
ValueType floats_or_operand(const OpContext& context, const Shape& shape) {
  return {context.node().get_bool("as_operand") ? DType::act : DType::f32, shape};
}

// x [X, heads * head_dim], from the attributes.
void heads_fit(const OpContext& context, std::string_view argument, const Shape& shape,
               std::string_view heads) {
  const int64_t columns = context.positive(heads) * context.positive("head_dim");
  if (shape[1].value != columns) {
    context.fail(argument,
                 std::string(heads) + " * head_dim = " + std::to_string(columns) + " columns",
                 to_string(shape));
  }
}

void rows_are_tokens(const OpContext& context, std::string_view argument, const Shape& shape) {
  if (shape[0].kind != Dim::Kind::tokens) {
    context.fail(argument, "one row a token (T)", to_string(shape));
  }
}

// The handle of a layer's cache: kv[layer, heads, head_dim], so that what reads it is checked
// against what wrote it.
ValueType kv_handle(const OpContext& context, std::string_view heads) {
  return {DType::kv,
          {Dim::constant(context.positive("layer", 0)), Dim::constant(context.positive(heads)),
           Dim::constant(context.positive("head_dim"))}};
}

// The cos/sin table of a rotation of heads of `head_dim`.
void table_fits(const OpContext& context, size_t index) {
  const Shape& table = context.matrix(index, "table", DType::f32);
  rows_are_tokens(context, "table", table);
  const int64_t dims = table[1].value;
  if (dims < 2 || dims % 2 != 0 || dims > context.positive("head_dim")) {
    context.fail("table", "an even number of columns, at most head_dim", to_string(table));
  }
}

void columns_fit(const OpContext& context, std::string_view argument, const Shape& weight,
                 const Shape& x) {
  if (weight[1] != x[1]) {
    context.fail(argument, x[1].to_string() + " columns", to_string(weight));
  }
}

// Each listed part once, in order.
void parts_listed(const OpContext& context, std::string_view attribute, size_t parts) {
  int64_t last = -1;
  for (const int64_t part : context.node().get_ints(attribute)) {
    if (part <= last || part >= static_cast<int64_t>(parts)) {
      context.fail(attribute, "increasing numbers of parts", std::to_string(part));
    }
    last = part;
  }
}

// Checks the inputs of a matmul and gives the outputs of its parts.
std::vector<ValueType> matmul_parts(const OpContext& context) {
  const Shape& x = context.matrix(0, "x", DType::act);
  const int64_t count = context.positive("parts");
  if (count > ops::kMaxMatmulParts) {
    context.fail("parts", "at most " + std::to_string(ops::kMaxMatmulParts), std::to_string(count));
  }
  const auto parts = static_cast<size_t>(count);
  parts_listed(context, "bias", parts);
  parts_listed(context, "residual", parts);
  const MatmulInputs inputs = matmul_inputs(context.node());
  context.num_inputs_is(1 + parts + inputs.bias_parts.size() + inputs.residual_parts.size());
  std::vector<ValueType> outputs;
  for (size_t part = 0; part < parts; ++part) {
    const Shape& weight = context.weight(inputs.weight(part), "weight");
    columns_fit(context, "weight", weight, x);
    outputs.push_back(floats(x[0], weight[0].value));
    if (const auto bias = inputs.bias(part)) context.vector(*bias, "bias", weight[0].value);
    if (const auto residual = inputs.residual(part)) {
      context.matrix(*residual, "residual", DType::f32);
      context.same_shape(*residual, "residual", outputs.back().shape);
    }
  }
  return outputs;
}

// q [T, heads * head_dim] and the handle of the layer's cache.
const Shape& queries_and_cache(const OpContext& context) {
  const Shape& q = context.matrix(0, "q", DType::f32);
  rows_are_tokens(context, "q", q);
  heads_fit(context, "q", q, "heads");
  const ValueType kv = kv_handle(context, "kv_heads");
  const Value& handle = context.input(1);
  if (handle.dtype != DType::kv || handle.kind != Value::Kind::node || handle.shape != kv.shape) {
    context.fail("kv", "the handle kv" + to_string(kv.shape) + " of a kv_append",
                 type_to_string(handle));
  }
  if (context.positive("heads") % context.positive("kv_heads") != 0) {
    context.fail("kv_heads", "a divisor of heads",
                 std::to_string(context.node().get_int("kv_heads")));
  }
  return q;
}

// The handle of a layer's lists: visits[layer, kv_heads]. An index of other keys than the layer's
// says which one it is.
ValueType visits_handle(const OpContext& context) {
  int64_t layer = context.positive("layer", 0);
  if (context.node().op == "key_index" && context.positive("of_layer", -1) >= 0) {
    layer = context.node().get_int("of_layer");
  }
  return {DType::visits, {Dim::constant(layer), Dim::constant(context.positive("kv_heads"))}};
}

void check_visits(const OpContext& context, size_t place = 2) {
  if (context.num_inputs() <= place) return;
  const ValueType visits = visits_handle(context);
  const Value& handle = context.input(place);
  if (handle.dtype != DType::visits || handle.shape != visits.shape) {
    context.fail("visits", "the handle visits" + to_string(visits.shape) + " of an index",
                 type_to_string(handle));
  }
}

// The other queries of attention to keys in chunks.
void check_chunks(const OpContext& context, const Shape& q) {
  static_assert(ops::kChunkTokens == 256);
  context.require(context.node().get_int("chunk") % ops::kChunkTokens == 0, "chunk",
                  "a multiple of 256");
  context.require(context.num_inputs() >= 4, "chunk", "0 without queries for other chunks");
  context.require(context.node().get_int("window_left") < 0, "window_left", "-1 with chunk");
  const AttentionInputs inputs = attention_inputs(context.node());
  for (const auto& [place, name] :
       {std::pair{*inputs.q_before, "q_before"}, {*inputs.q_far, "q_far"}}) {
    context.matrix(place, name, DType::f32);
    context.same_shape(place, name, q);
  }
}

void check_share(const OpContext& context, std::string_view attribute) {
  const double share = context.node().get_float(attribute);
  context.require(share >= 0.0 && share <= 1.0, attribute, "a share of at most 1");
}

void check_activation(const OpContext& context) {
  const std::string& activation = context.node().get_string("activation");
  const OpSpec* spec = find_op(activation);
  if (spec != nullptr && spec->gate) return;
  std::string gates;
  for (const OpSpec& op : all_ops()) {
    if (op.gate) gates.append(gates.empty() ? "" : ", ").append(op.name);
  }
  context.fail("activation", "one of " + gates, "\"" + activation + "\"");
}

// What indices have in common.
std::vector<ValueType> infer_index(const OpContext& context, size_t visits = 2) {
  queries_and_cache(context);
  check_visits(context, visits);
  for (const char* attribute : {"sink_tokens", "local_tokens", "min_tokens"}) {
    context.positive(attribute, 0);
  }
  int64_t last = -1;
  for (const int64_t head : context.node().get_ints("only")) {
    context.require(head > last && head < context.node().get_int("kv_heads"), "only",
                    "KV heads in increasing order");
    last = head;
  }
  return {visits_handle(context)};
}

// What indices of generated rows have in common.
std::vector<ValueType> infer_generated(const OpContext& context) {
  context.positive("keys", 0);
  context.positive("window_left", -1);
  check_share(context, "share");
  const std::string& vote = context.node().get_string("vote");
  context.require(vote == "highest" || vote == "sum", "vote", "\"highest\" or \"sum\"");
  return infer_index(context);
}

}  // namespace

std::vector<ValueType> infer_embedding(const OpContext& context) {
  const Shape& ids = context.ids(0, "ids");
  const Shape& table = context.weight(1, "table");
  return {floats(ids[0], table[1].value)};
}

std::vector<ValueType> infer_rms_norm(const OpContext& context) {
  const Shape& x = context.matrix(0, "x", DType::f32);
  const int64_t groups = context.positive("groups");
  if (x[1].value % groups != 0) {
    context.fail("groups", "a divisor of " + x[1].to_string(), std::to_string(groups));
  }
  context.vector(1, "weight", x[1].value / groups);
  context.require(context.node().get_float("eps") >= 0.0, "eps", "at least 0");
  context.require(groups == 1 || !context.node().get_bool("as_operand"), "as_operand",
                  "false with groups");
  return {floats_or_operand(context, x)};
}

std::vector<ValueType> infer_linear(const OpContext& context) {
  const Shape& x = context.matrix(0, "x", DType::f32);
  const Shape& weight = context.weight(1, "weight");
  columns_fit(context, "weight", weight, x);
  if (context.num_inputs() == 3) context.vector(2, "bias", weight[0].value);
  return {floats(x[0], weight[0].value)};
}

std::vector<ValueType> infer_ternary_linear(const OpContext& context) {
  const DType dtype = context.input(1).dtype;
  if (dtype != DType::tq1_0 && dtype != DType::tq2_0 && dtype != DType::i2_s) {
    context.fail("weight", "a ternary type: tq1_0, tq2_0 or i2_s", std::string(name(dtype)));
  }
  return infer_linear(context);
}

std::vector<ValueType> infer_rope_table(const OpContext& context) {
  const Shape& positions = context.ids(0, "positions");
  const int64_t dims = context.positive("dims", 2);
  context.require(dims % 2 == 0, "dims", "an even number");
  context.require(context.node().get_float("theta") > 0.0, "theta", "a positive number");
  parse_rope_scaling(context.node().get_string("scaling"));
  context.require(context.node().get_float("factor") > 0.0, "factor", "a positive number");
  if (context.num_inputs() == 2) context.vector(1, "divisors", dims / 2);
  const int64_t period = context.positive("period", 0);
  const int64_t shift = context.positive("shift", 0);
  const int64_t most = context.positive("most", -1);
  context.require(period > 0 || (shift == 0 && most < 0), "period",
                  "a positive number with shift or most");
  context.positive("tempered_from", 0);
  return {floats(positions[0], dims)};
}

std::vector<ValueType> infer_rope(const OpContext& context) {
  const Shape& x = context.matrix(0, "x", DType::f32);
  rows_are_tokens(context, "x", x);
  heads_fit(context, "x", x, "heads");
  table_fits(context, 1);
  return {{DType::f32, x}};
}

std::vector<ValueType> infer_kv_append(const OpContext& context) {
  const Shape& k = context.matrix(0, "k", DType::f32);
  rows_are_tokens(context, "k", k);
  heads_fit(context, "k", k, "heads");
  context.matrix(1, "v", DType::f32);
  context.same_shape(1, "v", k);
  return {kv_handle(context, "heads")};
}

std::vector<ValueType> infer_column_index(const OpContext& context) {
  context.positive("last_rows");
  for (const char* attribute : {"row_stride", "columns", "slashes"}) context.positive(attribute, 0);
  check_share(context, "column_mass");
  check_share(context, "slash_mass");
  return infer_index(context);
}

std::vector<ValueType> infer_block_index(const OpContext& context) {
  const int64_t stride = context.positive("stride", 0);
  const bool cuts_a_page = stride >= 4 && stride <= 64 && (stride & (stride - 1)) == 0;
  context.require(stride == 0 || cuts_a_page, "stride", "0, 4, 8, 16, 32 or 64");
  const std::string& queries = context.node().get_string("queries");
  context.require(queries == "mean" || (queries == "probe" && stride == 0), "queries",
                  "\"mean\", or \"probe\" with a stride of 0");
  const int64_t pages = context.positive("pages", 0);
  const int64_t keys = context.positive("keys", 0);
  check_share(context, "mass");
  check_share(context, "share");
  const bool each = pages > 0 || context.node().get_float("mass") > 0.0;
  const bool together = keys > 0 || context.node().get_float("share") > 0.0;
  context.require(!each || !together, "keys", "0, and share, with pages or mass");
  return infer_index(context);
}

std::vector<ValueType> infer_bucket_index(const OpContext& context) {
  context.require(ops::is_hash_bits(context.positive("bits")), "bits", "1 to 8");
  context.positive("keys", 0);
  context.positive("samples", 0);
  context.positive("seed", 0);
  return infer_index(context);
}

std::vector<ValueType> infer_page_index(const OpContext& context) {
  const int64_t unit = context.positive("unit");
  context.require(ops::is_bounds_unit(unit), "unit", "16, 32 or 64");
  const std::string& score = context.node().get_string("score");
  context.require(score == "bounds" || (score == "means" && ops::is_means_unit(unit)), "score",
                  "\"bounds\", or \"means\" with units of 16 or 64");
  return infer_generated(context);
}

std::vector<ValueType> infer_key_index(const OpContext& context) {
  const std::vector<int64_t>& channels = context.node().get_ints("channels");
  const auto heads = static_cast<size_t>(context.positive("kv_heads"));
  const size_t of_head = channels.size() / heads;
  bool ascend = channels.size() % heads == 0;
  for (size_t i = 0; ascend && i < channels.size(); ++i) {
    const int64_t least = i % of_head == 0 ? 0 : channels[i - 1] + 1;
    ascend = channels[i] >= least && channels[i] < context.positive("head_dim");
  }
  context.require(ascend, "channels", "none, or of each KV head as many increasing ones");
  check_share(context, "reuse");
  const bool has_plane = !context.node().get_string("plane").empty();
  context.require(has_plane == (context.node().get_float("reuse") > 0.0), "plane",
                  "a name with reuse, and none without");
  context.require(!has_plane || context.node().get_int("window_left") < 0, "window_left",
                  "-1 with reuse");
  return infer_generated(context);
}

std::vector<ValueType> infer_hash_index(const OpContext& context) {
  context.require(ops::is_hash_bits(context.positive("bits")), "bits", "1 to 8");
  context.require(ops::is_hash_tables(context.positive("tables")), "tables",
                  "a multiple of 8 up to 256");
  context.positive("seed", 0);
  const auto means = static_cast<int64_t>(context.node().get_ints("means").size());
  const int64_t all = context.positive("kv_heads") * context.positive("head_dim");
  context.require(means == 0 || means == all, "means", "none, or one of each dimension of a head");
  return infer_index(context);
}

std::vector<ValueType> infer_history_index(const OpContext& context) {
  context.vector(2, "network", ops::kHistoryWeights);
  context.require(!context.node().get_string("plane").empty(), "plane", "a name");
  context.positive("every");
  context.positive("keys", 0);
  check_share(context, "share");
  return infer_index(context, 3);
}

std::vector<ValueType> infer_strided_index(const OpContext& context) {
  context.positive("stride");
  context.positive("shift", 0);
  return infer_index(context);
}

// Lists of an earlier layer, and behind them those of the own layer's prompts.
std::vector<ValueType> infer_copy_index(const OpContext& context) {
  const ValueType own = visits_handle(context);
  const Value& from = context.input(0);
  const bool is_earlier = from.dtype == DType::visits &&
                          from.shape[0].value < context.positive("layer", 0) &&
                          from.shape[1] == own.shape[1];
  if (!is_earlier) {
    context.fail(
        "from",
        "the handle visits of an earlier layer with " + own.shape[1].to_string() + " KV heads",
        type_to_string(from));
  }
  const int64_t heads = context.positive("heads");
  context.require(heads % context.node().get_int("kv_heads") == 0, "heads",
                  "a multiple of kv_heads");
  if (context.num_inputs() == 2) check_visits(context, 1);
  return {own};
}

// The handle is the one that it reads: what stands behind it sees the sums.
std::vector<ValueType> infer_attention_mass(const OpContext& context) {
  queries_and_cache(context);
  context.require(!context.node().get_string("plane").empty(), "plane", "a name");
  const std::string& reduce = context.node().get_string("reduce");
  context.require(reduce == "sum" || reduce == "maximum", "reduce", "\"sum\" or \"maximum\"");
  const double decay = context.node().get_float("decay");
  context.require(decay >= 0.0 && decay <= 1.0, "decay", "0 to 1");
  return {kv_handle(context, "kv_heads")};
}

std::vector<ValueType> infer_attention(const OpContext& context) {
  const Shape& q = queries_and_cache(context);
  context.positive("window_left", -1);
  if (context.positive("chunk", 0) > 0) {
    check_chunks(context, q);
  } else {
    context.require(context.num_inputs() <= 3, "chunk", "a positive number with more queries");
  }
  if (attention_inputs(context.node()).visits) check_visits(context);
  context.positive("sink_tokens", 0);
  context.require(context.node().get_float("logits_soft_cap") >= 0.0, "logits_soft_cap",
                  "at least 0");
  const std::vector<int64_t>& first = context.node().get_ints("first_percent");
  const auto heads = static_cast<size_t>(context.node().get_int("heads"));
  context.require((first.empty() || first.size() == heads) &&
                      std::ranges::all_of(first, [](int64_t each) { return each > 0; }),
                  "first_percent", "none, or of each head a number above 0");
  context.require(first.empty() || !context.node().get_string("weights").empty(), "weights",
                  "a name beside first_percent");
  return {floats_or_operand(context, q)};
}

std::vector<ValueType> infer_unary(const OpContext& context) {
  return {{DType::f32, context.matrix(0, "x", DType::f32)}};
}

std::vector<ValueType> infer_binary(const OpContext& context) {
  const Shape& a = context.matrix(0, "a", DType::f32);
  context.matrix(1, "b", DType::f32);
  context.same_shape(1, "b", a);
  return {{DType::f32, a}};
}

std::vector<ValueType> infer_select_rows(const OpContext& context) {
  const Shape& x = context.matrix(0, "x", DType::f32);
  rows_are_tokens(context, "x", x);
  return {floats(context.ids(1, "rows")[0], x[1].value)};
}

std::vector<ValueType> infer_to_act(const OpContext& context) {
  return {{DType::act, context.matrix(0, "x", DType::f32)}};
}

std::vector<ValueType> infer_matmul(const OpContext& context) {
  return matmul_parts(context);
}

std::vector<ValueType> infer_matmul_glu(const OpContext& context) {
  context.require(context.node().get_int("parts") == 2, "parts", "2");
  context.require(context.node().get_ints("residual").empty(), "residual", "none");
  check_activation(context);
  const std::vector<ValueType> parts = matmul_parts(context);
  if (parts[0].shape != parts[1].shape) {
    context.fail("weight", "two parts of one shape", to_string(parts[1].shape));
  }
  return {floats_or_operand(context, parts[0].shape)};
}

std::vector<ValueType> infer_add_rms_norm(const OpContext& context) {
  const Shape& x = context.matrix(0, "x", DType::f32);
  context.matrix(1, "add_to", DType::f32);
  context.same_shape(1, "add_to", x);
  context.vector(2, "weight", x[1].value);
  context.require(context.node().get_float("eps") >= 0.0, "eps", "at least 0");
  return {{DType::f32, x}, floats_or_operand(context, x)};
}

std::vector<ValueType> infer_rope_append(const OpContext& context) {
  const Shape& q = context.matrix(0, "q", DType::f32);
  rows_are_tokens(context, "q", q);
  heads_fit(context, "q", q, "heads");
  const Shape& k = context.matrix(1, "k", DType::f32);
  rows_are_tokens(context, "k", k);
  heads_fit(context, "k", k, "kv_heads");
  context.matrix(2, "v", DType::f32);
  context.same_shape(2, "v", k);
  const RopeAppendInputs inputs = rope_append_inputs(context.node());
  context.num_inputs_is(inputs.count);
  if (inputs.table) table_fits(context, *inputs.table);
  const int64_t head_dim = context.positive("head_dim");
  if (inputs.q_norm) context.vector(*inputs.q_norm, "q_norm", head_dim);
  if (inputs.k_norm) context.vector(*inputs.k_norm, "k_norm", head_dim);
  return {{DType::f32, q}, kv_handle(context, "kv_heads")};
}

std::vector<Alias> alias_first(const Node&) {
  return {{0, 0}};
}

std::vector<Alias> alias_both(const Node&) {
  return {{0, 0}, {0, 1}};
}

std::vector<Alias> alias_unless_operand(const Node& node) {
  if (node.get_bool("as_operand")) return {};
  return {{0, 0}};
}

std::vector<Alias> alias_residuals(const Node& node) {
  const MatmulInputs inputs = matmul_inputs(node);
  std::vector<Alias> aliases;
  for (size_t part = 0; part < inputs.parts; ++part) {
    if (const auto residual = inputs.residual(part)) {
      aliases.push_back({static_cast<int>(part), static_cast<int>(*residual)});
    }
  }
  return aliases;
}

}  // namespace effinfer::graph
