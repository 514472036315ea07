// Speed of the matmul kernels: GOP/s (2 N K n / time) and GB/s of packed weights read.
//
//   bench_matmul [--shapes 576x576,4096x4096] [--dtypes q4_0,q8_0] [--tokens 1,8,32,128,512]
//                [--arithmetics int8,f32,bf16] [--isas avx512] [--threads 1] [--seconds 0.1]
//                [--clock wall]
//
// Without --isas every level of the machine is measured, with the kernel that it selects.
// A table goes to stderr, one JSON object a line to stdout. Times are of the kernel alone, inside
// one parallel region as in a step, weights as hot as their size allows; the median and the best.
// With --clock cpu they are the calling thread's CPU time: on a busy machine, with one thread.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "cpu/operand.h"
#include "effinfer/error.h"
#include "kernel_bench.h"
#include "ops/matmul.h"
#include "ops/registry.h"

namespace {

using namespace effinfer;
using bench::now;
using bench::split;
using ops::Arithmetic;

struct Settings {
  double seconds;
  clockid_t clock;
};

// Random quants; the f16 fields of a random block may be anything, which costs the kernels the same
// unless sums become NaN or subnormal, so every 16-bit number is forced to a normal half.
std::vector<uint8_t> random_bytes(size_t count) {
  std::vector<uint8_t> bytes(count);
  std::mt19937 random(1);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  for (size_t i = 1; i < count; i += 2) bytes[i] = static_cast<uint8_t>((bytes[i] & 0x83) | 0x28);
  return bytes;
}

bench::Timing measure(const ops::Variant<ops::MatmulProblem>& variant,
                      const ops::MatmulProblem& problem, ThreadPool& pool,
                      const Settings& settings) {
  if (variant.scratch_bytes != nullptr) pool.reserve_scratch(variant.scratch_bytes(problem));
  std::vector<double> times;
  pool.parallel([&](Team& team) {
    static bool more;
    more = true;
    const double start = now(settings.clock);
    double last = start;
    // From barrier to barrier: a member that starts late counts.
    while (true) {
      team.barrier();
      if (!more) break;
      variant.run(problem, team);
      team.barrier();
      if (team.rank() == 0) {
        const double time = now(settings.clock);
        times.push_back(time - last);
        last = time;
        more = time - start < settings.seconds;
      }
    }
  });
  return bench::summary(times);
}

// Returns how many rows it printed.
int run_case(const std::string& shape, const std::string& dtype, const std::string& arithmetic,
             Isa isa, int64_t tokens, ThreadPool& pool, const Settings& settings) {
  const int64_t rows = std::atoll(shape.c_str());
  const int64_t cols = std::atoll(shape.c_str() + shape.find('x') + 1);
  TensorView view{nullptr, parse_dtype(dtype), {rows, cols}};
  const std::vector<uint8_t> bytes = random_bytes(view.num_bytes());
  view.data = bytes.data();
  const ops::PackedBuffer weight = ops::pack(view, pool);

  ops::MatmulProblem problem;
  problem.x.arithmetic = arithmetic == "int8"   ? Arithmetic::int8
                         : arithmetic == "bf16" ? Arithmetic::bf16
                                                : Arithmetic::f32;
  problem.x.rows = tokens;
  problem.x.cols = cols;
  problem.num_parts = 1;
  std::vector<float> out(static_cast<size_t>(tokens * rows));
  problem.parts[0] = {weight.view, nullptr, nullptr, out.data(), rows};
  const ops::Variant<ops::MatmulProblem>* variant = nullptr;
  try {
    variant = &ops::table<ops::MatmulProblem>().select(problem, {.isa = isa});
  } catch (const Unsupported&) {
    return 0;
  }
  const auto size = static_cast<size_t>(tokens * problem.x.row_bytes());
  problem.x.data = std::aligned_alloc(64, size);
  std::vector<float> x(static_cast<size_t>(cols));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 17) - 8.0f;
  for (int64_t t = 0; t < tokens; ++t) {
    cpu::store_operand_row(isa)(problem.x, t, x.data());
  }
  const bench::Timing time = measure(*variant, problem, pool, settings);
  const double gop = 2e-9 * static_cast<double>(rows * cols * tokens);
  const double gb = 1e-9 * static_cast<double>(weight.view.num_bytes());
  std::fprintf(stderr, "%-12s %-7s %-22s n=%-4lld %9.1f us (best %9.1f)  %7.1f GOP/s %6.1f GB/s\n",
               shape.c_str(), dtype.c_str(), variant->name.c_str(), static_cast<long long>(tokens),
               1e6 * time.median, 1e6 * time.best, gop / time.median, gb / time.median);
  std::printf(
      "{\"shape\": \"%s\", \"dtype\": \"%s\", \"kernel\": \"%s\", \"n\": %lld, \"threads\": %d, "
      "\"median_us\": %.2f, \"best_us\": %.2f, \"gop_s\": %.2f, \"gb_s\": %.2f}\n",
      shape.c_str(), dtype.c_str(), variant->name.c_str(), static_cast<long long>(tokens),
      pool.size(), 1e6 * time.median, 1e6 * time.best, gop / time.median, gb / time.median);
  std::free(problem.x.data);
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  bench::Options options = {{"--shapes", "576x576,1536x576,4096x4096"},
                            {"--dtypes", "q4_0,q8_0"},
                            {"--tokens", "1,8,32,128,512"},
                            {"--arithmetics", "int8,f32,bf16"},
                            {"--isas", ""},
                            {"--threads", "1"},
                            {"--seconds", "0.1"},
                            {"--clock", "wall"}};
  bench::read_options(argc, argv, options);
  const Settings settings{std::atof(options["--seconds"].c_str()),
                          bench::clock_named(options["--clock"])};
  ThreadPool pool(std::atoi(options["--threads"].c_str()));
  for (const Isa isa : bench::levels(options["--isas"])) {
    int rows = 0;
    for (const std::string& shape : split(options["--shapes"])) {
      for (const std::string& dtype : split(options["--dtypes"])) {
        for (const std::string& arithmetic : split(options["--arithmetics"])) {
          for (const std::string& tokens : split(options["--tokens"])) {
            rows +=
                run_case(shape, dtype, arithmetic, isa, std::atoll(tokens.c_str()), pool, settings);
          }
        }
      }
    }
    bench::check_measured(isa, rows);
  }
}
