// Coded pages that attention is about to read (cuda/bodies/decode_pages.h).
#pragma once

#include "core/backend.h"
#include "ops/attention.h"

namespace effinfer::cuda {

// Those of `decoded`, if there are some.
void launch_decode_pages(const ops::AttentionProblem& problem, Queue& queue);

}  // namespace effinfer::cuda
