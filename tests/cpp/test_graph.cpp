// The graph IR and the tools that passes are written with.
#include <algorithm>
#include <limits>
#include <random>
#include <set>
#include <string>

#include "check.h"
#include "compiler/arithmetic.h"
#include "compiler/lowering.h"
#include "compiler/memory_plan.h"
#include "compiler/rewriter.h"
#include "effinfer/error.h"
#include "effinfer/graph.h"
#include "effinfer/ops/rope.h"
#include "graph/op_specs.h"
#include "ops/elementwise.h"
#include "ops/limits.h"

using namespace effinfer;

namespace {

constexpr const char* kText = R"(graph g {
  meta eos_token_ids = [1, -2]
  meta label = "a \"quoted\" \\ line\x0a"
  meta ratio = 0.1
  input %x : f32[T, 8]
  input %rows : i32[R]
  weight %w = "out.weight" : q8_0[4, 32]
  %a : f32[T, 8] = silu(%x)
  %b : f32[T, 8] = mul(%a, %x)
  %c : f32[R, 8] = select_rows(%b, %rows)
  return %c, %a
}
)";

int index_of(const Graph& graph, std::string_view op) {
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (graph.nodes[i].op == op) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace

TEST("graph: text round trips and attributes are typed") {
  const Graph graph = Graph::parse(kText);
  graph.verify();
  CHECK_EQ(graph.to_string(), std::string(kText));
  CHECK_EQ(std::get<std::string>(graph.metadata.at("label")), "a \"quoted\" \\ line\n");
  CHECK_EQ(std::get<double>(graph.metadata.at("ratio")), 0.1);
  Node node{"scale", {}, {{"factor", int64_t{2}}, {"flag", true}}, {}};
  CHECK_EQ(node.get_float("factor"), 2.0);
  CHECK_EQ(node.get_int("factor"), 2);
  CHECK(node.get_bool("flag"));
  CHECK_THROWS(FormatError, "scale: expected an attribute \"flag\" of type string",
               node.get_string("flag"));
  CHECK_THROWS(FormatError, "got none", node.get_ints("list"));
}

TEST("graph: every operator has a specification, and defaults of its own type") {
  for (const graph::OpSpec& op : graph::all_ops()) {
    CHECK(graph::find_op(op.name) == &op);
    CHECK(op.min_inputs >= 1 && op.min_inputs <= op.max_inputs);
    Node node{std::string(op.name), {}, {}, {}};
    graph::fill_defaults(node);
    for (const graph::AttributeSpec& attribute : op.attributes) {
      CHECK_EQ(node.has(attribute.name), attribute.default_value.has_value());
    }
  }
  CHECK(graph::find_op("nothing") == nullptr);
  CHECK_EQ(op_names().size(), graph::all_ops().size());
}

TEST("graph: attributes of earlier versions are read, and print as those of today") {
  const std::string text = R"(graph g {
  input %x : f32[T, 64]
  %kv : kv[0, 1, 64] = kv_append(%x, %x) {head_dim = 64, heads = 1, layer = 0}
  %c : visits[0, 1] = column_index(%x, %kv) {layer = 0, heads = 1, kv_heads = 1, head_dim = 64,
    scale = 0.25, sinks = 3, window = 5}
  %b : visits[0, 1] = block_index(%x, %kv, %c) {layer = 0, heads = 1, kv_heads = 1, head_dim = 64,
    scale = 0.25, sinks = 3, window = 5}
  %y : f32[T, 64] = attention(%x, %kv) {layer = 0, heads = 1, kv_heads = 1, head_dim = 64,
    scale = 0.25, window = 7, sinks = 2, soft_cap = 30.0}
  return %y
})";
  const Graph graph = Graph::parse(text);
  graph.verify();
  for (const size_t index : {size_t{1}, size_t{2}}) {
    const Node& node = graph.nodes[index];
    CHECK_EQ(node.get_float("sm_scale"), 0.25);
    CHECK_EQ(node.get_int("sink_tokens"), 3);
    CHECK_EQ(node.get_int("local_tokens"), 5);
  }
  const Node& attention = graph.nodes[3];
  CHECK_EQ(attention.get_float("sm_scale"), 0.25);
  CHECK_EQ(attention.get_int("window_left"), 7);
  CHECK_EQ(attention.get_int("sink_tokens"), 2);
  CHECK_EQ(attention.get_float("logits_soft_cap"), 30.0);
  CHECK(graph.to_string().find(" scale = ") == std::string::npos);
  CHECK_EQ(Graph::parse(graph.to_string()).to_string(), graph.to_string());

  std::string both = text;
  both.insert(both.rfind("soft_cap"), "logits_soft_cap = 20.0, ");
  CHECK_THROWS(FormatError, "soft_cap: expected only its name of today, logits_soft_cap, got both",
               Graph::parse(both));
  GraphBuilder builder("g");
  const ValueId x = builder.input("x", DType::f32, {Dim::tokens(), Dim::constant(64)});
  const ValueId kv = builder.node("kv_append", {x, x}, Node(graph.nodes[0]).attributes)[0];
  Attributes old = attention.attributes;
  old["window"] = int64_t{7};
  CHECK_THROWS(InvalidArgument, "window: expected no such attribute",
               builder.node("attention", {x, kv}, old));
}

