// The text form. Every number prints so that it parses back to the same bits.
#include <array>
#include <charconv>

#include "graph/text.h"

namespace effinfer {
namespace graph {
namespace {

std::string quote(std::string_view text) {
  static constexpr std::string_view kHex = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      out += "\\x";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    } else {
      out += c;
    }
  }
  return out + "\"";
}

// The shortest digits that give the same double; a float never looks like an integer.
std::string print_double(double value) {
  std::array<char, 32> buffer;
  const auto [end, error] = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  std::string text(buffer.data(), end);
  if (text.find_first_of(".enia") == std::string::npos) text += ".0";
  return text;
}

std::string print(const Attribute& attribute) {
  struct Printer {
    std::string operator()(int64_t value) const { return std::to_string(value); }
    std::string operator()(double value) const { return print_double(value); }
    std::string operator()(bool value) const { return value ? "true" : "false"; }
    std::string operator()(const std::string& value) const { return quote(value); }
    std::string operator()(const std::vector<int64_t>& values) const {
      std::string text = "[";
      for (size_t i = 0; i < values.size(); ++i) {
        text += (i == 0 ? "" : ", ") + std::to_string(values[i]);
      }
      return text + "]";
    }
  };
  return std::visit(Printer{}, attribute);
}

std::string print(const Graph& graph, const Node& node) {
  std::string text;
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    const Value& value = graph.value(node.outputs[i]);
    text += (i == 0 ? "%" : ", %") + value.name + " : " + type_to_string(value);
  }
  text += " = " + node.op + "(";
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    text += (i == 0 ? "%" : ", %") + graph.value(node.inputs[i]).name;
  }
  text += ")";
  const char* separator = " {";
  for (const auto& [key, value] : node.attributes) {
    text += separator + key + " = " + print(value);
    separator = ", ";
  }
  return node.attributes.empty() ? text : text + "}";
}

}  // namespace

bool is_name(std::string_view text) {
  if (text.empty() || !is_name_start(text.front())) return false;
  for (const char c : text) {
    if (!is_name_char(c)) return false;
  }
  return true;
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + shape[i].to_string();
  return text + "]";
}

std::string type_to_string(const Value& value) {
  return std::string(name(value.dtype)) + to_string(value.shape);
}

}  // namespace graph

std::string Graph::to_string() const {
  std::string text = "graph " + name + " {\n";
  for (const auto& [key, attribute] : metadata) {
    text += "  meta " + key + " = " + graph::print(attribute) + "\n";
  }
  for (const ValueId id : inputs) {
    text += "  input %" + value(id).name + " : " + graph::type_to_string(value(id)) + "\n";
  }
  for (const ValueId id : weights) {
    text += "  weight %" + value(id).name + " = " + graph::quote(value(id).weight_name) + " : " +
            graph::type_to_string(value(id)) + "\n";
  }
  for (const Node& node : nodes) text += "  " + graph::print(*this, node) + "\n";
  if (!outputs.empty()) {
    text += "  return ";
    for (size_t i = 0; i < outputs.size(); ++i) {
      text += (i == 0 ? "%" : ", %") + value(outputs[i]).name;
    }
    text += "\n";
  }
  return text + "}\n";
}

}  // namespace effinfer
