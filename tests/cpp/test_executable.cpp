// A compiled step allocates nothing: the global operator new counts. What a profile records.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "count_allocations.h"
#include "effinfer/compiler.h"
#include "effinfer/error.h"
#include "effinfer/graph.h"

using namespace effinfer;

namespace {

// One block of attention and one gated block, over random float32 weights.
constexpr const char* kGraph = R"(graph tiny {
  meta context_length = 256
  input %token_ids : i32[T]
  input %positions : i32[T]
  input %logit_rows : i32[R]
  weight %embed = "embed" : f32[50, 64]
  weight %norm = "norm" : f32[64]
  weight %q = "q" : f32[64, 64]
  weight %k = "k" : f32[32, 64]
  weight %gate = "gate" : f32[96, 64]
  weight %down = "down" : f32[64, 96]
  %x : f32[T, 64] = embedding(%token_ids, %embed)
  %t : f32[T, 16] = rope_table(%positions) {dims = 16, theta = 10000.0}
  %n : f32[T, 64] = rms_norm(%x, %norm) {eps = 1e-06}
  %q0 : f32[T, 64] = linear(%n, %q)
  %k0 : f32[T, 32] = linear(%n, %k)
  %q1 : f32[T, 64] = rope(%q0, %t) {heads = 4, head_dim = 16}
  %k1 : f32[T, 32] = rope(%k0, %t) {heads = 2, head_dim = 16}
  %kv : kv[0, 2, 16] = kv_append(%k1, %k0) {layer = 0, heads = 2, head_dim = 16}
  %o : f32[T, 64] = attention(%q1, %kv) {layer = 0, heads = 4, kv_heads = 2, head_dim = 16,
                                         sm_scale = 0.25}
  %g : f32[T, 96] = linear(%o, %gate)
  %s : f32[T, 96] = silu(%g)
  %d : f32[T, 64] = linear(%s, %down)
  %y : f32[T, 64] = add(%d, %x)
  %r : f32[R, 64] = select_rows(%y, %logit_rows)
  %logits : f32[R, 50] = linear(%r, %embed)
  return %logits
}
)";

std::shared_ptr<MemoryWeights> random_weights(const Graph& graph) {
  auto weights = std::make_shared<MemoryWeights>();
  std::mt19937 rng(3);
  std::normal_distribution<float> normal(0.0f, 0.2f);
  for (const ValueId id : graph.weights) {
    const Value& value = graph.value(id);
    TensorView view;
    for (const Dim& dim : value.shape) view.dims.push_back(dim.value);
    auto values =
        std::make_shared<std::vector<float>>(static_cast<size_t>(view.dims.num_elements()));
    for (float& x : *values) x = normal(rng);
    view.data = values->data();
    weights->add(value.weight_name, view, values);
  }
  return weights;
}

// A step's batch over pages 0, 1, ... of a cache for each of two sequences of `length` tokens.
struct Steps {
  explicit Steps(Executable& executable)
      : cache(executable.kv_config(DType::f32, 8)),
        logits(static_cast<size_t>(2 * executable.vocab_size())) {}

  void run(Executable& executable, Phase phase, int rows, int length) {
    executable.run(batch(phase, rows, length), cache, logits);
  }

  Batch batch(Phase phase, int rows, int length) {
    ids.assign(static_cast<size_t>(2 * rows), 7);
    positions.clear();
    for (int i = 0; i < 2 * rows; ++i) positions.push_back(length - rows + i % rows);
    qo_indptr = {0, rows, 2 * rows};
    kv_len = {length, length};
    last = {rows - 1, 2 * rows - 1};
    return {phase, ids, positions, qo_indptr, kv_indptr, kv_indices, kv_len, last};
  }

  KvCache cache;
  std::vector<float> logits;
  std::vector<int32_t> ids = std::vector<int32_t>(64);
  std::vector<int32_t> positions = std::vector<int32_t>(64);
  std::vector<int32_t> qo_indptr = {0, 0, 0};
  std::vector<int32_t> kv_indptr = {0, 4, 8};
  std::vector<int32_t> kv_indices = {0, 1, 2, 3, 4, 5, 6, 7};
  std::vector<int32_t> kv_len = {0, 0};
  std::vector<int32_t> last = {0, 0};
};

}  // namespace

