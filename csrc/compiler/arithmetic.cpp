#include "compiler/arithmetic.h"

#include "effinfer/error.h"
#include "graph/op_specs.h"

namespace effinfer::compiler {

bool bf16_panels(const Target& target) {
  return cpu_features().avx512_bf16 && target.isa >= Isa::avx512;
}

ops::Arithmetic parse_arithmetic(std::string_view text) {
  for (const auto arithmetic : {ops::Arithmetic::int8, ops::Arithmetic::bf16, ops::Arithmetic::f32,
                                ops::Arithmetic::int8_token}) {
    if (text == ops::name(arithmetic)) return arithmetic;
  }
  throw FormatError("[compile] arithmetic: expected int8, bf16, f32 or int8_token, got \"" +
                    std::string(text) + "\"");
}

std::string_view phase_key(Phase phase) {
  return phase == Phase::decode ? graph::kDecodeKey : graph::kPrefillKey;
}

void set_arithmetic(Node& node, std::string_view decode, std::string_view prefill) {
  node.attributes.insert_or_assign(std::string(graph::kDecodeKey), std::string(decode));
  node.attributes.insert_or_assign(std::string(graph::kPrefillKey), std::string(prefill));
}

}  // namespace effinfer::compiler
