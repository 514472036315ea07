#include "cpu/vectors/attention_scores_body.h"
#include "cpu/vectors/kv_pack_portable.h"
#include "cpu/vectors/kv_portable.h"

namespace effinfer::cpu::portable {

void (*const kAttentionScores)(const AttentionScoresTile&) =
    simd::attention_scores_tile<KvF32, KvF16, KvBf16, KvPack>;

}  // namespace effinfer::cpu::portable
