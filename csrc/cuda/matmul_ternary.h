// Matmuls of ternary weights by the kernels of bodies/ternary.h.
#pragma once

#include "core/backend.h"
#include "ops/matmul.h"

namespace effinfer::cuda {

// Why it cannot be, besides what holds for all matmuls, or null.
const char* rejects_ternary(const ops::MatmulProblem& problem);
void multiply_ternary(const ops::MatmulProblem& problem, Queue& queue);

}  // namespace effinfer::cuda
