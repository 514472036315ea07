// Attention over keys and values as the caller has them, paged (NHD or HND) or ragged, or over the
// engine's pages (paged_kv.h): all of them, or lists of the tokens that each block of queries
// visits.
//
// A plan says which rows there are and what they see; it is made once for any number of calls (all
// layers of a step, say) with tensors of those shapes. Cost follows what is listed. Results are
// softmax(logits) v of each row by an online softmax (Milakov and Gimelshein, arXiv:1805.02867),
// over fixed chunks of the keys, whose results are folded in order (Dao et al., "Flash-Decoding for
// long-context inference", 2023), and the logarithm of each row's sum of exponentials, with which
// partial results merge (FlashInfer, Ye et al., arXiv:2501.01005, section 2). A row's result is the
// same bits for any batch, any division of a prompt into steps and any number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "effinfer/executor.h"
#include "effinfer/export.h"
#include "effinfer/ops/kv_order.h"
#include "effinfer/ops/paged_kv.h"
#include "effinfer/tensor.h"
#include "effinfer/threads.h"

namespace effinfer::ops {

struct AttentionGeometry {
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;  // divides num_qo_heads
  int32_t head_dim_qk = 0;   // of q and k, with q_rope and k_rope; up to 1024
  int32_t head_dim_vo = 0;   // of v and out; up to 1024
  int32_t page_size = 1;     // tokens of a page; 64 for PagedKv
  bool causal = false;       // row i of a sequence's n rows sees keys [0, kv_len - n + i]
  int32_t window_left = -1;  // and none more than this many places before that; -1: all
  int32_t sink_tokens = 0;   // with a window: keys [0, sink_tokens) are seen too (StreamingLLM,
                             // Xiao et al., arXiv:2309.17453)
  bool decode = false;       // few rows a sequence: keys are multiplied where they lie, also where
                             // the CPU has AMX

  bool operator==(const AttentionGeometry&) const = default;
};

// The sequences of a batch; int32 unless said otherwise. Sequence s owns the query rows
// [qo_indptr[s], qo_indptr[s+1]) and kv_len[s] keys: with kv_indices the tokens of the pages
// kv_indices[kv_indptr[s] : kv_indptr[s+1]], without them the rows from kv_indptr[s] on.
struct AttentionSequences {
  TensorView qo_indptr;   // [S + 1], from 0
  TensorView kv_indptr;   // [S + 1], from 0
  TensorView kv_indices;  // page ids; rank 0: ragged
  TensorView kv_len;      // [S]
  TensorView mask;        // uint8, packed little-endian bits, 1 = seen; rank 0: none
  TensorView
      mask_indptr;  // int64 [S + 1] bytes: sequence s's bits (row i, key j) are at i * kv_len
                    // + j from byte mask_indptr[s] on
};

// What blocks of query rows visit.
struct AttentionLists {
  TensorView lists;   // int32 [L, 4]: sequence, kv_head, first row (flat), rows. Each row and KV
                      // head is in exactly one list.
  TensorView indptr;  // int32 [L + 1] into spans
  TensorView spans;   // int32 [n, 2]: tokens [begin, end) of the sequence, ascending and disjoint
  TensorView span_masks;        // int64 [n]: the bit in the mask of the list's first row and the
                                // span's first token; rank 0: no mask
  int64_t mask_row_stride = 0;  // bits between rows of a list
};

// Queries and keys of a call, and how logits are made of them.
struct LogitInputs {
  StridedView q;  // [T, num_qo_heads, head_dim_qk]; f32, f16 or bf16
  StridedView k;  // paged: [pages, page_size, num_kv_heads, head_dim_qk] in nhd order, [pages,
                  // num_kv_heads, page_size, head_dim_qk] in hnd; ragged: [N, num_kv_heads,
                  // head_dim_qk]; f32, f16, bf16, i8, f8_e4m3 or f8_e5m2
  const PagedKv* kv = nullptr;  // in place of k, and of v where there is one, with page_size 64
  KvOrder order = KvOrder::nhd;
  float sm_scale = 1.0f;
  float logits_soft_cap = 0.0f;  // cap * tanh(logit / cap); 0: none
  float k_scale = 1.0f;          // numbers of k times this are keys
  StridedView k_scales;          // float32, k's shape without the last dimension; rank 0: none
};

struct AttentionInputs : LogitInputs {
  StridedView v;            // as k, with head_dim_vo and of k's dtype
  StridedView q_rope;       // the last dimensions of queries and keys, where they lie apart (latent
  StridedView k_rope;       // attention); rank 0: none
  TensorView alibi_slopes;  // float32 [num_qo_heads]: + slope * (key - query position)
  TensorView sink_logits;   // float32 [num_qo_heads]: the logit, neither scaled nor capped, of one
                            // more key that every row sees, whose value is zero; rank 0: none
  float v_scale = 1.0f;     // as k_scale and k_scales
  StridedView v_scales;
  float lse_factor = 1.0f;  // of the natural logarithm: log2(e) for base 2
};

// A GPU's memory for plans that take each other's place, at addresses that stay: a recording of
// run() with one of them runs what was put there last when it is replayed. Plans have the geometry,
// the number of sequences of the first, and no more query rows.
class EFFINFER_API FixedPlans {
 public:
  struct Impl;

