#include "cpu/vectors/attention_scores_body.h"
#include "cpu/vectors/kv_avx512.h"
#include "cpu/vectors/kv_pack_avx512.h"

namespace effinfer::cpu::avx512 {

void (*const kAttentionScores)(const AttentionScoresTile&) =
    simd::attention_scores_tile<KvF32, KvF16, KvBf16, KvPack>;

}  // namespace effinfer::cpu::avx512
