#include "ops/top_rows.h"

#include <limits>

#include "ops/top_list.h"

namespace effinfer::ops {

std::string describe(const TopRowsProblem& problem) {
  return "top_rows rows=" + std::to_string(problem.rows) + " cols=" + std::to_string(problem.cols) +
         " k=" + std::to_string(problem.k);
}

const char* rejects(const TopRowsProblem& problem) {
  if (problem.cols > std::numeric_limits<int32_t>::max()) return "an index has 31 bits";
  const bool fits = problem.k >= 1 && problem.k <= kMaxTop && problem.k <= problem.cols;
  return fits ? nullptr : "k is not 1 to 64 and at most the columns";
}

Cost cost(const TopRowsProblem& problem) {
  return {problem.rows * (problem.cols * 4 + problem.k * 8), problem.rows * problem.cols};
}

}  // namespace effinfer::ops
