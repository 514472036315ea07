#include "cpu/vectors/kv_avx2.h"
#include "cpu/vectors/kv_pack_avx2.h"
#include "cpu/vectors/list_attention_body.h"

namespace effinfer::cpu::avx2 {

const ListAttentionKernels kListAttention = {
    simd::list_attention_tile<KvF32, KvF16, KvBf16, KvPack>,
    simd::ListAttentionBody<KvF32, KvPack>::run_merge};

}  // namespace effinfer::cpu::avx2
