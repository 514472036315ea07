// Norms of bfloat16 rows, alone and after the addition that precedes them in a layer.
#include "bench/gpu/measure.h"
#include "ops/norm.h"

namespace bench {
namespace {

using namespace effinfer;
using Rows16 = DeviceArray<uint16_t>;

// Arrays of one call.
struct Copy {
  Rows16 x, add_to, sum, out;
};

struct Case {
  const char* name;
  int arrays;  // that a call reads or writes
};

void run_case(const Case& which, int64_t rows, int64_t cols, const Settings& settings,
              Queue& queue) {
  const auto size = static_cast<size_t>(rows * cols);
  const std::vector<uint16_t> numbers = random_bf16(size);
  const Rows16 weight(random_bf16(static_cast<size_t>(cols)));
  const int64_t bytes = which.arrays * rows * cols * 2;
  const bool adds = which.arrays == 4;
  std::vector<Copy> copies(static_cast<size_t>(copies_of(bytes, settings)));
  for (Copy& copy : copies) {
    copy = {Rows16(numbers), Rows16(adds ? numbers : std::vector<uint16_t>()),
            Rows16(adds ? size : 0), Rows16(size)};
  }
  const auto call = [&]<class Problem>(Problem problem) {
    problem.dtype = DType::bf16;
    problem.rows = rows;
    problem.cols = cols;
    problem.weight_dtype = DType::bf16;
    problem.weight = weight.data();
    if constexpr (requires { problem.weight_is_fixed; }) problem.weight_is_fixed = true;
    return [&, problem](int index) mutable {
      const Copy& copy = copies[static_cast<size_t>(index)];
      problem.x = {copy.x.data(), cols, cols};
      problem.out = {copy.out.data(), cols, cols};
      if constexpr (requires { problem.bias; }) {
        problem.bias = weight.data();
      } else if (adds) {
        problem.add_to = {copy.add_to.data(), cols, cols};
        problem.sum_out = {copy.sum.data(), cols, cols};
      }
      ops::table<Problem>().select(problem, current_target(kGpu)).launch(problem, queue);
    };
  };
  const bool centred = std::string(which.name) == "layer_norm";
  const auto launch = centred ? std::function<void(int)>(call(ops::LayerNormProblem{}))
                              : std::function<void(int)>(call(ops::RmsNormProblem{}));
  const Timing time = measure(queue, settings, static_cast<int>(copies.size()), launch);
  const std::string what = member("section", "norms") + ", " + member("op", which.name) + ", " +
                           member("rows", rows) + ", " + member("cols", cols);
  for (const Copy& copy : {copies.front(), copies.back()}) {
    check_results(widened(copy.out.values()), what);
    if (adds) check_results(widened(copy.sum.values()), what);
  }
  print_row(what, time, bytes, 0);
}

}  // namespace

int bench_norms(Options& options, const Settings& settings, Queue& queue) {
  int count = 0;
  for (const Case& which : {Case{"rms_norm", 2}, Case{"add_rms_norm", 4}, Case{"layer_norm", 2}}) {
    for (const std::string& rows : split(options["--norm-rows"])) {
      run_case(which, std::atoll(rows.c_str()), std::atoll(options["--norm-cols"].c_str()),
               settings, queue);
      ++count;
    }
  }
  return count;
}

}  // namespace bench
