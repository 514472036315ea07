#include "effinfer/graph.h"

#include <algorithm>

#include "effinfer/error.h"
#include "graph/text.h"

namespace effinfer {
namespace {

template <class T>
const T* find(const Node& node, std::string_view key) {
  const auto entry = node.attributes.find(key);
  return entry == node.attributes.end() ? nullptr : std::get_if<T>(&entry->second);
}

[[noreturn]] void missing(const Node& node, std::string_view key, const char* type) {
  throw FormatError("[graph] " + node.op + ": expected an attribute \"" + std::string(key) +
                    "\" of type " + type + ", got " +
                    (node.has(key) ? "one of another type" : "none"));
}

}  // namespace

std::string graph::unique_name(const Graph& graph, std::string_view name) {
  const auto taken = [&](const std::string& candidate) {
    return std::any_of(graph.values.begin(), graph.values.end(),
                       [&](const Value& value) { return value.name == candidate; });
  };
  std::string unique(name);
  for (int suffix = 1; taken(unique); ++suffix) {
    unique = std::string(name) + "_" + std::to_string(suffix);
  }
  return unique;
}

std::string Dim::to_string() const {
  switch (kind) {
    case Kind::tokens:
      return "T";
    case Kind::sequences:
      return "S";
    case Kind::rows:
      return "R";
    case Kind::constant:
      break;
  }
  return std::to_string(value);
}

int64_t Node::get_int(std::string_view key) const {
  const int64_t* value = find<int64_t>(*this, key);
  if (value == nullptr) missing(*this, key, "integer");
  return *value;
}

double Node::get_float(std::string_view key) const {
  if (const double* value = find<double>(*this, key)) return *value;
  if (const int64_t* value = find<int64_t>(*this, key)) return static_cast<double>(*value);
  missing(*this, key, "float");
}

bool Node::get_bool(std::string_view key) const {
  const bool* value = find<bool>(*this, key);
  if (value == nullptr) missing(*this, key, "bool");
  return *value;
}

const std::string& Node::get_string(std::string_view key) const {
  const std::string* value = find<std::string>(*this, key);
  if (value == nullptr) missing(*this, key, "string");
  return *value;
}

const std::vector<int64_t>& Node::get_ints(std::string_view key) const {
  const std::vector<int64_t>* value = find<std::vector<int64_t>>(*this, key);
  if (value == nullptr) missing(*this, key, "list of integers");
  return *value;
}

bool Node::has(std::string_view key) const {
  return attributes.contains(key);
}

}  // namespace effinfer
