// Speed of the ternary matmuls on the largest matrix of BitNet b1.58 2B4T, 6912 x 2560.
//
//   bench_ternary [--rows 6912] [--cols 2560] [--tokens 1,8,128] [--isas avx2,avx512]
//                 [--cold-mb 256] [--seconds 0.3] [--clock wall]
//
// Every variant of the table that takes the problem, at the levels of --isas or all of the machine,
// is measured on one thread, in both packings, with operands that are made beforehand. A table goes
// to stderr, one JSON object a line to stdout. Times are the median and the least. Hot: one matrix
// again and again; cold, with one token: copies of it in turn, --cold-mb MB together, more than the
// last cache holds. With --clock cpu times are the thread's CPU time: for a busy machine.
#include <cstdio>
#include <cstdlib>
#include <map>
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
using namespace effinfer::ops;
using bench::now;
using bench::split;

struct Settings {
  int64_t rows;
  int64_t cols;
  double seconds;
  size_t cold_bytes;
  clockid_t clock;
};

// A tq2_0 tensor of random digits under one scale.
std::vector<uint8_t> random_weight(int64_t rows, int64_t cols) {
  std::mt19937 random(1);
  std::vector<uint8_t> bytes(static_cast<size_t>(rows * cols / 256 * 66));
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto digit = [&] { return static_cast<uint8_t>(random() % 3); };
    bytes[i] = static_cast<uint8_t>(digit() | digit() << 2 | digit() << 4 | digit() << 6);
    if (i % 66 >= 64) bytes[i] = i % 66 == 64 ? 0x00 : 0x2c;
  }
  return bytes;
}

// Runs the problem on each of the copies in turn.
bench::Timing measure(const Variant<MatmulProblem>& variant, MatmulProblem problem,
                      const std::vector<PackedBuffer>& copies, ThreadPool& pool,
                      const Settings& settings) {
  if (variant.scratch_bytes != nullptr) pool.reserve_scratch(variant.scratch_bytes(problem));
  std::vector<double> times;
  pool.parallel([&](Team& team) {
    const double start = now(settings.clock);
    double last = start;
    for (size_t i = 0; last - start < settings.seconds || times.size() < copies.size() + 5; ++i) {
      problem.parts[0].weight = copies[i % copies.size()].view;
      variant.run(problem, team);
      team.barrier();
      const double time = now(settings.clock);
      times.push_back(time - last);
      last = time;
    }
  });
  return bench::summary(times);
}

// Returns how many rows it printed.
int run_case(const std::vector<PackedBuffer>& copies, Isa isa, int64_t tokens, bool cold,
             ThreadPool& pool, const Settings& settings) {
  MatmulProblem problem;
  problem.x = {Arithmetic::int8_token, tokens, settings.cols, nullptr};
  const auto bytes = static_cast<size_t>(tokens * problem.x.row_bytes());
  problem.x.data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  std::vector<float> x(static_cast<size_t>(settings.cols));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 17) - 8.0f;
  for (int64_t t = 0; t < tokens; ++t) cpu::store_operand_row(isa)(problem.x, t, x.data());
  std::vector<float> out(static_cast<size_t>(tokens * settings.rows));
  problem.num_parts = 1;
  problem.parts[0] = {copies[0].view, nullptr, nullptr, out.data(), settings.rows};
  const std::vector<PackedBuffer> hot(copies.begin(), copies.begin() + 1);
  int measured = 0;
  for (const Variant<MatmulProblem>& variant : table<MatmulProblem>().variants()) {
    if (variant.isa != isa || variant.rejects(problem) != nullptr) continue;
    ++measured;
    const bench::Timing time = measure(variant, problem, cold ? copies : hot, pool, settings);
    const double gop =
        2e-9 * static_cast<double>(settings.rows) * static_cast<double>(settings.cols * tokens);
    const double gb = 1e-9 * static_cast<double>(copies[0].view.num_bytes());
    const std::string format = to_string(copies[0].view.format);
    std::fprintf(stderr, "%-26s %-10s n=%-4lld %-4s %9.1f us (best %9.1f) %7.1f GOP/s %6.1f GB/s\n",
                 variant.name.c_str(), format.c_str(), static_cast<long long>(tokens),
                 cold ? "cold" : "hot", 1e6 * time.median, 1e6 * time.best, gop / time.median,
                 gb / time.median);
    std::printf(
        "{\"rows\": %lld, \"cols\": %lld, \"kernel\": \"%s\", \"format\": \"%s\", \"n\": %lld, "
        "\"cold\": %s, \"median_us\": %.2f, \"best_us\": %.2f}\n",
        static_cast<long long>(settings.rows), static_cast<long long>(settings.cols),
        variant.name.c_str(), format.c_str(), static_cast<long long>(tokens),
        cold ? "true" : "false", 1e6 * time.median, 1e6 * time.best);
  }
  std::free(problem.x.data);
  return measured;
}

void run(bench::Options& options) {
  const auto number = [&](const char* key) { return std::atof(options[key].c_str()); };
  const Settings settings{static_cast<int64_t>(number("--rows")),
                          static_cast<int64_t>(number("--cols")), number("--seconds"),
                          static_cast<size_t>(number("--cold-mb") * 1e6),
                          bench::clock_named(options["--clock"])};
  const std::vector<uint8_t> bytes = random_weight(settings.rows, settings.cols);
  std::map<Isa, int> measured;
  for (const Isa isa : bench::levels(options["--isas"])) measured[isa] = 0;
  ThreadPool pool(1);
  for (const TernaryForm form : {TernaryForm::t2, TernaryForm::t1_6}) {
    const TensorView view{bytes.data(), DType::tq2_0, {settings.rows, settings.cols}};
    std::vector<PackedBuffer> copies;
    for (size_t size = 0; copies.empty() || size < settings.cold_bytes;) {
      copies.push_back(pack(view, pool, form));
      size += copies.back().view.num_bytes();
    }
    for (auto& [isa, rows] : measured) {
      for (const std::string& tokens : split(options["--tokens"])) {
        const int64_t n = std::atoll(tokens.c_str());
        rows += run_case(copies, isa, n, false, pool, settings);
        if (n == 1 && copies.size() > 1) rows += run_case(copies, isa, n, true, pool, settings);
      }
    }
  }
  for (const auto& [isa, rows] : measured) bench::check_measured(isa, rows);
}

}  // namespace

int main(int argc, char** argv) {
  bench::Options options = {{"--rows", "6912"}, {"--cols", "2560"},   {"--tokens", "1,8,128"},
                            {"--isas", ""},     {"--cold-mb", "256"}, {"--seconds", "0.3"},
                            {"--clock", "wall"}};
  bench::read_options(argc, argv, options);
  run(options);
}