TEST("graph: a matmul takes as many inputs as its parts can have") {
  CHECK_EQ(graph::find_op("matmul")->max_inputs, 1u + 3u * ops::kMaxMatmulParts);
}

TEST("traits: the gates are the activations that matmuls and single nodes know") {
  std::vector<std::string_view> gates;
  for (const graph::OpSpec& op : graph::all_ops()) {
    if (!op.gate) continue;
    gates.push_back(op.name);
    CHECK(op.row_wise && op.cheap && op.max_inputs == 1 && op.attributes.empty());
    CHECK(ops::is_activation(ops::parse_activation(op.name)));
  }
  CHECK(gates ==
        std::vector<std::string_view>({"silu", "gelu", "gelu_tanh", "relu_squared", "sigmoid"}));
}

TEST("the parameter of an element-by-element operator is its node's one attribute") {
  const graph::OpSpec* softcap = graph::find_op("softcap");
  CHECK(softcap != nullptr && !softcap->gate && softcap->row_wise && softcap->cheap);
  CHECK_EQ(softcap->attributes.size(), 1u);
  CHECK_EQ(softcap->attributes[0].name, "cap");
  CHECK(graph::find_op("none") == nullptr);
}

TEST("lowering: what canonicalize leaves has a rule, and nothing else has") {
  std::set<std::string_view> expected;
  for (const graph::OpSpec& op : graph::all_ops()) {
    if (!op.source_only) expected.insert(op.name);
  }
  const std::vector<std::string_view> rules = compiler::lowered_ops();
  CHECK_EQ(rules.size(), expected.size());
  for (const std::string_view op : rules) CHECK_EQ(expected.erase(op), 1u);
  for (const std::string_view op : expected) CHECK_EQ(op, "an operator with a rule");
}

TEST("lowering: unknown names of kinds are refused") {
  CHECK(ops::parse_unary_op("softcap") == ops::UnaryOp::softcap);
  CHECK_THROWS(InvalidArgument, "got \"swish\"", ops::parse_unary_op("swish"));
  CHECK(ops::parse_binary_op("mul") == ops::BinaryOp::mul);
  CHECK_THROWS(InvalidArgument, "expected one of add, mul, got \"sub\"",
               ops::parse_binary_op("sub"));
  CHECK(ops::parse_activation("relu_squared") == ops::UnaryOp::relu_squared);
  CHECK_THROWS(InvalidArgument, "got \"none\"", ops::parse_activation("none"));
  CHECK_THROWS(InvalidArgument, "got \"softcap\"", ops::parse_activation("softcap"));
  CHECK(compiler::parse_arithmetic("bf16") == ops::Arithmetic::bf16);
  CHECK_THROWS(FormatError, "got \"f16\"", compiler::parse_arithmetic("f16"));
  CHECK(parse_rope_scaling("yarn") == RopeScaling::yarn);
  CHECK_THROWS(InvalidArgument, "got \"ntk\"", parse_rope_scaling("ntk"));
}

TEST("graph: a hand-made graph with wild ids is refused") {
  Graph graph = Graph::parse(kText);
  graph.nodes[0].inputs[0] = 1000000;
  CHECK_THROWS(FormatError, "before its definition", graph.verify());
  graph = Graph::parse(kText);
  graph.nodes[1].outputs[0] = -1;
  CHECK_THROWS(FormatError, "does not exist", graph.verify());
  graph = Graph::parse(kText);
  graph.nodes[1].outputs[0] = graph.nodes[0].outputs[0];
  CHECK_THROWS(FormatError, "defined twice", graph.verify());
  graph = Graph::parse(kText);
  graph.outputs = {std::numeric_limits<ValueId>::min()};
  CHECK_THROWS(FormatError, "return", graph.verify());
}

