// The state merge of each ISA level: the same body (cpu/vectors/merge_states_body.h) over its
// vectors.
#pragma once

#include "effinfer/threads.h"
#include "ops/merge_states.h"

namespace effinfer::cpu {

namespace portable {
void merge_states(const ops::MergeStatesProblem& problem, Team& team);
}
namespace avx2 {
void merge_states(const ops::MergeStatesProblem& problem, Team& team);
}
namespace avx512 {
void merge_states(const ops::MergeStatesProblem& problem, Team& team);
}

}  // namespace effinfer::cpu
