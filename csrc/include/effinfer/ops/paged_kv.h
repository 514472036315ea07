// Keys and values in pages of 64 tokens in the order of the attention kernels, and the appending to
// them.
#pragma once

#include <cstdint>
#include <memory>

#include "effinfer/dtype.h"
#include "effinfer/export.h"
#include "effinfer/tensor.h"
#include "effinfer/threads.h"

namespace effinfer::ops {

// The keys and values of one layer: `num_pages` pages of 64 tokens, zero at first.
class EFFINFER_API PagedKv {
 public:
  static constexpr int32_t kPageSize = 64;

  // `dtype`: f32, f16, bf16 (rounded to nearest even), or i8 with a float scale a token and head.
  // `head_dim`: a multiple of 16 up to 256. Throws InvalidArgument, OutOfMemory.
  PagedKv(int32_t num_pages, int32_t num_kv_heads, int32_t head_dim, DType dtype);
  ~PagedKv();
  PagedKv(PagedKv&&) noexcept;
  PagedKv& operator=(PagedKv&&) noexcept;

  int32_t num_pages() const;
  int32_t num_kv_heads() const;
  int32_t head_dim() const;
  DType dtype() const;

  // Everything as floats: k and v [num_pages, num_kv_heads, 64, head_dim].
  void read(float* k, float* v) const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

// The sequences of a call, as in FlashInfer; all int32. Sequence s owns the query rows
// [qo_indptr[s], qo_indptr[s+1]), which are its last tokens, and its tokens lie in the pages
// kv_indices[kv_indptr[s] : kv_indptr[s+1]]. kv_len[s] counts its tokens, those rows included.
struct PagedBatch {
  TensorView qo_indptr;   // [S + 1], from 0 to T
  TensorView kv_indptr;   // [S + 1], from 0
  TensorView kv_indices;  // [kv_indptr[S] or more]
  TensorView kv_len;      // [S]
};

// Writes k and v, float32 [T, num_kv_heads, head_dim], to the places of the batch's rows. Rows of
// different sequences must not fall on the same place. Throws InvalidArgument.
EFFINFER_API void kv_append(PagedKv& kv, const TensorView& k, const TensorView& v,
                            const PagedBatch& batch, ThreadPool& pool);

struct RopeAppendOptions {
  TensorView q_norm;  // float32 [head_dim]: RMS norm of each query head first; no data: none
  TensorView k_norm;
  float norm_eps = 1e-6f;
  bool interleaved = false;  // rotates pairs (2i, 2i + 1), else (i, i + rope_dims / 2)
};

// kv_append after an optional RMS norm and the rotation of ops::rope; also norms and rotates q
// [T, num_qo_heads, head_dim] into q_out. `table`: float32 [T, 2, rope_dims / 2], cos and sin. The
// same bits as rms_norm, rope and kv_append one after the other. Throws InvalidArgument.
EFFINFER_API void rope_append(PagedKv& kv, const TensorView& q, const TensorView& k,
                              const TensorView& v, const TensorView& table, const PagedBatch& batch,
                              const RopeAppendOptions& options, float* q_out, ThreadPool& pool);

}  // namespace effinfer::ops
