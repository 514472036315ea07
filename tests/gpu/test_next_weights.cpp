// What a matmul that waits for attention asks for ahead: which weights, which of their bytes, and
// that nothing else depends on it.
#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "compiler/next_weights.h"
#include "cpp/check.h"
#include "cuda/bodies/stream_next.h"
#include "effinfer/engine.h"
#include "gpu/hopper_device.h"
#include "gpu/host_unit.h"
#include "gpu/matmul_cases.h"
#include "gpu/paths.h"
#include "gpu/tiny_model.h"

namespace effinfer {
namespace {

using ops::MatmulProblem;
using ops::NextWeights;

// Bytes of memory from an address on.
using Run = std::pair<const uint8_t*, int64_t>;

// In the order of addresses, those that follow each other as one.
std::vector<Run> joined(std::vector<Run> runs) {
  std::sort(runs.begin(), runs.end());
  std::vector<Run> out;
  for (const Run& run : runs) {
    if (!out.empty() && out.back().first + out.back().second == run.first) {
      out.back().second += run.second;
    } else {
      out.push_back(run);
    }
  }
  return out;
}

int64_t bytes_of(const std::vector<Run>& runs) {
  int64_t bytes = 0;
  for (const Run& run : runs) bytes += run.second;
  return bytes;
}

// Every `stride`-th 32 rows of each weight.
std::vector<Run> units_of(const NextWeights& next, int64_t stride) {
  std::vector<Run> runs;
  for (int i = 0; i < next.num_parts; ++i) {
    const ops::PackedWeight& part = next.parts[i];
    for (int64_t unit = stride - 1; unit < part.rows / 32; unit += stride) {
      runs.emplace_back(part.group(2 * unit), 2 * part.group_bytes);
    }
  }
  return joined(runs);
}

// A warp that writes down what it is to ask for.
struct Asked {
  std::vector<Run> runs;
  void prefetch(const uint8_t* from, int bytes) { runs.emplace_back(from, bytes); }
};

std::vector<Run> asked_by(const cuda::StreamNext& plan, int warps) {
  Asked unit;
  for (int warp = 0; warp < warps; ++warp) cuda::prefetch_next(unit, plan, warp);
  CHECK_EQ(unit.runs.size(), static_cast<size_t>(plan.chunks));
  for (const Run& run : unit.runs) CHECK(run.second > 0 && run.second % 16 == 0);
  return joined(unit.runs);
}

// Two weights as of a GLU, and a smaller one.
NextWeights weights_at(uint8_t* memory, int64_t rows, int64_t cols) {
  NextWeights next;
  const DType dtypes[] = {DType::q4_k, DType::q4_k, DType::q6_k};
  for (const DType dtype : dtypes) {
    ops::PackedWeight& part = next.parts[next.num_parts++];
    const int64_t own_rows = next.num_parts == 3 ? rows / 2 : rows;
    part = ops::packed_shape({nullptr, dtype, {own_rows, cols}});
    part.data = memory;
    memory += part.num_bytes() + 4096;
  }
  return next;
}

TEST("a share of each weight's units, each once and by one warp") {
  std::vector<uint8_t> memory(1);  // whose end nobody reaches
  for (const int64_t rows : {32, 96, 416, 4096}) {
    for (const int64_t cols : {256, 1280, 4096}) {
      NextWeights next = weights_at(memory.data(), rows, cols);
      int64_t all = 0;
      for (const ops::PackedWeight& part : next.parts) all += part.num_bytes();
      for (const int64_t share : {1, 2, 3, 7, 50}) {
        next.bytes = (all + share - 1) / share;
        const cuda::StreamNext plan = cuda::stream_next(next, 2048);
        CHECK(plan.chunks <= cuda::kMostNextWarps);
        const std::vector<Run> runs = asked_by(plan, 2048);
        CHECK(runs == units_of(next, share));
        CHECK(bytes_of(runs) <= next.bytes);
      }
      // A launch of few warps asks for less.
      next.bytes = all;
      const cuda::StreamNext few = cuda::stream_next(next, 16);
      CHECK(few.chunks <= 16);
      CHECK(bytes_of(asked_by(few, 16)) <= all);
    }
  }
  CHECK_EQ(cuda::stream_next({}, 2048).chunks, 0);
  NextWeights none = weights_at(memory.data(), 64, 256);
  CHECK_EQ(cuda::stream_next(none, 2048).chunks, 0);  // of which no bytes are wanted
  none.bytes = 100;
  CHECK_EQ(cuda::stream_next(none, 2048).chunks, 0);
}

// Gate and up of an 8B model behind its output projection: 128 units of 16 slices.
TEST("a fourth of the weights of a large GLU, by some of the warps") {
  std::vector<uint8_t> memory(1);
  NextWeights next = weights_at(memory.data(), 14336, 4096);
  next.num_parts = 2;
  next.bytes = (50 << 20) / 3;
  const cuda::StreamNext plan = cuda::stream_next(next, 128 * 16);
  CHECK_EQ(plan.chunks, 2 * 112 * 4);
  CHECK_EQ(plan.weights[0].chunk_bytes, 18944);
  CHECK(asked_by(plan, 2048) == units_of(next, 4));
}

std::vector<Run> recorded_runs() {
  std::vector<Run> runs;
  for (const cuda::host::Prefetched& one : cuda::host::recorded_prefetches()) {
    CHECK_EQ(one.kernel, "stream_matmul");
    runs.emplace_back(reinterpret_cast<const uint8_t*>(one.from), one.bytes);
  }
  return joined(runs);
}

// x times a weight, which asks for some of others.
struct Case {
  const GpuOperand& x;
  const GpuWeight& weight;
  NextWeights next;

