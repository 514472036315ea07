#include "cpu/vectors/attention_body.h"
#include "cpu/vectors/kv_avx512.h"

namespace effinfer::cpu::avx512 {

const AttentionKernels kAttention = {simd::attention_tile<KvF32, KvF16, KvBf16, KvI8>,
                                     simd::AttentionBody<KvF32>::run_merge};

}  // namespace effinfer::cpu::avx512
