// The parser of the text form: one pass, no recursion, every size bounded, so that a hostile text
// costs no more than its length.
//
//   graph   = "graph" NAME "{" { statement } "}"
//   statement = "meta" NAME "=" literal
//             | "input" value ":" type
//             | "weight" value "=" STRING ":" type
//             | value ":" type { "," value ":" type } "=" NAME "(" [ value { "," value } ] ")"
//               [ "{" NAME "=" literal { "," NAME "=" literal } "}" ]
//             | "return" value { "," value }
//   value   = "%" NAME        type = DTYPE "[" [ dim { "," dim } ] "]"
//   dim     = "T" | "S" | "R" | INTEGER
//   literal = INTEGER | FLOAT | "true" | "false" | STRING | "[" [ INTEGER { "," INTEGER } ] "]"
//
// White space separates; "#" starts a comment that runs to the end of the line.
#include <charconv>
#include <limits>
#include <unordered_map>

#include "effinfer/error.h"
#include "graph/op_specs.h"
#include "graph/text.h"

namespace effinfer {
namespace graph {
namespace {

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Graph parse() {
    keyword("graph");
    graph_.name = name("a graph name");
    expect('{');
    while (!accept('}')) statement();
    skip_space();
    if (position_ != text_.size()) fail("expected the end of the text after '}'");
    return std::move(graph_);
  }

 private:
  [[noreturn]] void fail(const std::string& message) const { fail_at(position_, message); }

  [[noreturn]] void fail_at(size_t position, const std::string& message) const {
    size_t line = 1;
    size_t column = 1;
    for (size_t i = 0; i < position && i < text_.size(); ++i) {
      column = text_[i] == '\n' ? 1 : column + 1;
      line += text_[i] == '\n' ? 1 : 0;
    }
    throw FormatError("[graph] " + std::to_string(line) + ":" + std::to_string(column) + ": " +
                      message);
  }

  std::string got() const {
    if (position_ >= text_.size()) return ", got the end of the text";
    const char c = text_[position_];
    if (c < 0x20 || c > 0x7e) return ", got byte " + std::to_string(static_cast<uint8_t>(c));
    return std::string(", got '") + c + "'";
  }

  void skip_space() {
    while (position_ < text_.size()) {
      const char c = text_[position_];
      if (c == '#') {
        position_ = std::min(text_.find('\n', position_), text_.size());
      } else if (c == ' ' || c == '\n' || c == '\t' || c == '\r') {
        ++position_;
      } else {
        return;
      }
    }
  }

  char peek() {
    skip_space();
    return position_ < text_.size() ? text_[position_] : '\0';
  }

  bool accept(char c) {
    if (peek() != c || position_ >= text_.size()) return false;
    ++position_;
    return true;
  }

  void expect(char c) {
    if (!accept(c)) fail(std::string("expected '") + c + "'" + got());
  }

  std::string name(const char* what) {
    if (!is_name_start(peek())) fail(std::string("expected ") + what + got());
    const size_t start = position_;
    while (position_ < text_.size() && is_name_char(text_[position_])) ++position_;
    return std::string(text_.substr(start, position_ - start));
  }

  void keyword(std::string_view word) {
    skip_space();
    const size_t start = position_;
    if (!is_name_start(peek()) || name("") != word) {
      fail_at(start, "expected \"" + std::string(word) + "\"");
    }
  }

  std::string string() {
    expect('"');
    std::string out;
    while (true) {
      if (position_ >= text_.size() || text_[position_] == '\n') fail("unterminated string");
      const char c = text_[position_++];
      if (c == '"') return out;
      out += c == '\\' ? escape() : c;
    }
  }

  char escape() {
    if (position_ >= text_.size()) fail("unterminated string");
    const char c = text_[position_++];
    if (c == '"' || c == '\\') return c;
    unsigned byte = 0;
    if (c == 'x' && position_ + 2 <= text_.size()) {
      const char* begin = text_.data() + position_;
      const auto [end, error] = std::from_chars(begin, begin + 2, byte, 16);
      if (error == std::errc() && end == begin + 2) {
        position_ += 2;
        return static_cast<char>(byte);
      }
    }
    fail_at(position_ - 2, "expected an escape \\\", \\\\ or \\xHH in a string");
  }

  // A run of the characters that numbers are made of.
  std::string_view number_text() {
    skip_space();
    const size_t start = position_;
    while (position_ < text_.size()) {
      const char c = text_[position_];
      const bool part = is_name_char(c) || c == '-' || c == '+';
      if (!part) break;
      ++position_;
    }
    return text_.substr(start, position_ - start);
  }

  template <class T>
  static bool convert(std::string_view digits, T& out) {
    const char* end = digits.data() + digits.size();
    const auto [stop, error] = std::from_chars(digits.data(), end, out);
    return error == std::errc() && stop == end && !digits.empty();
  }

  int64_t integer() {
    skip_space();
    const size_t start = position_;
    int64_t value = 0;
    if (!convert(number_text(), value)) fail_at(start, "expected an integer of 64 bits");
    return value;
  }

