// Sampling from float32 logits: what a step does when the device draws its tokens.
#include <random>

#include "bench/gpu/measure.h"
#include "ops/row_sampling.h"
#include "ops/sampling_scratch.h"

namespace bench {
namespace {

using namespace effinfer;

struct Case {
  const char* name;
  int64_t top_k;
  float top_p;
};

// Normally distributed logits are flatter than a model's: more tokens reach top_p.
std::vector<float> logits_of(size_t count) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> logits(count);
  for (float& x : logits) x = 2.0f * normal(random);
  return logits;
}

void run_case(const Case& which, int64_t rows, int64_t vocab, const Settings& settings,
              Queue& queue) {
  const int64_t bytes = rows * vocab * 4;  // read once
  const std::vector<float> numbers = logits_of(static_cast<size_t>(rows * vocab));
  std::vector<DeviceArray<float>> logits(static_cast<size_t>(copies_of(bytes, settings)));
  for (DeviceArray<float>& copy : logits) copy = DeviceArray<float>(numbers);
  const DeviceArray<int32_t> samples(static_cast<size_t>(rows));
  const DeviceArray<ops::RowStatus> statuses(static_cast<size_t>(rows));
  const DeviceArray<uint8_t> scratch(
      static_cast<size_t>(rows * ops::SamplingScratch::of(vocab).bytes()));
  ops::RowSamplingProblem problem;
  problem.scratch = scratch.data();
  problem.rows = rows;
  problem.vocab = vocab;
  problem.top_k.value = which.top_k;
  problem.top_p.value = which.top_p;
  problem.samples = samples.data();
  problem.statuses = statuses.data();
  const auto& variant = ops::table<ops::RowSamplingProblem>().select(problem, current_target(kGpu));
  const Timing time = measure(queue, settings, static_cast<int>(logits.size()), [&](int index) {
    problem.x = logits[static_cast<size_t>(index)].data();
    variant.launch(problem, queue);
  });
  const std::string what = member("section", "sampling") + ", " + member("op", which.name) + ", " +
                           member("rows", rows) + ", " + member("cols", vocab);
  for (const int32_t token : samples.values()) {
    if (token >= 0 && token < vocab) continue;
    std::fprintf(stderr, "%s: drew token %d\n", what.c_str(), token);
    std::exit(1);
  }
  print_row(what, time, bytes, 0);
}

}  // namespace

int bench_sampling(Options& options, const Settings& settings, Queue& queue) {
  const int64_t vocab = std::atoll(options["--sampling-vocab"].c_str());
  int count = 0;
  for (const Case& which : {Case{"draw", 0, 1.0f}, Case{"top_k 50", 50, 1.0f},
                            Case{"top_p 0.9", 0, 0.9f}, Case{"top_k 50, top_p 0.9", 50, 0.9f}}) {
    for (const std::string& rows : split(options["--sampling-rows"])) {
      run_case(which, std::atoll(rows.c_str()), vocab, settings, queue);
      ++count;
    }
  }
  return count;
}

}  // namespace bench
