// The costs that profiles count, and the sums over records.
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "effinfer/error.h"
#include "effinfer/profile.h"
#include "ops/attention.h"
#include "ops/registry.h"

using namespace effinfer;

TEST("profile: attention counts the keys that rows see, and reads each once") {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<int32_t> qo_indptr = {0};
    std::vector<int32_t> kv_len;
    ops::AttentionProblem problem;
    problem.num_qo_heads = 4;
    problem.num_kv_heads = 2;
    problem.k.dims = problem.v.dims = 16;
    problem.k.dtype = problem.v.dtype = DType::bf16;
    problem.window_left = round % 3 == 0 ? -1 : static_cast<int32_t>(random() % 40);
    int64_t pairs = 0;
    int64_t tokens = 0;
    for (int s = 0; s < 3; ++s) {
      const auto rows = static_cast<int32_t>(random() % 30);
      const int32_t length = rows + static_cast<int32_t>(random() % 50);
      std::vector<bool> seen(static_cast<size_t>(length));
      for (int32_t row = 0; row < rows; ++row) {
        const int32_t position = length - rows + row;
        for (int32_t key = 0; key <= position; ++key) {
          if (problem.window_left >= 0 && key < position - problem.window_left) continue;
          ++pairs;
          seen[static_cast<size_t>(key)] = true;
        }
      }
      tokens += std::count(seen.begin(), seen.end(), true);
      qo_indptr.push_back(qo_indptr.back() + rows);
      kv_len.push_back(length);
    }
    problem.batch.num_tokens = qo_indptr.back();
    problem.batch.num_sequences = 3;
    problem.batch.qo_indptr = qo_indptr.data();
    problem.batch.kv_len = kv_len.data();
    std::vector<float> out(static_cast<size_t>(qo_indptr.back()) * 64 + 1);
    problem.out = reinterpret_cast<uint8_t*>(out.data());
    const ops::Cost cost = ops::cost(problem);
    CHECK_EQ(cost.ops, 4 * 64 * pairs);
    // Queries and outputs in float32, K and V in bfloat16.
    CHECK_EQ(cost.bytes, qo_indptr.back() * 64 * 4 * 2 + tokens * 2 * 32 * 2);
  }
}

TEST("profile: what overlaps of two, and both on one axis of a trace") {
  const auto profile_of = [](const std::vector<std::pair<int64_t, int64_t>>& spans) {
    Profile profile;
    profile.threads = 1;
    for (const auto& [begin, end] : spans) {
      StepRecord step;
      step.begin_ns = begin;
      step.end_ns = end;
      profile.steps.push_back(step);
    }
    return profile;
  };
  const Profile target = profile_of({{100, 200}, {210, 300}, {400, 500}});
  CHECK_EQ(overlapped_share(profile_of({{120, 140}, {150, 160}}), target), 1.0);
  CHECK_EQ(overlapped_share(profile_of({{0, 100}, {300, 400}, {500, 510}}), target), 0.0);
  CHECK_EQ(overlapped_share(profile_of({{190, 220}, {290, 310}}), target), 30.0 / 50.0);
  CHECK_EQ(overlapped_share(profile_of({{0, 1000}}), target), 290.0 / 1000.0);
  CHECK_EQ(overlapped_share(target, profile_of({{0, 1000}})), 1.0);
  CHECK_EQ(overlapped_share(Profile{}, target), 0.0);
  CHECK_EQ(overlapped_share(target, Profile{}), 0.0);
  std::mt19937 random(7);
  for (int round = 0; round < 100; ++round) {
    std::vector<bool> marks[2];
    Profile profiles[2];
    for (int side = 0; side < 2; ++side) {
      std::vector<std::pair<int64_t, int64_t>> spans;
      marks[side].resize(400);
      for (int64_t at = 0; at < 300;) {
        const int64_t begin = at + static_cast<int64_t>(random() % 9);
        at = begin + 1 + static_cast<int64_t>(random() % 20);
        spans.emplace_back(begin, at);
        for (int64_t i = begin; i < at; ++i) marks[side][static_cast<size_t>(i)] = true;
      }
      profiles[side] = profile_of(spans);
    }
    int both = 0;
    int work = 0;
    for (size_t i = 0; i < 400; ++i) {
      work += marks[0][i];
      both += marks[0][i] && marks[1][i];
    }
    CHECK_EQ(overlapped_share(profiles[0], profiles[1]), static_cast<double>(both) / work);
  }
  const std::vector<NamedProfile> both = {{"target", target}, {"draft", profile_of({{50, 90}})}};
  const std::string trace = trace_json(both);
  for (const char* part : {R"("pid":1,"tid":0,"name":"process_name","args":{"name":"target"})",
                           R"("pid":2,"tid":0,"name":"process_name","args":{"name":"draft"})",
                           R"("pid":1,"tid":0,"name":"decode step","cat":"step","ts":0.050)",
                           R"("pid":2,"tid":0,"name":"decode step","cat":"step","ts":0.000)"}) {
    CHECK(trace.find(part) != std::string::npos);
  }
}