TEST("executable: a step allocates nothing after the first") {
  const Graph graph = Graph::parse(kGraph);
  CompileOptions options;
  options.max_tokens = 64;
  options.max_sequences = 4;
  options.kv_dtype = DType::f32;
  const auto executable =
      compile(graph, random_weights(graph), std::make_shared<ThreadPool>(2), options);
  Steps steps(*executable);
  steps.run(*executable, Phase::prefill, 20, 20);
  steps.run(*executable, Phase::decode, 1, 21);
  for (const bool recorded : {false, true}) {
    if (recorded) executable->start_profile(30);  // its memory is taken here, not in the steps
    const int64_t before = allocations.load();
    CHECK(before > 0);
    steps.run(*executable, Phase::prefill, 20, 41);
    for (int length = 42; length < 100; ++length) {
      // The vectors of `steps` have their capacity by now.
      steps.run(*executable, Phase::decode, 1, length);
    }
    CHECK_EQ(allocations.load(), before);
  }
  CHECK_EQ(executable->take_profile().steps.size(), 30u);
  for (const float logit : steps.logits) CHECK(logit == logit);
}

TEST("executable: what sums attention up changes no logit, allocates nothing, and is checked") {
  std::string text = kGraph;
  text.insert(text.find("  %o :"),
              "  %m : kv[0, 2, 16] = attention_mass(%q1, %kv) {layer = 0, heads = 4, kv_heads = 2,"
              " head_dim = 16, sm_scale = 0.25, plane = \"mass\"}\n");
  const Graph plain = Graph::parse(kGraph);
  const Graph graph = Graph::parse(text);
  CompileOptions options;
  options.max_tokens = 64;
  options.kv_dtype = DType::f32;
  const auto pool = std::make_shared<ThreadPool>(2);
  const auto expected = compile(plain, random_weights(plain), pool, options);
  const auto executable = compile(graph, random_weights(graph), pool, options);
  Steps given(*expected);
  Steps steps(*executable);
  std::vector<float> values(2 * 128);
  std::vector<ScoredRows> scored = {{"mass", {values.data(), 128, 2, 20}, 1, 20}};
  const auto run = [&](Phase phase, int rows, int length) {
    given.run(*expected, phase, rows, length);
    Batch batch = steps.batch(phase, rows, length);
    scored[0].rows = rows;
    scored[0].plane.num_slots = length;
    batch.scored = scored;
    executable->run(batch, steps.cache, steps.logits);
    CHECK(steps.logits == given.logits);
  };
  run(Phase::prefill, 20, 20);
  run(Phase::decode, 1, 21);
  const int64_t before = allocations.load();
  for (int length = 22; length < 90; ++length) run(Phase::decode, 1, length);
  CHECK_EQ(allocations.load(), before);
  float total = 0.0f;
  for (const float x : values) total += x;
  CHECK(std::abs(total - 4 * 89) < 0.01f);  // of each row and query head 1

  const auto refused = [&](const char* what, auto&& change) {
    scored = {{"mass", {values.data(), 128, 2, 21}, 0, 1}};
    change(scored[0]);
    Batch batch = steps.batch(Phase::decode, 1, 21);
    batch.scored = scored;
    CHECK_THROWS(InvalidArgument, what, executable->run(batch, steps.cache, steps.logits));
  };
  refused("scored[0].sequence: expected 0..1, got 2", [](auto& s) { s.sequence = 2; });
  refused("scored[0].rows: expected 1..1, got 2", [](auto& s) { s.rows = 2; });
  refused("scored[0].plane: expected 2 heads of 21 slots", [](auto& s) { s.plane.num_heads = 3; });
  refused("scored[0].plane", [](auto& s) { s.plane.num_slots = 20; });
  refused("scored[0].plane", [](auto& s) { s.plane.stride = 65; });
  refused("scored[0].plane", [](auto& s) { s.plane.values = nullptr; });
  refused("scored[1].plane: expected another one than scored[0]'s",
          [&](auto&) { scored.push_back(scored[0]); });
}

TEST("executable: keeping a path of what was appended allocates nothing") {
  KvCache cache({.num_layers = 2, .num_kv_heads = 2, .head_dim = 16, .num_pages = 4});
  const std::vector<int32_t> tokens(100, 7);
  const std::vector<int32_t> rows = {0, 2, 30, 31, 70};
  const SequenceId id = cache.create({});
  cache.append(id, tokens);
  const int64_t before = allocations.load();
  cache.keep(id, rows);
  CHECK_EQ(allocations.load(), before);
  CHECK_EQ(cache.length(id), 5);
}