  // Room for `most_listed` of kv_indices, and for masks of that many bytes; with 0 of them there is
  // no mask, else every plan has one.
  FixedPlans(int64_t most_listed, int64_t most_mask_bytes);
  ~FixedPlans();
  FixedPlans(FixedPlans&&) noexcept;
  FixedPlans& operator=(FixedPlans&&) noexcept;

 private:
  friend class AttentionPlan;
  std::shared_ptr<Impl> impl_;
};

class EFFINFER_API AttentionPlan {
 public:
  struct Impl;

  // Copies all it is given. Throws InvalidArgument.
  AttentionPlan(const AttentionGeometry& geometry, const AttentionSequences& sequences);
  AttentionPlan(const AttentionGeometry& geometry, const AttentionSequences& sequences,
                const AttentionLists& lists);
  ~AttentionPlan();
  AttentionPlan(AttentionPlan&&) noexcept;
  AttentionPlan& operator=(AttentionPlan&&) noexcept;

  const AttentionGeometry& geometry() const;
  int64_t num_rows() const;  // T

  // Puts the plan, without lists, into a GPU's memory behind all that the queue has: run() reads it
  // there until another one takes its place. What runs there, in one stream or in several, runs one
  // after the other. Throws InvalidArgument where it does not fit.
  void put(FixedPlans& memory, Queue& queue);
  // Products of a query head's row with a key that the plan makes, masked ones included.
  int64_t num_products() const;

  // out: [T, num_qo_heads, head_dim_vo] of q's dtype, dense; lse: float32 [T, num_qo_heads] or of
  // rank 0. A row that sees no key: zeros, and minus infinity. May be called by several threads at
  // once. Throws InvalidArgument.
  //
  // On a GPU, of whose memory all arrays are, the plan's lists are uploaded when a stream runs it
  // first: work in the queue may still read them when the plan goes, which the queue waits for.
  void run(const AttentionInputs& inputs, const StridedView& out, const StridedView& lse,
           const Executor& executor) const;
  // The name of the kernel variant that run() takes for these dtypes at the current ISA level.
  std::string kernel(DType q_dtype, DType kv_dtype) const;

 private:
  std::unique_ptr<Impl> impl_;
};

class Visits;

struct PagedAttentionOptions {
  float sm_scale = 1.0f;
  int32_t window_left = -1;  // as in AttentionGeometry
  int32_t sink_tokens = 0;
  float logits_soft_cap = 0.0f;  // as in LogitInputs
  TensorView alibi_slopes;       // as in AttentionInputs
  TensorView sink_logits;
  // int32 [T], no data: none. The rows of a sequence are a tree of drafts (SpecInfer, Miao et al.,
  // arXiv:2305.09781), 64 at most: the row of a token's parent, counted within its sequence and
  // less than its own, or -1 for a token that follows the sequence. A row sees what precedes the
  // step, its ancestors and itself; windows, sinks and slopes go by its depth.
  TensorView parents;
  // Which keys blocks of rows visit (visits.h), for this batch; null: all. Without a window and
  // parents.
  const Visits* visits = nullptr;
  // Keys in chunks of so many tokens, a multiple of 256, by their places in the sequence (dual
  // chunk attention, An et al., arXiv:2402.17463): a row multiplies those of its own chunk with q,
  // those of the one before it with q_before, older ones with q_far, arrays like q. 0: all with q.
  int32_t chunk = 0;
  TensorView q_before;
  TensorView q_far;
  // f32, or bf16: queries and probabilities rounded to bfloat16 and multiplied as such with bf16
  // pages, twice as fast where the CPU has AVX512-BF16 (Unsupported elsewhere).
  DType arithmetic = DType::f32;
  float* lse = nullptr;  // [T, num_qo_heads], natural logarithms times lse_factor; null: none
  float lse_factor = 1.0f;
};

// Causal attention of q, float32 [T, num_qo_heads, head_dim], over the batch's pages to out, of the
// same shape: what the engine's steps compute. num_qo_heads is a multiple of num_kv_heads. Throws
// InvalidArgument.
EFFINFER_API void paged_attention(const TensorView& q, const PagedKv& kv, const PagedBatch& batch,
                                  const PagedAttentionOptions& options, float* out,
                                  ThreadPool& pool);

}  // namespace effinfer::ops
