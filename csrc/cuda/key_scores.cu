#include "cuda/bodies/attention_mass.h"
#include "cuda/bodies/float_scores.h"
#include "cuda/bodies/key_scores.h"
#include "cuda/bodies/pool_scores.h"
#include "cuda/entry.h"
#include "cuda/register.h"
#include "ops/latent_tile.h"
#include "ops/validate.h"

namespace effinfer::cuda {
namespace {

using ops::AttentionScoresProblem;

const char* rejects(const AttentionScoresProblem& p) {
  if (p.source != ops::KeySource::rows) return "keys are pages of the engine";
  const DType dtype = p.k.dtype;
  if (p.q.dtype != DType::bf16 && p.q.dtype != DType::f16) return "queries are not f16 or bf16";
  if (dtype != p.q.dtype && !is_narrow(dtype)) {
    return "keys are not of the queries' dtype or of 8 bits";
  }
  if (p.k.dims <= 0 || p.k.dims > ops::kGpuMostHeadDim || p.k.dims % 8 != 0) {
    return "head_dim is not a multiple of 8 up to 256";
  }
  if (is_narrow(dtype) && p.k.dims % 16 != 0) return "head_dim of 8 bits is no multiple of 16";
  if (p.k.scales != nullptr) return "no scales of tokens";
  if (p.row_block != 0 || p.key_block != 1) return "no blocks of rows or keys";
  if (p.diagonals != nullptr) return "no diagonals";
  return nullptr;
}

const char* rejects_floats(const AttentionScoresProblem& p) {
  if (p.source != ops::KeySource::rows) return "keys are pages of the engine";
  if (!ops::is_row_type(p.q.dtype)) return "queries are not f32, f16 or bf16";
  if (!ops::is_kv_type(p.k.dtype)) return "keys are not f32, f16, bf16 or of 8 bits";
  if (p.k.dims <= 0) return "no dims";
  const bool follows = p.positions == nullptr;
  return follows || p.row_block == 0 ? nullptr : "blocks of rows are by places that follow";
}

void float_scores(const AttentionScoresProblem& p, Queue& queue) {
  launch<FloatScoresKernel>(p, p.num_items * p.group(), queue);
}

template <DType kType>
void launch_scores(const AttentionScoresProblem& p, Queue& queue) {
  if (p.k.dims <= 64) return launch<KeyScoresKernel<kType, 64>>(p, p.num_items, queue);
  if (p.k.dims <= 128) return launch<KeyScoresKernel<kType, 128>>(p, p.num_items, queue);
  launch<KeyScoresKernel<kType, 256>>(p, p.num_items, queue);
}

size_t shared_bytes(const AttentionScoresProblem& p) {
  if (p.k.dims <= 64) return sizeof(KeyScoresShared<64>);
  return p.k.dims <= 128 ? sizeof(KeyScoresShared<128>) : sizeof(KeyScoresShared<256>);
}

void attention_scores(const AttentionScoresProblem& p, Queue& queue) {
  if (p.q.dtype == DType::f16) {
    launch_scores<DType::f16>(p, queue);
  } else {
    launch_scores<DType::bf16>(p, queue);
  }
}

// Of the engine's pages, into planes of sequences.
const char* rejects_mass(const ops::AttentionMassProblem& p) {
  const int32_t dims = p.kv.head_dim;
  if (dims <= 0 || dims > ops::kMostMassDims || dims % 16 != 0) {
    return "head_dim is not a multiple of 16 up to 256";
  }
  // Products are float32 where bfloat16 ones would do, too.
  if (p.arithmetic != ops::Arithmetic::f32 && p.arithmetic != ops::Arithmetic::bf16) {
    return "multiplies in f32, also where it may in bf16";
  }
  const bool whole = p.num_qo_heads > 0 && p.kv.num_kv_heads > 0;
  return whole && p.num_qo_heads % p.kv.num_kv_heads == 0 ? nullptr
                                                          : "heads is not a multiple of kv_heads";
}

template <class Visit>
void with_pages(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::f32:
      return visit.template operator()<DType::f32>();
    case DType::f16:
      return visit.template operator()<DType::f16>();
    case DType::bf16:
      return visit.template operator()<DType::bf16>();
    default:
      return visit.template operator()<DType::i8>();
  }
}

void attention_mass(const ops::AttentionMassProblem& p, Queue& queue) {
  MassParams params;
  params.p = p;
  params.head_bytes = static_cast<int64_t>(p.kv.head_bytes());
  params.parts = static_cast<int32_t>(blocks_for(p.max_kv_len, ops::kMassKeys));
  const int64_t blocks = int64_t{p.num_rows} * p.kv.num_kv_heads * params.parts;
  const int32_t pairs = p.most_count * (p.num_qo_heads / p.kv.num_kv_heads);
  with_pages(p.kv.dtype, [&]<DType kType>() {
    for (; params.first_pair < pairs; params.first_pair += ops::kMassPairs) {
      launch<AttentionMassKernel<kType, false>>(params, blocks, queue);
      launch<AttentionMassKernel<kType, true>>(params, blocks, queue);
    }
  });
}

}  // namespace

// Of two that take a problem the table has the last one.
void register_key_scores() {
  add<AttentionScoresProblem>(
      "float_scores", rejects_floats, float_scores,
      [](const AttentionScoresProblem&) { return sizeof(FloatScoresShared); });
  add<AttentionScoresProblem>("attention_scores", rejects, attention_scores, shared_bytes);
  add<ops::AttentionMassProblem>("attention_mass", rejects_mass, attention_mass);
  add<ops::PoolScoresProblem>(
      "pool_scores", takes_all, [](const ops::PoolScoresProblem& p, Queue& queue) {
        using Kernel = PoolScoresKernel;
        launch<Kernel>(p, p.num_groups * Kernel::blocks_of(p.num_blocks), queue);
      });
}

}  // namespace effinfer::cuda
