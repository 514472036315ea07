// Products with packed weights: each dtype, shape and number of tokens, of decoding steps (section
// matmul), of prompts (prefill), and of ternary weights (ternary).
#include <thread>

#include "bench/gpu/measure.h"
#include "cpu/operand.h"
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

// Blocks of 256 digits of two bits, of which none is 3, and a float16 scale, here of one for all
// blocks, as rows of ternary models have.
void make_digits(std::vector<uint8_t>& bytes) {
  for (size_t i = 0; i < bytes.size(); ++i) {
    const size_t at = i % 66;
    if (at < 64) bytes[i] = static_cast<uint8_t>(bytes[i] & ~(bytes[i] >> 1 & 0x55));
    if (at >= 64) bytes[i] = at == 64 ? 0x00 : 0x2c;
  }
}

// A packed weight and its copies on the device.
struct Weights {
  ops::PackedBuffer packed;
  std::vector<DeviceArray<uint8_t>> copies;

  Weights(DType dtype, int64_t rows, int64_t cols, ThreadPool& pool, const Settings& settings) {
    TensorView view{nullptr, dtype, {rows, cols}};
    std::vector<uint8_t> bytes = random_bytes(view.num_bytes());
    const bool ternary = dtype == DType::tq2_0;
    if (ternary) make_digits(bytes);
    view.data = bytes.data();
    packed = ops::pack(view, pool, ternary ? ops::TernaryForm::t2 : ops::TernaryForm::u4);
    const auto size = static_cast<int64_t>(packed.view.num_bytes());
    copies.push_back(filled(size, packed.view.data, size));
    const int count = copies_of(size, settings);
    for (int i = 1; i < count; ++i) copies.push_back(filled(size, copies[0].data(), size));
  }
};

// Rows of activations in the arithmetic that they are to have.
DeviceArray<uint8_t> operand_rows(const ops::Operand& x) {
  std::vector<uint8_t> rows(static_cast<size_t>(x.rows * x.row_bytes()));
  const auto numbers = widened(random_bf16(static_cast<size_t>(x.rows * x.cols)));
  ops::Operand here = x;
  here.data = rows.data();
  for (int64_t row = 0; row < x.rows; ++row) {
    cpu::store_operand_row(current_isa())(here, row, numbers.data() + row * x.cols);
  }
  return DeviceArray<uint8_t>(rows);
}

void run_case(const char* section, const std::string& dtype, const Weights& weights, int64_t tokens,
              const Settings& settings, Queue& queue) {
  const ops::PackedWeight& packed = weights.packed.view;
  const bool ternary = std::strcmp(section, "ternary") == 0;
  ops::MatmulProblem problem;
  problem.x = {ternary ? ops::Arithmetic::int8_token : ops::Arithmetic::bf16, tokens, packed.cols,
               nullptr};
  const auto x_bytes = tokens * problem.x.row_bytes();
  const DeviceArray<uint8_t> x = operand_rows(problem.x);
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

int run_cases(const char* section, const std::string& dtypes, const std::string& shapes,
              const std::string& all_tokens, const Settings& settings, Queue& queue) {
  ThreadPool pool(static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
  int count = 0;
  for (const std::string& dtype : split(dtypes)) {
    for (const std::string& shape : split(shapes)) {
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
  return run_cases("matmul", options["--dtypes"], options["--shapes"], options["--tokens"],
                   settings, queue);
}

int bench_prefill(Options& options, const Settings& settings, Queue& queue) {
  return run_cases("prefill", options["--dtypes"], options["--shapes"], options["--prompt-tokens"],
                   settings, queue);
}

int bench_ternary(Options& options, const Settings& settings, Queue& queue) {
  return run_cases("ternary", "tq2_0", options["--ternary-shapes"], options["--tokens"], settings,
                   queue);
}

}  // namespace bench