TEST("executable: the highest logits of a step are those of all its logits, without allocation") {
  const Graph graph = Graph::parse(kGraph);
  CompileOptions options;
  options.max_tokens = 64;
  options.kv_dtype = DType::f32;
  const auto executable =
      compile(graph, random_weights(graph), std::make_shared<ThreadPool>(2), options);
  CHECK_EQ(executable->max_top(), 50);  // the vocabulary is smaller than what a list holds
  Steps steps(*executable);
  std::vector<float> values(2 * 50);
  std::vector<int32_t> tokens(2 * 50);
  const auto top_of = [&](int32_t k) {
    const auto count = static_cast<size_t>(2 * k);
    return TopLogits{k, std::span(values).first(count), std::span(tokens).first(count)};
  };
  steps.run(*executable, Phase::prefill, 20, 20);
  for (const Phase phase : {Phase::decode, Phase::prefill}) {
    for (const int32_t k : {1, 7, 50}) {
      const Batch batch = steps.batch(phase, 1, 21);
      executable->run(batch, steps.cache, steps.logits);
      const int64_t before = allocations.load();
      executable->run_top(batch, steps.cache, top_of(k));
      CHECK_EQ(allocations.load(), before);
      for (size_t row = 0; row < 2; ++row) {
        const float* logits = steps.logits.data() + row * 50;
        for (size_t i = 0; i < static_cast<size_t>(k); ++i) {
          const size_t place = row * static_cast<size_t>(k) + i;
          CHECK_EQ(values[place], logits[tokens[place]]);
          CHECK_EQ(std::count_if(logits, logits + 50, [&](float x) { return x > values[place]; }),
                   static_cast<std::ptrdiff_t>(i));
        }
      }
    }
  }
  const Batch batch = steps.batch(Phase::decode, 1, 21);
  for (const int32_t k : {0, 51}) {
    CHECK_THROWS(InvalidArgument, "k: expected 1..50",
                 executable->run_top(batch, steps.cache, {k, {}, {}}));
  }
  CHECK_THROWS(InvalidArgument, "values: expected 6 values, got 4",
               executable->run_top(batch, steps.cache,
                                   {3, std::span(values).first(4), std::span(tokens).first(6)}));
}

TEST("executable: a profile covers every call of a step, in order and within its time") {
  const Graph graph = Graph::parse(kGraph);
  CompileOptions options;
  options.max_tokens = 64;
  options.kv_dtype = DType::f32;
  const int threads = 2;
  const auto executable =
      compile(graph, random_weights(graph), std::make_shared<ThreadPool>(threads), options);
  Steps steps(*executable);
  CHECK(executable->take_profile().steps.empty());
  CHECK_THROWS(InvalidArgument, "max_steps", executable->start_profile(0));
  executable->start_profile(3);
  const auto begin = std::chrono::steady_clock::now();
  steps.run(*executable, Phase::prefill, 20, 20);
  steps.run(*executable, Phase::decode, 1, 21);
  steps.run(*executable, Phase::decode, 1, 22);
  const std::chrono::nanoseconds wall = std::chrono::steady_clock::now() - begin;
  steps.run(*executable, Phase::decode, 1, 23);
  const Profile profile = executable->take_profile();
  CHECK_EQ(profile.steps.size(), 3u);
  CHECK_EQ(profile.dropped_steps, 1);
  CHECK_EQ(profile.threads, threads);
  CHECK_EQ(profile.num_layers, 1);

  // The sequences' rows are one tile, so rope_append runs inside attention; nodes that a member of
  // several computes for itself end in no barrier.
  std::vector<Node> nodes;
  int64_t own = 0;
  for (const Node& node : executable->graph().nodes) {
    if (node.op == "rope_append") continue;
    nodes.push_back(node);
    if (node.has("own")) ++own;
  }
  CHECK(own > 3);
  int64_t total_ns = 0;
  for (const StepRecord& step : profile.steps) {
    CHECK_EQ(step.tokens, step.phase == Phase::prefill ? 40 : 2);
    CHECK_EQ(step.sequences, 2);
    CHECK_EQ(step.calls.size(), nodes.size());
    const bool small = threads > 1 && step.phase == Phase::decode;
    CHECK_EQ(step.barriers, static_cast<int64_t>(step.calls.size()) - (small ? own : 0));
    for (size_t i = 0; i < std::min(nodes.size(), step.calls.size()); ++i) {
      const CallInfo& info = profile.calls.at(static_cast<size_t>(step.calls[i].info));
      CHECK(info.node.ends_with(" = " + nodes[i].op));
      CHECK(step.calls[i].bytes > 0);
    }
    for (int thread = 0; thread < threads; ++thread) {
      int64_t end_ns = step.begin_ns;
      for (size_t i = 0; i < step.calls.size(); ++i) {
        const CallTimes& times = step.time(thread, i);
        CHECK(times.begin_ns >= end_ns && times.done_ns >= times.begin_ns);
        CHECK(times.end_ns >= times.done_ns);
        end_ns = times.end_ns;
      }
      CHECK(end_ns <= step.end_ns);
    }
    total_ns += step.end_ns - step.begin_ns;
  }
  CHECK(total_ns <= wall.count());
}

