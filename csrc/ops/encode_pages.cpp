#include "ops/encode_pages.h"

#include "ops/describe.h"

namespace effinfer::ops {

std::string describe(const EncodePagesProblem& problem) {
  const KvLayer& kv = *problem.layers;
  return "[encode_pages]" + field("layers", problem.num_layers) +
         field("pages", problem.num_pages) + field("kv_heads", kv.num_kv_heads) +
         field("head_dim", kv.head_dim) + field("bits", kv.coded.bits) +
         " dtype=" + std::string(name(kv.dtype));
}

const char* rejects(const EncodePagesProblem& problem) {
  const KvLayer& kv = *problem.layers;
  if (kv.coded.bits != 4 && kv.coded.bits != 2) return "bits is not 4 or 2";
  const bool known = kv.dtype == DType::bf16 || kv.dtype == DType::f32;
  return known ? nullptr : "needs pages of bf16 or f32";
}

Cost cost(const EncodePagesProblem& problem) {
  const KvLayer& kv = *problem.layers;
  const auto head = static_cast<int64_t>(2 * kv.head_bytes() + kv.coded.head_bytes());
  return {problem.num_layers * problem.num_pages * kv.num_kv_heads * head, 0};
}

}  // namespace effinfer::ops