TEST("graph: long and deep texts cost no stack") {
  std::string text = "graph g {\n";
  for (int i = 0; i < 20000; ++i) text += " meta k" + std::to_string(i) + " = [1, 2]\n";
  text += " input %x : f32[T, 8]\n return %x }";
  CHECK_EQ(Graph::parse(text).metadata.size(), 20000u);
  CHECK_THROWS(FormatError, "1:15",
               Graph::parse(std::string("graph g { meta") + std::string(100000, '[')));
  CHECK_THROWS(FormatError, "an integer",
               Graph::parse("graph g { meta k = " + std::string(100000, '[')));
}

TEST("rewriter: producers, users and edits") {
  Graph graph = Graph::parse(kText);
  compiler::Rewriter rewriter(graph);
  const int silu = index_of(graph, "silu");
  const int mul = index_of(graph, "mul");
  const ValueId a = graph.nodes[static_cast<size_t>(silu)].outputs[0];
  const ValueId b = graph.nodes[static_cast<size_t>(mul)].outputs[0];
  CHECK_EQ(rewriter.producer(a), silu);
  CHECK_EQ(rewriter.producer(graph.inputs[0]), -1);
  CHECK_EQ(rewriter.users(graph.inputs[0]).size(), 2u);
  // %a has one user among the nodes, but the graph returns it.
  CHECK_EQ(rewriter.only_user(a, "mul"), -1);
  CHECK(rewriter.only_user(b, "select_rows") > mul);
  CHECK_EQ(rewriter.only_user(b, "silu"), -1);

  Node add{"add", {a, a}, {}, {b}};
  rewriter.replace(mul, add);
  CHECK_EQ(rewriter.users(a).size(), 2u);
  CHECK_EQ(rewriter.users(graph.inputs[0]).size(), 1u);
  const ValueId fresh = rewriter.add_value("a", DType::f32, Shape{Dim::tokens()});
  CHECK_EQ(graph.value(fresh).name, "a_1");
  rewriter.erase(silu);
  CHECK_EQ(rewriter.producer(a), -1);
  CHECK(!rewriter.is(silu, "silu"));
  rewriter.finish();
  CHECK_EQ(graph.nodes.size(), 2u);
  CHECK_EQ(graph.nodes[0].op, "add");
}

TEST("memory plan: random lifetimes never overlap") {
  std::mt19937 rng(11);
  for (int round = 0; round < 300; ++round) {
    std::vector<compiler::Lifetime> lives(rng() % 40);
    int64_t most = 0;
    for (compiler::Lifetime& life : lives) {
      life.first = static_cast<int>(rng() % 30);
      life.last = life.first + static_cast<int>(rng() % 10);
      life.bytes = static_cast<int64_t>(rng() % 5000);
      most += (life.bytes + 63) / 64 * 64;
    }
    const compiler::ArenaPlan plan = compiler::plan_arena(lives);
    CHECK(plan.bytes <= most);
    for (size_t i = 0; i < lives.size(); ++i) {
      CHECK_EQ(plan.offsets[i] % compiler::kArenaAlignment, 0);
      CHECK(plan.offsets[i] + lives[i].bytes <= plan.bytes);
      for (size_t j = 0; j < i; ++j) {
        const bool apart_in_time = lives[i].last < lives[j].first || lives[j].last < lives[i].first;
        const bool apart = plan.offsets[i] + lives[i].bytes <= plan.offsets[j] ||
                           plan.offsets[j] + lives[j].bytes <= plan.offsets[i];
        CHECK(apart_in_time || apart);
      }
    }
  }
}

TEST("memory plan: absurd sizes are refused") {
  CompileOptions options;
  options.max_tokens = std::numeric_limits<int32_t>::max();
  const Value huge{
      "x", DType::f32, {Dim::tokens(), Dim::constant(int64_t{1} << 40)}, Value::Kind::node, ""};
  CHECK_THROWS(OutOfMemory, "%x is too large", compiler::largest_bytes(huge, Node{}, options));
}

CHECK_MAIN()
