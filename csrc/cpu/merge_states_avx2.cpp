#include "cpu/merge_states.h"
#include "cpu/vectors/math_avx2.h"
#include "cpu/vectors/merge_states_body.h"

namespace effinfer::cpu::avx2 {

void merge_states(const ops::MergeStatesProblem& problem, Team& team) {
  MergeStatesBody<F32x16>::run(problem, team);
}

}  // namespace effinfer::cpu::avx2
