#include "cpu/vectors/kv_avx512bf16.h"
#include "cpu/vectors/kv_pack_avx512.h"
#include "cpu/vectors/list_attention_body.h"

namespace effinfer::cpu::avx512bf16 {

using Body = simd::ListAttentionBody<KvBf16Pairs, avx512::KvPack>;
// Of keys and values that are gathered as bfloat16, which the variant makes sure of.
const ListAttentionKernels kListAttention = {Body::run_tile, Body::run_merge};

}  // namespace effinfer::cpu::avx512bf16
