#include "cpu/simd/attention_scores_body.h"
#include "cpu/simd/kv_avx2.h"
#include "cpu/simd/kv_pack_avx2.h"

namespace effinfer::cpu::avx2 {

void (*const kAttentionScores)(const AttentionScoresTile&) =
    simd::attention_scores_tile<KvF32, KvF16, KvBf16, KvPack>;

}  // namespace effinfer::cpu::avx2
