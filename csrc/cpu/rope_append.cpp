// The rope_append driver: a team shares blocks of tokens x KV heads.
#include "cpu/rope_append.h"

#include <algorithm>
#include <limits>

#include "cpu/register.h"
#include "ops/registry.h"
#include "ops/rope_append.h"

namespace effinfer::cpu {
namespace {

using ops::RopeAppendProblem;

// Tokens of a chunk: a K line holds 16 tokens, which two members had better not write in turns.
constexpr int64_t kBlock = 16;

template <Level kLevel>
void run_level(const RopeAppendProblem& p, Team& team) {
  const ops::BatchLayout& batch = p.batch;
  const int64_t heads = p.kv.num_kv_heads;
  const int64_t blocks = (batch.num_tokens + kBlock - 1) / kBlock;
  team.for_chunks(blocks * heads, [&](int64_t chunk) {
    RopeAppendRows rows;
    rows.head = chunk % heads;
    rows.first = chunk / heads * kBlock;
    rows.last = std::min(rows.first + kBlock, batch.num_tokens);
    const int32_t* end = batch.qo_indptr + batch.num_sequences + 1;
    rows.sequence = std::upper_bound(batch.qo_indptr, end, rows.first) - batch.qo_indptr - 1;
    rows.first_page = 0;
    rows.end_page = std::numeric_limits<int64_t>::max();
    const int64_t group = p.q == nullptr ? 0 : p.num_qo_heads / heads;
    rows.q_out = p.q_out + rows.first * p.q_out_stride + rows.head * group * p.kv.head_dim;
    rows.q_out_stride = p.q_out_stride;
    kernels<kLevel, RopeAppendKernel>().append(p, rows);
  });
}

const char* rejects(const RopeAppendProblem& p) {
  const DType dtype = p.kv.dtype;
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::i8) {
    return "kv_dtype is not f32, f16, bf16 or i8";
  }
  if (p.kv.head_dim <= 0 || p.kv.head_dim > 256 || p.kv.head_dim % 16 != 0) {
    return "head_dim is not a multiple of 16 up to 256";
  }
  if (p.rope_dims < 0 || p.rope_dims > p.kv.head_dim || p.rope_dims % 2 != 0) {
    return "rope_dims is not an even number up to head_dim";
  }
  if (p.kv.num_kv_heads <= 0 || p.num_qo_heads % p.kv.num_kv_heads != 0) {
    return "heads is not a multiple of kv_heads";
  }
  return nullptr;
}

}  // namespace

void register_rope_append() {
  for_levels<Level::portable, Level::avx2, Level::avx512>([]<Level kLevel>() {
    ops::mutable_table<RopeAppendProblem>().add(
        {"rope_append." + std::string(name(kLevel)), isa_of(kLevel), rejects, run_level<kLevel>});
  });
}

}  // namespace effinfer::cpu
