// Float inputs of a graph and what it returns behind its logits, on the GPU: against the CPU.
#include <cmath>
#include <random>
#include <string>

#include "cpp/arrays.h"
#include "cpp/check.h"
#include "effinfer/compiler.h"
#include "effinfer/error.h"
#include "gpu/device_arrays.h"
#include "gpu/replays.h"

using namespace effinfer;

namespace {

constexpr int64_t kCols = 40;
constexpr int64_t kVocab = 23;
constexpr int64_t kMostTokens = 90;

// sum = silu(hidden) + embedding + hidden of all tokens; picked: of the wanted rows.
Graph graph_of_rows() {
  return Graph::parse(R"(graph rows {
  meta context_length = 128
  input %token_ids : i32[T]
  input %logit_rows : i32[R]
  input %hidden : f32[T, 40]
  weight %table = "table" : f32[23, 40]
  weight %head = "head" : f32[23, 40]
  %x : f32[T, 40] = embedding(%token_ids, %table)
  %s : f32[T, 40] = silu(%hidden)
  %a : f32[T, 40] = add(%s, %x)
  %sum : f32[T, 40] = add(%a, %hidden)
  %picked : f32[R, 40] = select_rows(%sum, %logit_rows)
  %logits : f32[R, 23] = linear(%picked, %head)
  return %logits, %sum, %picked
}
)");
}

std::shared_ptr<Executable> compiled_on(Device device, Precision precision) {
  static const std::vector<float> values = [] {
    std::mt19937 random(5);
    return normals(2 * kVocab * kCols, random);
  }();
  auto weights = std::make_shared<MemoryWeights>();
  TensorView view{values.data(), DType::f32, {kVocab, kCols}};
  weights->add("table", view, nullptr);
  view.data = values.data() + kVocab * kCols;
  weights->add("head", view, nullptr);
  CompileOptions options;
  options.device = device;
  options.precision = precision;
  options.max_tokens = options.max_rows = kMostTokens;
  options.max_sequences = 4;
  return compile(graph_of_rows(), weights, std::make_shared<ThreadPool>(1), options);
}

struct Rows {
  std::vector<int32_t> ids;
  std::vector<int32_t> positions;
  std::vector<int32_t> wanted;
  std::vector<float> hidden;
};

Rows random_rows(size_t count, std::mt19937& random) {
  Rows rows;
  for (size_t i = 0; i < count; ++i) {
    rows.ids.push_back(static_cast<int32_t>(random() % kVocab));
    rows.positions.push_back(static_cast<int32_t>(i));
    if (random() % 3 != 0) rows.wanted.push_back(static_cast<int32_t>(i));
  }
  rows.hidden = normals(static_cast<int64_t>(count) * kCols, random);
  return rows;
}

struct Results {
  std::vector<float> logits, sum, picked;
};

Results run(Executable& executable, const Rows& rows, Phase phase,
            std::span<const FloatInput> inputs) {
  KvCache cache(executable.kv_config(DType::f32, 2));
  const auto count = static_cast<int32_t>(rows.ids.size());
  const std::vector<int32_t> indptr = {0, count}, kv_indptr = {0, 2}, pages = {0, 1}, len = {count};
  Batch batch{phase, rows.ids, rows.positions, indptr, kv_indptr, pages, len, rows.wanted};
  batch.float_inputs = inputs;
  Results results;
  results.logits.resize(rows.wanted.size() * kVocab);
  executable.run(batch, cache, results.logits);
  const NamedRows sum = executable.output("sum");
  const NamedRows picked = executable.output("picked");
  CHECK_EQ(sum.cols, kCols);
  results.sum.assign(sum.values.begin(), sum.values.end());
  results.picked.assign(picked.values.begin(), picked.values.end());
  return results;
}

