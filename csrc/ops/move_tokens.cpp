#include "ops/move_tokens.h"

#include "ops/rope_append.h"

namespace effinfer::ops {

std::string describe(const MoveTokensProblem& problem) {
  return "move_tokens count=" + std::to_string(problem.count) + describe_kv(problem.kv);
}

}  // namespace effinfer::ops
