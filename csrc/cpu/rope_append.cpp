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

// Walks the rows of a block: which sequence they belong to and where in its pages they go.
class Places {
 public:
  Places(const ops::BatchLayout& batch, int64_t row) : batch_(batch) {
    const int32_t* end = batch.qo_indptr + batch.num_sequences + 1;
    sequence_ = std::upper_bound(batch.qo_indptr, end, row) - batch.qo_indptr - 1;
  }
  // Rows come in order.
  int64_t position(int64_t row) {
    while (row >= batch_.qo_indptr[sequence_ + 1]) ++sequence_;
    return batch_.kv_len[sequence_] - (batch_.qo_indptr[sequence_ + 1] - row);
  }
  int64_t page(int64_t position) const {
    return batch_.kv_indices[batch_.kv_indptr[sequence_] + position / ops::kPageSize];
  }

 private:
  const ops::BatchLayout& batch_;
  int64_t sequence_;
};

RopeAppendRow make_row(const RopeAppendProblem& p, int64_t row, int64_t head) {
  const int64_t dim = p.kv.head_dim;
  RopeAppendRow out = {};
  if (p.q != nullptr) {
    out.group = p.num_qo_heads / p.kv.num_kv_heads;
    out.q = p.q + row * p.q_stride + head * out.group * dim;
  }
  out.head_dim = p.kv.head_dim;
  out.q_norm = p.q_norm;
  out.k_norm = p.k_norm;
  out.norm_eps = p.norm_eps;
  if (p.cos_sin != nullptr) out.cos_sin = p.cos_sin + row * p.rope_dims;
  out.rope_dims = p.rope_dims;
  out.interleaved = p.interleaved;
  out.kv_dtype = p.kv.dtype;
  return out;
}

void set_target(RopeAppendRow& out, const RopeAppendProblem& p, int64_t row, int64_t head,
                int64_t page, int64_t position) {
  const int64_t dim = p.kv.head_dim;
  out.k = p.k + row * p.k_stride + head * dim;
  out.v = p.v + row * p.v_stride + head * dim;
  out.k_page = p.kv.k_head(page, head);
  out.v_page = p.kv.v_head(page, head);
  if (p.kv.dtype == DType::i8) {
    const int64_t offset = (page * p.kv.num_kv_heads + head) * ops::kPageSize;
    out.k_scale = p.kv.k_scale + offset;
    out.v_scale = p.kv.v_scale + offset;
  }
  out.token = static_cast<int32_t>(position % ops::kPageSize);
}

template <Level kLevel>
void run_level(const RopeAppendProblem& p, Team& team) {
  const int64_t heads = p.kv.num_kv_heads;
  const int64_t blocks = (p.batch.num_tokens + kBlock - 1) / kBlock;
  team.for_chunks(blocks * heads, [&](int64_t chunk) {
    const int64_t head = chunk % heads;
    const int64_t first = chunk / heads * kBlock;
    const int64_t last = std::min(first + kBlock, p.batch.num_tokens);
    const int64_t group = p.q == nullptr ? 0 : p.num_qo_heads / heads;
    float* q_out = p.q_out + first * p.q_out_stride + head * group * p.kv.head_dim;
    rope_append_rows(kernels<kLevel, RopeAppendKernel>(), p, head, first, last, 0,
                     std::numeric_limits<int64_t>::max(), q_out, p.q_out_stride);
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

void rope_append_rows(const RopeAppendKernel& kernel, const RopeAppendProblem& p, int64_t head,
                      int64_t first, int64_t last, int64_t first_page, int64_t end_page,
                      float* q_out, int64_t q_out_stride) {
  Places places(p.batch, first);
  for (int64_t row = first; row < last; ++row) {
    const int64_t position = places.position(row);
    const int64_t index = position / ops::kPageSize;
    RopeAppendRow out = make_row(p, row, head);
    if (p.q != nullptr) out.q_out = q_out + (row - first) * q_out_stride;
    if (index >= first_page && index < end_page) {
      set_target(out, p, row, head, places.page(position), position);
    }
    kernel.append(out);
  }
}

void register_rope_append() {
  for_levels<Level::portable, Level::avx2, Level::avx512>([]<Level kLevel>() {
    ops::mutable_table<RopeAppendProblem>().add(
        {"rope_append." + std::string(name(kLevel)), isa_of(kLevel), rejects, run_level<kLevel>});
  });
}

}  // namespace effinfer::cpu
