#include "compiler/arithmetic.h"

#include "effinfer/error.h"
#include "graph/op_specs.h"
#include "ops/attention.h"
#include "ops/bf16_products.h"
#include "ops/matmul.h"
#include "ops/prefill_index.h"

namespace effinfer::compiler {

bool bf16_panels(const Target& target) {
  return ops::bf16_pays(ops::smallest_matmul(ops::Arithmetic::bf16), target);
}

bool bf16_attention(const Node& node, const Target& target) {
  ops::KvLayer kv;
  kv.num_kv_heads = static_cast<int32_t>(node.get_int("kv_heads"));
  kv.head_dim = static_cast<int32_t>(node.get_int("head_dim"));
  kv.dtype = DType::bf16;
  if (node.op == "attention") {
    ops::AttentionProblem problem;
    problem.num_qo_heads = static_cast<int32_t>(node.get_int("heads"));
    problem.num_kv_heads = kv.num_kv_heads;
    problem.k = ops::keys_of(kv);
    problem.v = ops::values_of(kv);
    problem.arithmetic = ops::Arithmetic::bf16;
    return ops::bf16_pays(problem, target);
  }
  // Indexes and attention_mass have kernels for the same keys.
  ops::BlockIndexProblem problem;
  problem.in.kv = kv;
  problem.in.arithmetic = ops::Arithmetic::bf16;
  return ops::bf16_pays(problem, target);
}

bool integers_for_many_rows(const Target& target) {
  return target.isa == Isa::avx2 || target.isa == Isa::avx512;
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
