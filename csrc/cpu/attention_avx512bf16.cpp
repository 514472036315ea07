#include "cpu/vectors/attention_body.h"
#include "cpu/vectors/kv_avx512bf16.h"

namespace effinfer::cpu::avx512bf16 {
namespace {

// Of bf16 pages, which the variant makes sure of.
void attention_tile(DType, const AttentionTile& tile) {
  simd::AttentionBody<KvBf16Pairs>::run_tile(tile);
}

}  // namespace

const AttentionKernels kAttention = {attention_tile, simd::AttentionBody<KvBf16Pairs>::run_merge};

}  // namespace effinfer::cpu::avx512bf16