TEST("executable: a cancelled step ends early, and the next has the bits of any other") {
  const Graph graph = Graph::parse(kGraph);
  CompileOptions options;
  options.max_tokens = 64;
  options.kv_dtype = DType::f32;
  for (const int threads : {1, 2}) {
    const auto executable =
        compile(graph, random_weights(graph), std::make_shared<ThreadPool>(threads), options);
    Steps steps(*executable);
    Steps other(*executable);
    for (Steps* each : {&steps, &other}) each->run(*executable, Phase::prefill, 20, 20);
    const CancelToken never;
    const CancelToken before;
    before.cancel();
    std::vector<float> values(2);
    std::vector<int32_t> tokens(2);
    std::mt19937 random(1);
    executable->start_profile(1000);
    for (int length = 21; length < 80; ++length) {
      const Batch batch = steps.batch(Phase::decode, 1, length);
      CHECK_THROWS(Cancelled, "cancelled",
                   executable->run(batch, steps.cache, steps.logits, &before));
      CHECK_THROWS(Cancelled, "cancelled",
                   executable->run_top(batch, steps.cache, {1, values, tokens}, &before));
      const CancelToken soon;
      std::thread canceller([&, wait = random() % 40] {
        std::this_thread::sleep_for(std::chrono::microseconds(wait));
        soon.cancel();
      });
      try {
        executable->run(batch, steps.cache, steps.logits, &soon);
      } catch (const Cancelled&) {
      }
      canceller.join();
      executable->run(batch, steps.cache, steps.logits, &never);
      other.run(*executable, Phase::decode, 1, length);
      CHECK(steps.logits == other.logits);
    }
    const Profile profile = executable->take_profile();
    const int64_t whole =
        static_cast<int64_t>(std::count_if(profile.steps.begin(), profile.steps.end(),
                                           [](const StepRecord& step) { return !step.cancelled; }));
    CHECK_EQ(summarize(profile, Phase::decode).steps, whole);
    for (const StepRecord& step : profile.steps) {
      for (int thread = 0; thread < threads; ++thread) {
        for (size_t i = 0; i < step.calls.size(); ++i) {
          const CallTimes& times = step.time(thread, i);
          CHECK(times.begin_ns >= step.begin_ns && times.begin_ns <= times.done_ns);
          CHECK(times.end_ns <= step.end_ns);
        }
      }
    }
    CHECK(trace_json(profile).size() > 1000);
  }
}

TEST("executable: the bytes and operations of a profile are those of the step") {
  const Graph graph = Graph::parse(kGraph);
  CompileOptions options;
  options.max_tokens = 64;
  options.kv_dtype = DType::f32;
  const auto executable =
      compile(graph, random_weights(graph), std::make_shared<ThreadPool>(1), options);
  Steps steps(*executable);
  executable->start_profile(2);
  steps.run(*executable, Phase::decode, 1, 21);
  steps.run(*executable, Phase::decode, 1, 22);
  const PhaseSummary sum = summarize(executable->take_profile(), Phase::decode);
  CHECK_EQ(sum.steps, 2);
  CHECK_EQ(sum.tokens, 4);
  int64_t kernels_ns = 0;
  int found = 0;
  for (const KernelSummary& row : sum.kernels) {
    kernels_ns += row.time_ns;
    CHECK(row.wait_ns <= row.threads_ns);
    if (row.info.what == "down 96x64 f32") {
      ++found;
      CHECK_EQ(row.info.arithmetic, "f32");
      CHECK_EQ(row.calls, 2);
      CHECK_EQ(row.ops, 2 * (2 * 2 * 96 * 64));
      // Two rows of 96 inputs padded to 128, weights padded alike, outputs, the fused residual.
      CHECK_EQ(row.bytes, 2 * (2 * 128 * 4 + 64 * 128 * 4 + 2 * 64 * 4 + 2 * 64 * 4));
    }
    if (row.info.kernel.starts_with("attention")) {
      ++found;
      CHECK_EQ(row.info.what, "4/2x16");
      CHECK_EQ(row.ops, 2 * 4 * 64 * (21 + 22));  // q.k and p.v of 64 dims for each key
    }
  }
  CHECK_EQ(found, 2);
  CHECK_EQ(kernels_ns + sum.host_ns, sum.step_ns);
  CHECK_EQ(sum.between_count, 1);
}

