#include "cpu/merge_states.h"

#include "cpu/simd/math_portable.h"
#include "cpu/simd/merge_states_body.h"

namespace effinfer::cpu::portable {

void merge_states(const kernels::MergeStatesProblem& problem, Team& team) {
  MergeStatesBody<F32x16>::run(problem, team);
}

}  // namespace effinfer::cpu::portable
