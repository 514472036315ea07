#include "cpu/vectors/attention_scores_body.h"
#include "cpu/vectors/kv_avx512bf16.h"
#include "cpu/vectors/kv_pack_avx512.h"

namespace effinfer::cpu::avx512bf16 {

// Of keys that are gathered as bfloat16, which the variant makes sure of.
void (*const kAttentionScores)(const AttentionScoresTile&) =
    simd::AttentionScoresBody<KvBf16Pairs, avx512::KvPack>::run;

}  // namespace effinfer::cpu::avx512bf16
