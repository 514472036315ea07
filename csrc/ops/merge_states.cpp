#include "ops/merge_states.h"

namespace effinfer::ops {

std::string describe(const MergeStatesProblem& problem) {
  return "[merge_states] num_states=" + std::to_string(problem.num_states) +
         " tokens=" + std::to_string(problem.tokens) + " heads=" + std::to_string(problem.heads) +
         " head_dim=" + std::to_string(problem.head_dim) +
         " dtype=" + std::string(name(problem.dtype));
}

}  // namespace effinfer::ops