  Attribute literal() {
    const char c = peek();
    if (c == '"') return string();
    if (c == '[') return integer_list();
    const size_t start = position_;
    const std::string_view digits = number_text();
    if (digits == "true") return true;
    if (digits == "false") return false;
    int64_t integer = 0;
    if (convert(digits, integer)) return integer;
    double number = 0;
    // A float has a point, an exponent or is inf or nan: an integer beyond 64 bits is an error.
    if (digits.find_first_of(".enia") != std::string_view::npos && convert(digits, number)) {
      return number;
    }
    fail_at(start, "expected a number, a string, true, false or a list of integers");
  }

  std::vector<int64_t> integer_list() {
    std::vector<int64_t> values;
    expect('[');
    if (accept(']')) return values;
    do {
      values.push_back(integer());
    } while (accept(','));
    expect(']');
    return values;
  }

  Dim dim() {
    if (accept('T')) return Dim::tokens();
    if (accept('S')) return Dim::sequences();
    if (accept('R')) return Dim::rows();
    skip_space();
    const size_t start = position_;
    const int64_t value = integer();
    if (value < 0 || value > kMaxDim) {
      fail_at(start, "expected a dimension in 0.." + std::to_string(kMaxDim));
    }
    return Dim::constant(value);
  }

  void type(Value& value) {
    skip_space();
    const size_t start = position_;
    try {
      value.dtype = parse_dtype(name("a dtype"));
    } catch (const InvalidArgument& error) {
      fail_at(start, error.what());
    }
    expect('[');
    if (!accept(']')) {
      do {
        if (value.shape.size() == static_cast<size_t>(kMaxRank)) {
          fail("expected at most " + std::to_string(kMaxRank) + " dimensions");
        }
        value.shape.push_back(dim());
      } while (accept(','));
      expect(']');
    }
  }

  // "%name" of a value that is being defined.
  Value definition(Value::Kind kind) {
    expect('%');
    Value value;
    value.kind = kind;
    const size_t start = position_;
    value.name = name("a value name");
    if (ids_.contains(value.name)) fail_at(start, "%" + value.name + " is already defined");
    return value;
  }

  ValueId use() {
    expect('%');
    const size_t start = position_;
    const std::string id = name("a value name");
    const auto entry = ids_.find(id);
    if (entry == ids_.end()) fail_at(start, "%" + id + " is not defined");
    return entry->second;
  }

  ValueId add(Value value) {
    if (graph_.values.size() >= kMaxValues) fail("too many values");
    const auto id = static_cast<ValueId>(graph_.values.size());
    // Results of one statement: defined one by one, so a repeated name is caught here.
    if (!ids_.emplace(value.name, id).second) fail("%" + value.name + " is already defined");
    graph_.values.push_back(std::move(value));
    return id;
  }

  void statement() {
    if (position_ < text_.size() && peek() == '%') return node();
    skip_space();
    const size_t start = position_;
    const std::string word = name("a statement or '}'");
    if (!graph_.outputs.empty()) fail_at(start, "expected '}' after return");
    if (word == "meta") return metadata();
    if (word == "input") {
      Value value = definition(Value::Kind::input);
      expect(':');
      type(value);
      graph_.inputs.push_back(add(std::move(value)));
    } else if (word == "weight") {
      Value value = definition(Value::Kind::weight);
      expect('=');
      value.weight_name = string();
      expect(':');
      type(value);
      graph_.weights.push_back(add(std::move(value)));
    } else if (word == "return") {
      do {
        graph_.outputs.push_back(use());
      } while (accept(','));
    } else {
      fail_at(start, "expected meta, input, weight, return or a node, got \"" + word + "\"");
    }
  }

  void metadata() {
    const size_t start = position_;
    std::string key = name("a key");
    expect('=');
    if (!graph_.metadata.emplace(key, literal()).second) {
      fail_at(start, "meta " + key + " is already given");
    }
  }

  void node() {
    if (!graph_.outputs.empty()) fail("expected '}' after return");
    std::vector<Value> results;
    do {
      results.push_back(definition(Value::Kind::node));
      expect(':');
      type(results.back());
    } while (accept(','));
    expect('=');
    Node node;
    node.op = name("an operator");
    expect('(');
    if (!accept(')')) {
      do {
        node.inputs.push_back(use());
      } while (accept(','));
      expect(')');
    }
    if (accept('{')) attributes(node);
    rename(node);
    // Results are added after the inputs are read: a node cannot use its own results.
    for (Value& value : results) node.outputs.push_back(add(std::move(value)));
    fill_defaults(node);
    graph_.nodes.push_back(std::move(node));
  }

  void rename(Node& node) const {
    try {
      rename_attributes(node);
    } catch (const InvalidArgument& error) {
      fail(error.what());
    }
  }

  void attributes(Node& node) {
    do {
      skip_space();
      const size_t start = position_;
      std::string key = name("an attribute");
      expect('=');
      if (!node.attributes.emplace(key, literal()).second) {
        fail_at(start, "attribute " + key + " is already given");
      }
    } while (accept(','));
    expect('}');
  }

  std::string_view text_;
  size_t position_ = 0;
  Graph graph_;
  std::unordered_map<std::string, ValueId> ids_;
};

}  // namespace
}  // namespace graph

Graph Graph::parse(std::string_view text) {
  return graph::Parser(text).parse();
}

}  // namespace effinfer