TEST("profile: kernels are summed by name, the longest first") {
  Profile profile;
  profile.threads = 2;
  profile.calls = {{"%a = matmul", "matmul", "blk.q", "", "int8", Isa::portable},
                   {"%b = matmul", "matmul", "blk.q", "", "int8", Isa::portable},
                   {"%c = norm", "norm", "blk.n", "", "f32", Isa::portable}};
  StepRecord step;
  step.tokens = 1;
  step.begin_ns = 100;
  step.end_ns = 200;
  step.barriers = 3;
  step.calls = {{0, 10, 20}, {2, 1, 2}, {1, 30, 40}};
  step.times = {{110, 112, 115}, {115, 150, 151}, {151, 160, 170},   // thread 0
                {111, 115, 115}, {116, 117, 151}, {152, 169, 170}};  // thread 1
  profile.steps = {step, step, step};
  profile.steps[1].phase = Phase::prefill;
  profile.steps[2].begin_ns = 130;
  profile.steps[2].times[1] = {115, 130, 141};  // the norm was faster there
  profile.steps[2].times[4] = {116, 117, 141};
  const PhaseSummary sum = summarize(profile, Phase::decode);
  CHECK_EQ(sum.steps, 2);
  CHECK_EQ(sum.step_ns, 100 + 70);
  CHECK_EQ(sum.host_ns, sum.step_ns - 60 - 50);
  CHECK_EQ(sum.between_count, 0);  // a prefill lies between
  CHECK_EQ(sum.barriers, 6);
  CHECK_EQ(sum.kernels.size(), 2u);
  const KernelSummary& norm = sum.kernels[0];
  CHECK_EQ(norm.info.what, "blk.n");
  CHECK_EQ(norm.time_ns, 36 + 26);
  CHECK_EQ(norm.least_ns, (26 + 25) / 2);
  CHECK_EQ(norm.threads_ns, 36 + 35 + 26 + 25);
  CHECK_EQ(norm.wait_ns, 1 + 34 + 11 + 24);
  const KernelSummary& matmul = sum.kernels[1];
  CHECK_EQ(matmul.calls, 4);
  CHECK_EQ(matmul.bytes, 2 * 40);
  CHECK_EQ(matmul.ops, 2 * 60);
  CHECK_EQ(matmul.time_ns, 2 * (5 + 19));
  CHECK_EQ(matmul.least_ns, (5 + 4 + 19 + 18) / 2);
}

TEST("profile: the rate of memory is measured") {
  ThreadPool pool(2);
  const double rate = measure_read_bandwidth(pool);
  CHECK(std::isfinite(rate) && rate > 0);
}

TEST("profile: the peak of each arithmetic is measured where kernels use it") {
  const auto& variants = ops::table<ops::AttentionProblem>().variants();
  if (std::ranges::none_of(variants, [](const auto& v) { return v.isa > Isa::portable; })) {
    check::skip("this build has portable kernels alone");
  }
  ThreadPool pool(2);
  for (const Isa isa : available_isas()) {
    const bool vectors = isa == Isa::avx2 || isa == Isa::avx512;
    CHECK_EQ(measure_peak_ops(pool, "int8", isa) > 0, vectors);
    CHECK_EQ(measure_peak_ops(pool, "f32", isa) > 0, isa >= Isa::avx2);
    const bool bf16 = isa == Isa::avx512 && cpu_features().avx512_bf16;
    CHECK_EQ(measure_peak_ops(pool, "bf16", isa) > 0, bf16);
  }
}

TEST("profile: an arithmetic that no kernel has is refused") {
  ThreadPool pool(1);
  CHECK_THROWS(InvalidArgument, "int4", measure_peak_ops(pool, "int4", Isa::avx2));
}

CHECK_MAIN()
