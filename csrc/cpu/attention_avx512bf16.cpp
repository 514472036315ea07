#include "cpu/simd/attention_body.h"
#include "cpu/simd/kv_avx512bf16.h"

namespace effinfer::cpu::avx512bf16 {

// For bf16 pages only.
const AttentionKernels kAttention = {
    [](DType, const AttentionTile& tile) { simd::AttentionBody<KvBf16Pairs>::run_tile(tile); },
    simd::AttentionBody<KvBf16Pairs>::run_merge};

}  // namespace effinfer::cpu::avx512bf16
