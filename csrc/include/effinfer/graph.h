// The graph: SSA over symbolic sizes, printable and parseable.
//
//   graph llama {
//     input %token_ids : i32[T]
//     input %positions : i32[T]
//     input %logit_rows : i32[R]
//     weight %embed = "token_embd.weight" : q8_0[49152, 576]
//     %x : f32[T, 576] = embedding(%token_ids, %embed) {scale = 1.0}
//     ...
//     return %logits
//   }
//
// Sizes: T tokens in the step, S sequences in the step, R rows whose logits are wanted, constants.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "effinfer/dtype.h"
#include "effinfer/export.h"
#include "effinfer/tensor.h"

namespace effinfer {

// A dimension: a constant, or one of the step's sizes.
struct EFFINFER_API Dim {
  enum class Kind : uint8_t { constant, tokens, sequences, rows };
  Kind kind = Kind::constant;
  int64_t value = 0;  // constant only

  static Dim constant(int64_t value) { return {Kind::constant, value}; }
  static Dim tokens() { return {Kind::tokens, 0}; }
  static Dim sequences() { return {Kind::sequences, 0}; }
  static Dim rows() { return {Kind::rows, 0}; }
  bool operator==(const Dim&) const = default;
  std::string to_string() const;
};

using Shape = std::vector<Dim>;
using ValueId = int32_t;  // index into Graph::values

// What a node's attribute may be. Lists are of integers.
using Attribute = std::variant<int64_t, double, bool, std::string, std::vector<int64_t>>;
using Attributes = std::map<std::string, Attribute, std::less<>>;

struct EFFINFER_API Value {
  enum class Kind : uint8_t { input, weight, node };
  std::string name;  // without the %; unique in the graph
  DType dtype = DType::f32;
  Shape shape;
  Kind kind = Kind::node;
  std::string weight_name;  // Kind::weight: the name in the weight source
};

struct EFFINFER_API Node {
  std::string op;
  std::vector<ValueId> inputs;
  Attributes attributes;
  std::vector<ValueId> outputs;

  // Typed access; throws FormatError naming node and attribute when absent or of another type.
  int64_t get_int(std::string_view key) const;
  double get_float(std::string_view key) const;  // accepts an integer
  bool get_bool(std::string_view key) const;
  const std::string& get_string(std::string_view key) const;
  const std::vector<int64_t>& get_ints(std::string_view key) const;
  bool has(std::string_view key) const;
};

struct EFFINFER_API Graph {
  std::string name;
  Attributes metadata;  // model facts that the runtime needs: layers, kv heads, context, vocabulary
  std::vector<Value> values;
  std::vector<ValueId> inputs;
  std::vector<ValueId> weights;
  std::vector<Node> nodes;  // in execution order
  std::vector<ValueId> outputs;

  const Value& value(ValueId id) const { return values[static_cast<size_t>(id)]; }

  // The text form; parse(to_string()) gives an equal graph.
  std::string to_string() const;
  // Throws FormatError with line and column.
  static Graph parse(std::string_view text);
  // Checks that every use follows its definition, names are unique, ops are known, and shapes,
  // dtypes and attributes fit each op. Throws FormatError naming the node.
  void verify() const;
};

// The operators that a node may have; docs/graph_ops.md describes them.
EFFINFER_API std::vector<std::string> op_names();

// Builds a graph node by node, inferring and checking shapes as it goes: what the model definitions
// use. Every method throws InvalidArgument naming op and argument.
class EFFINFER_API GraphBuilder {
 public:
  explicit GraphBuilder(std::string name);

  ValueId input(std::string name, DType dtype, Shape shape);
  ValueId weight(std::string weight_name, DType dtype, const Dims& dims);
  // Appends a node of any known op; returns its outputs.
  std::vector<ValueId> node(std::string op, std::vector<ValueId> inputs,
                            Attributes attributes = {});
  // Names what a node has made: what a graph returns has a name to be read by.
  void rename(ValueId value, std::string name);
  void set_metadata(std::string key, Attribute value);
  const Graph& graph() const { return graph_; }
  // Sets the outputs, verifies, and hands the graph over.
  Graph finish(std::vector<ValueId> outputs);

 private:
  ValueId add_value(Value value);
  Graph graph_;
};

}  // namespace effinfer
