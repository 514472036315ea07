#include "compiler/op_kinds.h"

#include <array>
#include <string>
#include <utility>

#include "effinfer/error.h"

namespace effinfer::compiler {
namespace {

template <class Kind, size_t size>
Kind parse(const char* what, const std::array<std::pair<std::string_view, Kind>, size>& kinds,
           std::string_view text) {
  std::string names;
  for (const auto& [name, kind] : kinds) {
    if (name == text) return kind;
    names.append(names.empty() ? "" : ", ").append(name);
  }
  throw FormatError(std::string("[compile] ") + what + ": expected one of " + names + ", got \"" +
                    std::string(text) + "\"");
}

}  // namespace

ops::UnaryOp parse_unary_op(std::string_view text) {
  using enum ops::UnaryOp;
  static constexpr auto kKinds =
      std::to_array<std::pair<std::string_view, ops::UnaryOp>>({{"scale", scale},
                                                                {"softcap", softcap},
                                                                {"silu", silu},
                                                                {"gelu_tanh", gelu_tanh},
                                                                {"relu_squared", relu_squared}});
  return parse("unary operator", kKinds, text);
}

ops::BinaryOp parse_binary_op(std::string_view text) {
  using enum ops::BinaryOp;
  static constexpr auto kKinds =
      std::to_array<std::pair<std::string_view, ops::BinaryOp>>({{"add", add}, {"mul", mul}});
  return parse("binary operator", kKinds, text);
}

ops::Glu parse_glu(std::string_view text) {
  using enum ops::Glu;
  static constexpr auto kKinds = std::to_array<std::pair<std::string_view, ops::Glu>>(
      {{"silu", silu}, {"gelu_tanh", gelu_tanh}, {"relu_squared", relu_squared}});
  return parse("activation", kKinds, text);
}

}  // namespace effinfer::compiler
