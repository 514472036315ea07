// Attention of items whose tiles have the many rows of prompts.
#pragma once

#include <cstddef>

#include "core/backend.h"
#include "cuda/bodies/attention_output.h"

namespace effinfer::cuda {

// Why there is no kernel for tiles of p.work.long_rows rows, or null.
const char* rejects_long_tiles(const ops::AttentionProblem& p);

// What a block of such items shares.
size_t prefill_shared_bytes(const ops::AttentionProblem& p);

// The first p.work.num_long_items items.
void launch_prefill(const AttentionParams& params, Queue& queue);

// The same for rows whose sums may be their own, on a GPU of compute capability 9.0.
const char* rejects_wgmma(const ops::AttentionProblem& p);
size_t wgmma_shared_bytes(const ops::AttentionProblem& p);
void launch_wgmma(const AttentionParams& params, Queue& queue);

}  // namespace effinfer::cuda
