#include "cpu/vectors/kv_pack_portable.h"
#include "cpu/vectors/kv_portable.h"
#include "cpu/vectors/list_attention_body.h"

namespace effinfer::cpu::portable {

const ListAttentionKernels kListAttention = {
    simd::list_attention_tile<KvF32, KvF16, KvBf16, KvPack>,
    simd::ListAttentionBody<KvF32, KvPack>::run_merge};

}  // namespace effinfer::cpu::portable
