// Levels: portable avx2 avx512 avx512bf16
#include "cpu/attention_scores.h"

#include "cpu/level.h"
#include "cpu/vectors/attention_scores_body.h"
#include "cpu/vectors/kv.h"
#include "cpu/vectors/kv_pack.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class Kv>
void over_pages(const ScoresTask& task) {
  AttentionScoresBody<Kv, ScorePages>::run(task);
}

template <class Kv>
void over_rows(const ScoresTask& task) {
  AttentionScoresBody<Kv, ScoreRows<Kv, KvPack>>::run(task);
}

#if EFFINFER_LEVEL_AVX512BF16

// The variant makes sure that keys are bfloat16, or gathered as such.
constexpr ScoresKernels kScores = {over_pages<KvBf16Pairs>, over_rows<KvBf16Pairs>};

#else

void pages(const ScoresTask& task) {
  if (task.keys.k.dtype == DType::f32) return over_pages<KvF32>(task);
  if (task.keys.k.dtype == DType::f16) return over_pages<KvF16>(task);
  if (task.keys.k.dtype == DType::bf16) return over_pages<KvBf16>(task);
  over_pages<KvI8>(task);
}

void rows(const ScoresTask& task) {
  if (task.keys.k.dtype == DType::f32) return over_rows<KvF32>(task);
  if (task.keys.k.dtype == DType::f16) return over_rows<KvF16>(task);
  over_rows<KvBf16>(task);
}

constexpr ScoresKernels kScores = {pages, rows};

#endif

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
const ScoresKernels& kernels<Level::EFFINFER_LEVEL>() {
  return EFFINFER_LEVEL::kScores;
}

}  // namespace effinfer::cpu
