// Products with packed weights: each dtype, shape and number of tokens, of decoding steps (section
// matmul) and of prompts (prefill).
#include <thread>

#include "bench/gpu/measure.h"
#include "ops/matmul.h"

namespace bench {
namespace {

using namespace effinfer;

// "4096x4096", or "30MBx4096": as many rows as the bytes of the format make.
std::pair<int64_t, int64_t> shape_named(const std::string& name, DType dtype) {
  const int64_t cols = std::atoll(name.c_str() + name.find('x') + 1);
  if (name.find("MB") == std::string::npos) return {std::atoll(name.c_str()), cols};
  const auto row_bytes = static_cast<double>(TensorView{nullptr, dtype, {1, cols}}.num_bytes());
  const auto rows = static_cast<int64_t>(std::atof(name.c_str()) * 1e6 / row_bytes);
  return {std::max<int64_t>(rows / 64, 1) * 64, cols};
}

// A packed weight and its copies on the device.
struct Weights {
  ops::PackedBuffer packed;
  std::vector<DeviceArray<uint8_t>> copies;

  Weights(DType dtype, int64_t rows, int64_t cols, ThreadPool& pool, const Settings& settings) {
    TensorView view{nullptr, dtype, {rows, cols}};
    const std::vector<uint8_t> bytes = random_bytes(view.num_bytes());
    view.data = bytes.data();
    packed = ops::pack(view, pool);
    const auto size = static_cast<int64_t>(packed.view.num_bytes());
    copies.push_back(filled(size, packed.view.data, size));
    const int count = copies_of(size, settings);
    for (int i = 1; i < count; ++i) copies.push_back(filled(size, copies[0].data(), size));
  }
};

void run_case(const char* section, const std::string& dtype, const Weights& weights, int64_t tokens,
              const Settings& settings, Queue& queue) {
  const ops::PackedWeight& packed = weights.packed.view;
  ops::MatmulProblem problem;
  problem.x = {ops::Arithmetic::bf16, tokens, packed.cols, nullptr};
  const auto x_bytes = tokens * problem.x.row_bytes();
  const DeviceArray<uint16_t> x(random_bf16(static_cast<size_t>(x_bytes / 2)));
  const DeviceArray<float> out(static_cast<size_t>(tokens * packed.rows));
  problem.x.data = x.data();
  problem.num_parts = 1;
  problem.rounds_weights = std::strcmp(section, "prefill") == 0;
  problem.parts[0] = {packed, nullptr, nullptr, out.data(), packed.rows};
  const auto& variant = ops::table<ops::MatmulProblem>().select(problem, current_target(kGpu));
  const Timing time =
      measure(queue, settings, static_cast<int>(weights.copies.size()), [&](int copy) {
        problem.parts[0].weight.data = weights.copies[static_cast<size_t>(copy)].data();
        variant.launch(problem, queue);
      });
  const std::string what = member("section", section) + ", " + member("dtype", dtype) + ", " +
                           member("rows", packed.rows) + ", " + member("cols", packed.cols) + ", " +
                           member("n", tokens) + ", " + member("kernel", variant.name);
  check_results(out.values(), what);
  print_row(what, time,
            static_cast<int64_t>(packed.num_bytes()) + x_bytes + tokens * packed.rows * 4,
            2.0 * static_cast<double>(tokens * packed.rows * packed.cols));
}

int run_cases(const char* section, const std::string& all_tokens, Options& options,
              const Settings& settings, Queue& queue) {
  ThreadPool pool(static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
  int count = 0;
  for (const std::string& dtype : split(options["--dtypes"])) {
    for (const std::string& shape : split(options["--shapes"])) {
      const auto [rows, cols] = shape_named(shape, parse_dtype(dtype));
      const Weights weights(parse_dtype(dtype), rows, cols, pool, settings);
      for (const std::string& tokens : split(all_tokens)) {
        run_case(section, dtype, weights, std::atoll(tokens.c_str()), settings, queue);
        ++count;
      }
    }
  }
  return count;
}

}  // namespace

int bench_matmul(Options& options, const Settings& settings, Queue& queue) {
  return run_cases("matmul", options["--tokens"], options, settings, queue);
}

int bench_prefill(Options& options, const Settings& settings, Queue& queue) {
  return run_cases("prefill", options["--prompt-tokens"], options, settings, queue);
}

}  // namespace bench