TEST("executable: compile refuses what cannot run") {
  const Graph graph = Graph::parse(kGraph);
  const auto weights = random_weights(graph);
  const auto pool = std::make_shared<ThreadPool>(1);
  CHECK_THROWS(InvalidArgument, "weights", compile(graph, nullptr, pool));
  CHECK_THROWS(InvalidArgument, "pool", compile(graph, weights, nullptr));
  CompileOptions elsewhere;
  elsewhere.device = {DeviceKind::cpu, 1};
  CHECK_THROWS(InvalidArgument, "[compile] device: expected \"cpu\", got \"cpu:1\"",
               compile(graph, weights, pool, elsewhere));
  Graph other = graph;
  other.outputs.push_back(other.outputs[0]);
  CHECK_THROWS(InvalidArgument, "each once", compile(other, weights, pool));
  other.outputs = {other.nodes[0].outputs[0], graph.outputs[0]};
  CHECK_THROWS(InvalidArgument, "expected f32[R, vocab]", compile(other, weights, pool));
  other = graph;
  other.metadata.clear();
  CHECK_THROWS(InvalidArgument, "max_seq_len", compile(other, weights, pool));
  other = graph;
  other.values[static_cast<size_t>(other.inputs[0])].name = "tokens";
  CHECK_THROWS(InvalidArgument, "expected token_ids, positions, logit_rows, or floats",
               compile(other, weights, pool));
  // Ids that run() has not checked against the table that they index.
  for (const auto& [from, to] : {std::pair{"embedding(%token_ids", "embedding(%positions"},
                                 std::pair{"(%y, %logit_rows", "(%y, %token_ids"},
                                 std::pair{"rope_table(%positions", "rope_table(%token_ids"}}) {
    std::string text = kGraph;
    text.replace(text.find(from), std::string(from).size(), to);
    if (text.find("%y, %token_ids") != std::string::npos) {  // rows of one kind to the end
      text.replace(text.find("%r : f32[R"), 10, "%r : f32[T");
      text.replace(text.find("%logits : f32[R"), 15, "%logits : f32[T");
    }
    CHECK_THROWS(InvalidArgument, "expected it to read",
                 compile(Graph::parse(text), weights, pool));
  }
  CompileOptions options;
  options.kv_dtype = DType::i32;
  CHECK_THROWS(Unsupported, "kv_dtype", compile(graph, weights, pool, options));
}

TEST("executable: a graph whose numbers were changed compiles or throws, and then runs") {
  const std::string text = kGraph;
  const auto pool = std::make_shared<ThreadPool>(1);
  CompileOptions options;
  options.max_tokens = 8;
  options.max_sequences = 2;
  options.max_rows = 2;
  options.max_seq_len = 256;
  options.kv_dtype = DType::f32;
  std::mt19937 rng(29);
  int ran = 0;
  for (int round = 0; round < 1500; ++round) {
    std::string changed = text;
    for (int change = static_cast<int>(rng() % 3); change >= 0; --change) {
      const size_t place = text.find_first_of("0123456789", rng() % text.size());
      if (place != std::string::npos) changed[place] = static_cast<char>('0' + rng() % 10);
    }
    try {
      const Graph graph = Graph::parse(changed);
      graph.verify();
      const auto executable = compile(graph, random_weights(graph), pool, options);
      Steps steps(*executable);
      steps.run(*executable, Phase::prefill, 4, 4);
      steps.run(*executable, Phase::decode, 1, 5);
      ++ran;
    } catch (const Error&) {
      continue;
    }
  }
  CHECK(ran > 100);
}

CHECK_MAIN()
