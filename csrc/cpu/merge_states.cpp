#include "cpu/merge_states.h"

#include "cpu/vectors/math_portable.h"
#include "cpu/vectors/merge_states_body.h"

namespace effinfer::cpu::portable {

void merge_states(const ops::MergeStatesProblem& problem, Team& team) {
  MergeStatesBody<F32x16>::run(problem, team);
}

}  // namespace effinfer::cpu::portable
