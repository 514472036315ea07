// The table of operators: what each takes and gives. GraphBuilder, the parser, the verifier and the
// passes read it; docs/graph_ops.md is its prose.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "effinfer/graph.h"

namespace effinfer::graph {

enum class AttributeType : uint8_t { integer, number, boolean, string, integers };

struct AttributeSpec {
  std::string_view name;
  AttributeType type;
  std::optional<Attribute> default_value;  // empty: must be given
};

struct ValueType {
  DType dtype = DType::f32;
  Shape shape;
};

// An output that may share the bytes of an input when that input is not needed afterwards.
struct Alias {
  int output;
  int input;
};

// A node in the graph that it is of; gives its inputs, and fails with a message of the right form.
class OpContext {
 public:
  OpContext(const Graph& graph, const Node& node) : graph_(graph), node_(node) {}
  const Node& node() const { return node_; }
  const Value& input(size_t index) const { return graph_.value(node_.inputs[index]); }
  size_t num_inputs() const { return node_.inputs.size(); }

  // Throws InvalidArgument "[op] argument: expected X, got Y".
  [[noreturn]] void fail(std::string_view argument, const std::string& expected,
                         const std::string& got) const;
  // Each throws unless the input is of that kind; the shape comes back.
  const Shape& matrix(size_t index, std::string_view argument, DType dtype) const;  // [X, N]
  const Shape& ids(size_t index, std::string_view argument) const;           // an input, i32 [X]
  const Shape& weight(size_t index, std::string_view argument) const;        // [N, K] of a weight
  void vector(size_t index, std::string_view argument, int64_t size) const;  // weight [size]
  void same_shape(size_t index, std::string_view argument, const Shape& shape) const;
  void num_inputs_is(size_t count) const;
  // An integer attribute of at least `least` and at most kMaxCount.
  int64_t positive(std::string_view attribute, int64_t least = 1) const;
  void require(bool condition, std::string_view argument, const char* expected) const;

 private:
  const Graph& graph_;
  const Node& node_;
};

// An input that must be the step's input of this name.
struct StepInput {
  size_t index;
  std::string_view name;
};

// Everything that graph and compiler must know of an operator, declared once.
struct OpSpec {
  std::string_view name;
  size_t min_inputs = 1;
  size_t max_inputs = 1;
  std::vector<AttributeSpec> attributes = {};
  // The types of the outputs; throws through the context when the node is wrong. Arity and
  // attributes have been checked.
  std::vector<ValueType> (*infer)(const OpContext&) = nullptr;
  std::vector<Alias> (*aliases)(const Node&) = nullptr;  // null: no output is made in place
  std::optional<StepInput> step_input = {};              // what compile() checks of an input
  // Row i of the one output is made from row i of the inputs and from weights, for any number of
  // rows: hoist_select_rows may move it behind a selection.
  bool row_wise = false;
  // A row costs less than a barrier: fuse_regions may let every thread compute all rows of a small
  // step for itself.
  bool cheap = false;
  // An activation that gates a product: fuse_activation makes it the epilogue of a matmul.
  bool gate = false;
  // canonicalize writes it in other operators, so that no rule lowers it.
  bool source_only = false;
};

// Null for an unknown op.
const OpSpec* find_op(std::string_view name);
// The spec of a node that has been verified; throws FormatError for an unknown op.
const OpSpec& spec_of(const Node& node);
const std::vector<OpSpec>& all_ops();

// Adds the defaults of attributes that are absent, and turns integers into floats where a float is
// meant. Leaves unknown ops alone.
void fill_defaults(Node& node);

// Gives attributes that have an earlier version's name the name of today: graphs in files may be
// old. Throws InvalidArgument when a node has both.
void rename_attributes(Node& node);

// Checks arity and attributes, then infers. Throws InvalidArgument.
std::vector<ValueType> infer(const Graph& graph, const Node& node);

// Inputs of `matmul` and `matmul_glu`: x, the weights of the parts, the biases of the parts listed
// in `bias`, the residuals of the parts listed in `residual`.
struct MatmulInputs {
  size_t parts = 0;
  size_t weight(size_t part) const { return 1 + part; }
  std::optional<size_t> bias(size_t part) const;
  std::optional<size_t> residual(size_t part) const;
  std::vector<int64_t> bias_parts;
  std::vector<int64_t> residual_parts;
};
MatmulInputs matmul_inputs(const Node& node);

// Inputs of `rope_append`: q, k, v, then those of table, q_norm, k_norm that it has.
struct RopeAppendInputs {
  std::optional<size_t> table;
  std::optional<size_t> q_norm;
  std::optional<size_t> k_norm;
  size_t count = 3;
};
RopeAppendInputs rope_append_inputs(const Node& node);

// Inputs of `attention`: q, kv, visits if it has some; with chunks the queries for keys of the
// chunk before a row's own, and for those of older ones.
struct AttentionInputs {
  std::optional<size_t> visits;
  std::optional<size_t> q_before;
  std::optional<size_t> q_far;
};
AttentionInputs attention_inputs(const Node& node);

// Attributes that passes put on any node; see docs/graph_ops.md.
inline constexpr std::string_view kArenaKey = "arena";  // offset of each output, -1: none
inline constexpr std::string_view kOwnKey = "own";      // the same in a member's own arena
inline constexpr std::string_view kEveryMemberKey = "every_member";  // see fuse_regions
inline constexpr std::string_view kInAttentionKey = "in_attention";  // see fuse_regions
inline constexpr std::string_view kDecodeKey = "decode";    // arithmetic of an `act` output
inline constexpr std::string_view kPrefillKey = "prefill";  // by phase: "int8", "bf16" or "f32"
// Arithmetic of attention's own products in prefill, where it is not that of decode (f32).
inline constexpr std::string_view kPrefillProductsKey = "prefill_products";
// What a matmul rounds its weights to in prefill, where it multiplies them exactly in decode:
// "bf16".
inline constexpr std::string_view kPrefillWeightsKey = "prefill_weights";
// Of attention whose sums in prefill need not be those of decode, bit for bit: "own".
inline constexpr std::string_view kPrefillSumsKey = "prefill_sums";

// The arithmetic of the operand of ternary_linear, in both phases and with any options: it is part
// of the model.
inline constexpr std::string_view kTernaryArithmetic = "int8_token";
// Whether the node's operand is one of those, once canonicalize has said so.
bool is_ternary_operand(const Node& node);

}  // namespace effinfer::graph
