// What the printer, the parser and the verifier agree on.
#pragma once

#include <string>
#include <string_view>

#include "effinfer/graph.h"

namespace effinfer::graph {

// Names of graphs, ops, keys and values: [A-Za-z_][A-Za-z0-9_.]*
inline bool is_name_start(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
inline bool is_name_char(char c) {
  return is_name_start(c) || (c >= '0' && c <= '9') || c == '.';
}
bool is_name(std::string_view text);

// `name`, or `name_1`, `name_2`, ... when a value of the graph has it.
std::string unique_name(const Graph& graph, std::string_view name);

std::string to_string(const Shape& shape);  // "[T, 576]"
// "f32[T, 576]".
std::string type_to_string(const Value& value);

// No constant dimension is larger: products of a few stay far from the limits of int64.
inline constexpr int64_t kMaxDim = int64_t{1} << 40;
// No count in an attribute is larger: the product of two fits int64, and each fits int32.
inline constexpr int64_t kMaxCount = int64_t{1} << 30;
inline constexpr size_t kMaxValues = size_t{1} << 20;

}  // namespace effinfer::graph