Results run(Executable& executable, const Rows& rows, Phase phase) {
  const FloatInput input{"hidden", rows.hidden};
  return run(executable, rows, phase, {&input, 1});
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0;
  double norm = 1e-30;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(double{a[i]} - b[i], 2);
    norm += std::pow(double{b[i]}, 2);
  }
  return std::sqrt(difference / norm);
}

}  // namespace

TEST("values reach the graph, and what it returns the host, recorded or not") {
  std::mt19937 random(7);
  for (const Precision precision : {Precision::f32, Precision::fast}) {
    const auto on_cpu = compiled_on({}, Precision::f32);
    const auto on_gpu = compiled_on(kGpu, precision);
    const Replays replays;
    for (const Phase phase : {Phase::decode, Phase::prefill}) {
      for (const size_t count : {1, 1, 1, 7, 8, 7, 33, 90, 5}) {
        const Rows rows = random_rows(count, random);
        const Results expected = run(*on_cpu, rows, phase);
        const Results got = run(*on_gpu, rows, phase);
        // Sums of three floats, whatever the arithmetic of the matmul behind them.
        CHECK(distance(got.sum, expected.sum) < 1e-6);
        CHECK(distance(got.picked, expected.picked) < 1e-6);
        CHECK(distance(got.logits, expected.logits) < (precision == Precision::f32 ? 1e-6 : 1e-2));
      }
    }
    replays.expect_at_least(1);
  }
}

TEST("the highest logits and drawn tokens come with them") {
  std::mt19937 random(8);
  const auto executable = compiled_on(kGpu, Precision::f32);
  const Rows rows = random_rows(12, random);
  const Results expected = run(*executable, rows, Phase::decode);
  const Rows others = random_rows(12, random);
  KvCache cache(executable->kv_config(DType::f32, 2));
  const std::vector<int32_t> indptr = {0, 12}, kv_indptr = {0, 2}, pages = {0, 1}, len = {12};
  const FloatInput input{"hidden", rows.hidden};
  Batch batch{Phase::decode, rows.ids, rows.positions, indptr, kv_indptr, pages, len, rows.wanted};
  batch.float_inputs = {&input, 1};
  const auto check_outputs = [&] {
    const NamedRows sum = executable->output("sum");
    CHECK(std::vector<float>(sum.values.begin(), sum.values.end()) == expected.sum);
    const NamedRows picked = executable->output("picked");
    CHECK(std::vector<float>(picked.values.begin(), picked.values.end()) == expected.picked);
  };
  std::vector<float> values(rows.wanted.size());
  std::vector<int32_t> tokens(rows.wanted.size());
  run(*executable, others, Phase::decode);
  executable->run_top(batch, cache, {1, values, tokens});
  check_outputs();
  run(*executable, others, Phase::decode);
  const std::vector<RowDraw> draws(rows.wanted.size());
  std::vector<uint8_t> decided(rows.wanted.size());
  executable->run_drawn(batch, cache, {draws, tokens, decided});
  check_outputs();
}

TEST("bad values are refused and leave the executable as it is") {
  std::mt19937 random(9);
  const auto executable = compiled_on(kGpu, Precision::f32);
  const Rows rows = random_rows(9, random);
  const Results expected = run(*executable, rows, Phase::decode);
  Rows bad = rows;
  bad.hidden[kCols * 3] = NAN;
  CHECK_THROWS(InvalidArgument, "hidden: expected finite values, got nan in row 3",
               run(*executable, bad, Phase::decode));
  bad.hidden.resize(kCols);
  CHECK_THROWS(InvalidArgument, "hidden: expected 360 values, got 40",
               run(*executable, bad, Phase::decode));
  CHECK_THROWS(InvalidArgument, "expected \"hidden\" once, got it 0 times",
               run(*executable, rows, Phase::decode, {}));
  CHECK_THROWS(InvalidArgument, "output: expected sum, picked, got \"x\"", executable->output("x"));
  const Results again = run(*executable, rows, Phase::decode);
  CHECK(again.logits == expected.logits && again.sum == expected.sum);
}

CHECK_MAIN()
