// Checked arguments of the operators over the engine's pages.
#pragma once

#include "effinfer/ops/paged_kv.h"
#include "ops/kv_layout.h"
#include "ops/validate.h"

namespace effinfer::ops {

// What kernels read and write of it.
const KvLayer& layer_of(const PagedKv& kv);

// qo_indptr and kv_len of a batch; num_tokens is what qo_indptr says.
BatchLayout check_sequences(const Validator& check, const PagedBatch& batch);

// All of it, for the pages of `kv`.
BatchLayout check_batch(const Validator& check, const PagedBatch& batch, int64_t tokens,
                        const PagedKv& kv);

// q, [T, a multiple of num_kv_heads, head_dim]: the number of heads.
int32_t check_queries(const Validator& check, const TensorView& q, const PagedKv& kv);

}  // namespace effinfer::ops
