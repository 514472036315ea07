#include "ops/pooled_rows.h"

#include "ops/describe.h"
#include "ops/validate.h"

namespace effinfer::ops {

std::string describe(const PoolRowsProblem& problem) {
  return "[pool_rows]" + field("groups", problem.num_groups) + field("size", problem.group_size) +
         field("heads", problem.heads) + field("dims", problem.dims) +
         (problem.concatenates ? " concatenated" : " means") +
         " dtype=" + std::string(name(problem.dtype));
}

const char* rejects(const PoolRowsProblem& problem) {
  return is_row_type(problem.dtype) ? nullptr : "rows must be f32, f16 or bf16";
}

Cost cost(const PoolRowsProblem& problem) {
  const int64_t values = problem.num_groups * problem.group_size * problem.heads * problem.dims;
  const int64_t results = problem.num_groups * problem.heads * problem.width();
  return {values * dtype_info(problem.dtype).block_bytes + results * 4,
          problem.concatenates ? 0 : 2 * values};
}

}  // namespace effinfer::ops
