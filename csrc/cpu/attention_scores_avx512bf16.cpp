#include "cpu/simd/attention_scores_body.h"
#include "cpu/simd/kv_avx512bf16.h"
#include "cpu/simd/kv_pack_avx512.h"

namespace effinfer::cpu::avx512bf16 {

// Of keys that are gathered as bfloat16, which the variant makes sure of.
void (*const kAttentionScores)(const AttentionScoresTile&) =
    simd::AttentionScoresBody<KvBf16Pairs, avx512::KvPack>::run;

}  // namespace effinfer::cpu::avx512bf16
