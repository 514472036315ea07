// Levels: portable avx2 avx512 avx512bf16 amx
#include "cpu/attention.h"

#include "cpu/level.h"
#include "cpu/vectors/attention_body.h"
#include "cpu/vectors/kept_weights.h"
#include "cpu/vectors/key_pages.h"
#include "cpu/vectors/key_rows.h"
#include "cpu/vectors/kv.h"
#include "cpu/vectors/kv_pack.h"
#if EFFINFER_LEVEL_AMX
#include "cpu/vectors/attention_amx.h"
#endif

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

#if EFFINFER_LEVEL_AMX
template <class>
using Products = AmxProducts<NativeTiles>;
#else
template <class Kv>
using Products = VectorProducts<Kv>;
#endif

template <class Kv, class Products>
using PackedRows = KeyRows<Kv, KvPack, Products>;

template <class Kv>
void over_pages(const AttentionTask& task) {
  AttentionBody<Kv, Products<Kv>, KeyPages>::run(task);
}

template <class Kv>
void over_rows(const AttentionTask& task) {
  AttentionBody<Kv, Products<Kv>, PackedRows>::run(task);
}

#if EFFINFER_LEVEL_AVX512BF16 || EFFINFER_LEVEL_AMX

// The variants make sure that keys are bfloat16, or gathered as such.
constexpr AttentionKernels kAttention = {over_pages<KvBf16Pairs>, over_rows<KvBf16Pairs>,
                                         fold_attention<KvBf16Pairs>, end_kept<KvBf16Pairs>,
                                         add_kept<KvBf16Pairs>};

#else

void pages(const AttentionTask& task) {
  if (task.k.dtype == DType::f32) return over_pages<KvF32>(task);
  if (task.k.dtype == DType::f16) return over_pages<KvF16>(task);
  if (task.k.dtype == DType::bf16) return over_pages<KvBf16>(task);
  over_pages<KvI8>(task);
}

// 8-bit keys and values are gathered as bfloat16, exactly.
void rows(const AttentionTask& task) {
  if (task.k.dtype == DType::f32) return over_rows<KvF32>(task);
  if (task.k.dtype == DType::f16) return over_rows<KvF16>(task);
  over_rows<KvBf16>(task);
}

constexpr AttentionKernels kAttention = {pages, rows, fold_attention<KvF32>, end_kept<KvF32>,
                                         add_kept<KvF32>};

#endif

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
const AttentionKernels& kernels<Level::EFFINFER_LEVEL>() {
  return EFFINFER_LEVEL::kAttention;
}

}  // namespace effinfer::cpu