  std::vector<float> outputs(int64_t tokens) const {
    const int64_t rows = weight.view().rows;
    const DeviceArray<float> out(static_cast<size_t>(tokens * rows));
    MatmulProblem problem;
    problem.x = x.slice(0, tokens);
    problem.num_parts = 1;
    problem.parts[0] = {weight.view(), nullptr, nullptr, out.data(), rows};
    problem.next = next;
    run_on_gpu(problem);
    return out.values();
  }
};

void check_kernel(std::mt19937& random) {
  const GpuOperand x(ops::Arithmetic::bf16, 9, 512, normals(9 * 512, random));
  const GpuWeight own(DType::q4_k, 160, 512, random);  // 40 warps
  const GpuWeight gate(DType::q4_k, 480, 256, random);
  const GpuWeight up(DType::q6_k, 480, 256, random);
  Case with{x, own, {2, {gate.view(), up.view()}, 0}};
  const Case without{x, own, {}};
  for (const int64_t tokens : {1, 8}) {
    const std::vector<float> expected = without.outputs(tokens);
    for (const int64_t stride : {1, 3}) {
      with.next.bytes = static_cast<int64_t>(gate.view().num_bytes() + up.view().num_bytes());
      with.next.bytes = (with.next.bytes + stride - 1) / stride;
      CHECK(same_bits(with.outputs(tokens), expected));
      cuda::host::record_prefetches();
      with.outputs(tokens);
      CHECK(recorded_runs() == units_of(with.next, stride));
    }
  }
  CHECK(same_bits(with.outputs(9), without.outputs(9)));
  cuda::host::record_prefetches();
  with.outputs(9);
  without.outputs(1);
  CHECK(recorded_runs().empty());
}

TEST("kernels of few tokens ask for them, others do not, and no bit changes") {
  std::mt19937 random(1);
  check_kernel(random);
  const OnHopper machine;
  check_kernel(random);
}

TEST("what lies beyond a weight's memory is told of") {
  cuda::host::record_prefetches();
  std::mt19937 random(2);
  const GpuOperand x(ops::Arithmetic::bf16, 1, 256, normals(256, random));
  const GpuWeight own(DType::q8_0, 64, 256, random);
  const GpuWeight other(DType::q8_0, 64, 256, random);
  NextWeights next{1, {other.view()}, int64_t{1} << 20};
  Case with{x, own, next};
  with.outputs(1);
  const auto refuses = [&](const char* why) {
    CHECK_THROWS(std::logic_error, why, with.outputs(1));
    const OnHopper machine;
    CHECK_THROWS(std::logic_error, why, with.outputs(1));
  };
  with.next.parts[0].rows = 96;
  refuses("prefetch: expected bytes of one allocation");
  with.next = next;
  with.next.parts[0].data -= 64;
  refuses("prefetch: expected bytes of one allocation");
  with.next = next;
  with.next.parts[0].data += 8;
  refuses("prefetch: expected an address");
  cuda::host::recorded_prefetches();
}

// Number of the node whose weights the `at`-th asks for, or -1.
int next_of(const std::vector<const char*>& ops, size_t at) {
  Graph graph;
  for (const char* op : ops) graph.nodes.push_back({op, {}, {}, {}});
  const Node* const next = compiler::next_matmul(graph, graph.nodes[at]);
  return next == nullptr ? -1 : static_cast<int>(next - graph.nodes.data());
}

TEST("the first matmul behind an attention asks for the next one's weights") {
  const std::vector<const char*> layer = {"rms_norm",  "matmul",       "rope_append", "attention",
                                          "matmul",    "add_rms_norm", "matmul_glu",  "matmul",
                                          "attention", "to_act",       "matmul"};
  for (size_t at = 0; at < layer.size(); ++at) {
    if (std::string_view(layer[at]).starts_with("matmul")) {
      CHECK_EQ(next_of(layer, at), at == 4 ? 6 : -1);  // behind the last one there is none
    }
  }
  // A norm more; attention and MLP of one input, whichever comes first.
  CHECK_EQ(next_of({"attention", "matmul", "rms_norm", "add_rms_norm", "matmul"}, 1), 4);
  CHECK_EQ(next_of({"matmul", "attention", "matmul", "matmul_glu", "matmul"}, 2), 3);
  CHECK_EQ(next_of({"matmul", "attention", "matmul_glu", "matmul", "matmul"}, 2), 3);
  CHECK_EQ(next_of({"matmul", "matmul"}, 0), -1);
}

// Of each matmul that was compiled: its weights and those that it asks for.
std::vector<MatmulProblem> compiled;

void watch_matmuls() {
  ops::ensure_registered();
  compiled.clear();
  static bool is_there = false;
  if (std::exchange(is_there, true)) return;
  const auto writes_down = [](const MatmulProblem& problem) {
    compiled.push_back(problem);
    return "writes down what is asked for";
  };
  ops::mutable_table<MatmulProblem>().add(
      {"watch", Isa::portable, writes_down, nullptr, nullptr, DeviceKind::cuda, nullptr, 80});
}

EngineOptions options_on_gpu(Precision precision = Precision::fast) {
  EngineOptions options;
  options.device = kGpu;
  options.precision = precision;
  options.max_batch_tokens = 64;
  options.num_pages = 24;
  return options;
}

// How many of the compiled matmuls ask for weights, each those of the GLU that follows.
int count_asking() {
  int asking = 0;
  for (size_t i = 0; i < compiled.size(); ++i) {
    const NextWeights& next = compiled[i].next;
    if (next.num_parts == 0) continue;
    ++asking;
    CHECK_EQ(compiled[i].num_parts, 1);
    const MatmulProblem& glu = compiled.at(i + 1);
    CHECK(glu.glu != ops::UnaryOp::none);
    CHECK_EQ(next.num_parts, glu.num_parts);
    CHECK_EQ(next.bytes, current_target(kGpu).l2_bytes / 3);
    for (int part = 0; part < next.num_parts; ++part) {
      CHECK(next.parts[part].data == glu.parts[part].weight.data);
      CHECK_EQ(next.parts[part].rows, glu.parts[part].weight.rows);
    }
  }
  return asking;
}

TEST("of a model the output projections ask, in the arithmetic of decoding") {
  needs_every_value();
  watch_matmuls();
  const auto count = [](const EngineOptions& options) {
    compiled.clear();
    const Engine engine(model_of("q4_0", {}, {}, false, 3), options);
    CHECK(compiled.size() >= 12);
    return count_asking();
  };
  EngineOptions options = options_on_gpu();
  CHECK_EQ(count(options), 3);
  options.deterministic = true;  // prompts have the calls of decoding
  CHECK_EQ(count(options), 3);
  CHECK_EQ(count(options_on_gpu(Precision::f32)), 0);
  // The GPU has two of the layers, the first or the last.
  options = options_on_gpu();
  options.device = {};
  options.front = FrontLayers{kGpu, 2};
  CHECK_EQ(count(options), 2);
}

TEST("a step of a model asks for what was planned, recorded or not") {
  const OnHopper machine;
  watch_matmuls();
  Engine engine(model_of("q4_0"), options_on_gpu());
  // Two warps ask for two of six units.
  int64_t planned = 0;
  for (const MatmulProblem& problem : compiled) {
    if (problem.next.num_parts > 0) planned += bytes_of(units_of(problem.next, 3));
  }
  CHECK(planned > 0);
  SamplingParams params;
  params.max_tokens = 6;
  params.temperature = 0.0f;
  cuda::host::record_prefetches();
  engine.generate(tokens_of(20, 3), params);
  int64_t asked = 0;
  for (const cuda::host::Prefetched& one : cuda::host::recorded_prefetches()) asked += one.bytes;
  CHECK_EQ(asked, 5 * planned);  // the prompt gives the first token
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
