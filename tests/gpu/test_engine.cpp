// A whole model on the GPU: its logits against the CPU's in float32, its bits whatever the batch.
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>

#include "cpp/arrays.h"
#include "cpp/check.h"
#include "effinfer/compiler.h"
#include "effinfer/engine.h"
#include "effinfer/error.h"
#include "effinfer/ops/elementwise.h"
#include "gpu/device_arrays.h"
#include "gpu/hopper_device.h"
#include "gpu/mutations.h"
#include "gpu/paths.h"
#include "gpu/replays.h"
#include "gpu/tiny_model.h"
#include "graph/op_specs.h"

using namespace effinfer;

namespace {

EngineOptions options_on(Device device, Precision precision) {
  EngineOptions options;
  options.device = device;
  options.precision = precision;
  options.max_batch_tokens = 64;
  options.max_sequences = 4;
  options.num_pages = 24;
  return options;
}

}  // namespace

TEST("logits are the CPU's, in both precisions") {
  const std::vector<int32_t> tokens = tokens_of(90, 5);
  const char* const types[] = {"q4_0", "q8_0", "bf16"};
  for (const char* type : of_one_path(types)) {
    const std::shared_ptr<const Model> model = model_of(type);
    Engine reference(model, options_on({}, Precision::f32));
    const std::vector<float> expected = logits_of(reference, tokens, Phase::prefill);
    for (const Precision precision : {Precision::fast, Precision::f32}) {
      Engine engine(model, options_on(kGpu, precision));
      const std::vector<float> got = logits_of(engine, tokens, Phase::prefill);
      // Roundings to bfloat16 of some dozen tensors, or those of float32.
      CHECK(distance(got, expected) < (precision == Precision::f32 ? 1e-5 : 2e-2));
      CHECK(distance(got, expected) > 0);
      engine.kv_cache().check_integrity();
    }
  }
}

TEST("a prompt and single tokens have the same bits, if asked to") {
  needs_every_value();
  const std::shared_ptr<const Model> model = model_of("q4_0");
  const std::vector<int32_t> tokens = tokens_of(70, 6);
  EngineOptions options = options_on(kGpu, Precision::fast);
  Engine fast(model, options);
  options.deterministic = true;
  Engine engine(model, options);
  const std::vector<float> decoded = logits_of(engine, tokens, Phase::decode);
  CHECK(logits_of(engine, tokens, Phase::prefill) == decoded);
  CHECK(logits_of(fast, tokens, Phase::decode) == decoded);
  const double rounded = distance(logits_of(fast, tokens, Phase::prefill), decoded);
  CHECK(rounded > 0 && rounded < 2e-2);
}

TEST("a prompt's bits do not depend on the chunks in which it comes") {
  needs_every_value();
  const std::shared_ptr<const Model> model = model_of("q4_0");
  const std::vector<int32_t> tokens = tokens_of(90, 6);
  EngineOptions options = options_on(kGpu, Precision::fast);
  Engine whole(model, options);
  options.max_batch_tokens = 13;
  Engine chunks(model, options);
  CHECK(logits_of(whole, tokens, Phase::prefill) == logits_of(chunks, tokens, Phase::prefill));
}

TEST("on Hopper prompts have attention of their own, whatever the chunks") {
  const OnHopper machine;
  const std::shared_ptr<const Model> model = model_of("q8_0", {}, {}, true);
  const std::vector<int32_t> tokens = tokens_of(90, 6);
  Engine reference(model, options_on({}, Precision::f32));
  const std::vector<float> expected = logits_of(reference, tokens, Phase::prefill);
  EngineOptions options = options_on(kGpu, Precision::fast);
  Engine engine(model, options);
  CHECK(engine.executable().explain().find("attention.cuda.wgmma") != std::string::npos);
  const std::vector<float> got = logits_of(engine, tokens, Phase::prefill);
  CHECK(distance(got, expected) < 2e-2);
  options.max_batch_tokens = 13;
  Engine chunks(model, options);
  CHECK(logits_of(chunks, tokens, Phase::prefill) == got);
  options.deterministic = true;
  Engine exact(model, options);
  CHECK(exact.executable().explain().find("attention.cuda.wgmma") == std::string::npos);
  CHECK(logits_of(exact, tokens, Phase::prefill) == logits_of(exact, tokens, Phase::decode));
}

// Of a prompt whose attention copies pages that were re-arranged before, or does not.
std::vector<float> prompt_logits(const std::shared_ptr<const Model>& model,
                                 const EngineOptions& options, const std::vector<int32_t>& tokens,
                                 bool arranged) {
  Engine engine(model, options);
  std::vector<float> logits;
  expect_reached([&] { logits = logits_of(engine, tokens, Phase::prefill); }, "wgmma_attention",
                 "barrier_arrive_expect", arranged);
  return logits;
}

TEST("on Hopper pages that many tiles read are re-arranged, which changes no bit") {
  const OnHopper machine;
  const std::shared_ptr<const Model> model = model_of("q8_0", {}, {}, true);
  const std::vector<int32_t> tokens = tokens_of(1100, 7);
  EngineOptions options = options_on(kGpu, Precision::fast);
  options.max_batch_tokens = 1100;
  const std::vector<float> arranged = prompt_logits(model, options, tokens, true);
  options.max_batch_tokens = 400;
  CHECK(prompt_logits(model, options, tokens, false) == arranged);
  Engine reference(model, options_on({}, Precision::f32));
  CHECK(distance(arranged, logits_of(reference, tokens, Phase::prefill)) < 2e-2);
}

TEST("sparse prefill visits what it does on the CPU") {
  needs_every_value();
  const std::vector<int32_t> tokens = tokens_of(400, 12);
  // Scores of columns are so near each other that roundings of activations would decide, and hashes
  // turn with them.
  const auto is_near = [](const IndexText& index) {
    return index.op == "column_index" || index.op == "bucket_index";
  };
  const auto run = [&](Device device, const IndexText& index) {
    const bool exact = is_near(index);
    EngineOptions options = options_on(device, exact ? Precision::f32 : Precision::fast);
    options.kv_dtype = DType::bf16;
    options.max_batch_tokens = 192;
    Engine engine(model_of("q8_0", index), options);
    return logits_of(engine, tokens, Phase::prefill);
  };
  const std::vector<float> dense = run(kGpu, {});
  for (const IndexText& index :
       {IndexText{"block_index", "stride = 8, pages = 2, sink_tokens = 4"},
        IndexText{"block_index", "queries = \"probe\", keys = 64"},
        IndexText{"strided_index", "stride = 3"},
        IndexText{"bucket_index", "keys = 64, samples = 40, seed = 3"},
        IndexText{"block_index", "mass = 0.6, local_tokens = 40"},
        IndexText{"column_index", "columns = 40, slashes = 2, sink_tokens = 4"},
        IndexText{"column_index", "column_mass = 0.2, slash_mass = 0.01, row_stride = 3"}}) {
    const std::vector<float> expected = run({}, index);
    const std::vector<float> got = run(kGpu, index);
    // Here and there a key is visited in place of one that is hardly behind it, or drawn as another
    // one came before it.
    CHECK(distance(got, expected) < (is_near(index) ? 8e-2 : 3e-2));
    CHECK(distance(got, dense) > 5 * distance(got, expected));
  }
}

// Tokens and their log-probabilities.
std::vector<SampledToken> generated(Engine& engine, const std::vector<int32_t>& prompt, int count) {
  SamplingParams params;
  params.max_tokens = count;
  params.temperature = 0.0f;
  params.logprobs = 0;
  engine.add(prompt, params);
  std::vector<SampledToken> tokens;
  while (engine.has_work()) {
    for (const StepOutput& output : engine.step()) {
      CHECK_EQ(output.error, "");
      tokens.insert(tokens.end(), output.tokens.begin(), output.tokens.end());
    }
  }
  return tokens;
}

TEST("generated tokens visit the pages that they do on the CPU") {
  const std::vector<int32_t> prompt = tokens_of(318, 12);
  // The prompt's whole pages, of which nothing is chosen yet: all models have these but for
  // windows and the one whose prompts visit what generated tokens do.
  std::vector<std::byte> pages;
  const auto run = [&](Device device, const IndexText& index) {
    Engine engine(model_of("q8_0", index), options_on(device, Precision::f32));
    KvCache& cache = engine.kv_cache();
    const bool shares = device == kGpu && index.window_left < 0 && index.op != "strided_index";
    if (shares && !pages.empty()) cache.release(cache.import_(pages));
    const std::vector<SampledToken> tokens = generated(engine, prompt, 6);  // over a page's end
    if (shares && pages.empty()) {
      int32_t known = 0;
      pages = cache.export_(cache.create(prompt, &known));
      CHECK_EQ(known, 256);
    }
    return tokens;
  };
  const std::vector<SampledToken> dense = run(kGpu, {});
  for (const IndexText& index :
       {IndexText{"page_index", "keys = 64"},
        IndexText{"page_index", "share = 0.3, sink_tokens = 64, min_tokens = 321"},
        IndexText{"page_index", "unit = 16, keys = 64, vote = \"sum\""},
        IndexText{"page_index", "score = \"means\", keys = 64"},
        IndexText{"page_index", "score = \"means\", unit = 16, keys = 64"},
        IndexText{"page_index", "keys = 64, window_left = 250", 250},
        IndexText{"page_index", "score = \"means\", keys = 64, window_left = 250", 250},
        IndexText{"key_index", "keys = 40, window_left = 250", 250},
        IndexText{"key_index", "keys = 40"},
        IndexText{"key_index", "channels = [1, 4, 5, 12, 0, 2, 3, 13], keys = 40"},
        IndexText{"strided_index", "stride = 3"},
        IndexText{"hash_index", "bits = 4, tables = 16, seed = 3"}}) {
    const std::vector<SampledToken> expected = run({}, index);
    const std::vector<SampledToken> got = run(kGpu, index);
    CHECK_EQ(got.size(), size_t{6});
    double most = 0.0;
    for (size_t i = 0; i < got.size(); ++i) {
      CHECK_EQ(got[i].token, expected[i].token);
      CHECK(std::abs(got[i].logprob - expected[i].logprob) < 1e-4);
      most = std::max(most, double{std::abs(got[i].logprob - dense[i].logprob)});
    }
    CHECK(most > 1e-2);
  }
}

TEST("what generated tokens visit does not depend on the batch, the prefix cache or replays") {
  needs_every_value();
  const std::shared_ptr<const Model> model =
      model_of("q8_0", {"page_index", "keys = 64, sink_tokens = 64"});
  SamplingParams params;
  params.max_tokens = 10;  // over the end of a page
  params.temperature = 0.0f;
  const std::vector<std::vector<int32_t>> prompts = {tokens_of(318, 7), tokens_of(250, 7)};
  std::vector<std::vector<int32_t>> alone;
  for (const std::vector<int32_t>& prompt : prompts) {
    Engine engine(model, options_on(kGpu, Precision::fast));
    const Replays replays;
    alone.push_back(engine.generate(prompt, params));
    replays.expect_at_least(6);
  }
  Engine engine(model, options_on(kGpu, Precision::fast));
  for (int round = 0; round < 2; ++round) {  // the second finds the first one's pages
    std::map<RequestId, size_t> requests;
    for (size_t i = 0; i < prompts.size(); ++i) requests[engine.add(prompts[i], params)] = i;
    std::vector<std::vector<int32_t>> together(prompts.size());
    while (engine.has_work()) {
      for (const StepOutput& output : engine.step()) {
        for (const SampledToken& token : output.tokens) {
          together[requests.at(output.request)].push_back(token.token);
        }
      }
    }
    CHECK(together == alone);
    engine.kv_cache().check_integrity();
  }
}

TEST("tokens do not depend on the batch, the prefix cache or the order of threads") {
  const std::shared_ptr<const Model> model = model_of("q8_0");
  SamplingParams params;
  params.max_tokens = 12;
  std::map<int, std::vector<int32_t>> alone;
  for (int i = 0; i < 3; ++i) {
    Engine engine(model, options_on(kGpu, Precision::fast));
    params.temperature = i == 0 ? 0.0f : 0.9f;
    params.seed = static_cast<uint64_t>(i);
    alone[i] = engine.generate(tokens_of(67 + i, 7), params);
  }
  Engine engine(model, options_on(kGpu, Precision::fast));
  for (int round = 0; round < 2; ++round) {  // the second finds the first one's pages
    std::map<RequestId, int> requests;
    for (int i = 0; i < 3; ++i) {
      params.temperature = i == 0 ? 0.0f : 0.9f;
      params.seed = static_cast<uint64_t>(i);
      requests[engine.add(tokens_of(67 + i, 7), params)] = i;
    }
    std::map<int, std::vector<int32_t>> together = texts_of(engine, requests);
    for (int i = 0; i < 3; ++i) CHECK(together[i] == alone[i]);
  }
}

TEST("the highest logits give the tokens that all logits give") {
  needs_every_value();
  const std::shared_ptr<const Model> model = model_of("q8_0");
  Engine engine(model, options_on(kGpu, Precision::fast));
  CHECK_EQ(engine.executable().max_top(), 64);
  for (const float temperature : {0.0f, 0.9f}) {
    SamplingParams params;
    params.max_tokens = 10;
    params.temperature = temperature;
    params.top_k = 7;
    params.seed = 4;
    const std::vector<int32_t> from_top = engine.generate(tokens_of(20, 9), params);
    params.logprobs = 0;  // which needs all of them
    CHECK(engine.generate(tokens_of(20, 9), params) == from_top);
  }
}

TEST("tokens that the device draws are those of the host's sampler") {
  const std::shared_ptr<const Model> model = model_of("q8_0");
  Engine engine(model, options_on(kGpu, Precision::fast));
  CHECK(engine.executable().draws_tokens());
  for (const float top_p : {1.0f, 0.8f}) {
    SamplingParams params;
    params.max_tokens = 10;
    params.top_k = top_p < 1.0f ? 70 : 0;  // more than come to the host
    params.top_p = top_p;
    params.min_p = 0.01f;
    params.seed = 9;
    const std::vector<int32_t> drawn = engine.generate(tokens_of(20, 9), params);
    params.logprobs = 0;  // which needs all logits on the host
    CHECK(engine.generate(tokens_of(20, 9), params) == drawn);
  }
}

TEST("drafts change no token, and pages are closed up behind them") {
  const std::shared_ptr<const Model> model = model_of("q4_0");
  for (const auto& [kv, temperature] :
       {std::pair{DType::bf16, 0.8f}, std::pair{DType::i8, 0.0f}, std::pair{DType::f32, 0.8f}}) {
    SamplingParams params;
    params.max_tokens = 48;
    params.temperature = temperature;
    params.seed = 5;
    EngineOptions options = options_on(kGpu, Precision::fast);
    options.kv_dtype = kv;
    Engine plain(model, options);
    const std::vector<int32_t> expected = plain.generate(tokens_of(60, 8), params);
    // Trees of what tokens led to before, whether they pay or not.
    options.speculation.proposers = {recycling_proposer({.width = 4})};
    options.speculation.controller = fixed_controller(7);
    Engine drafting(model, options);
    const RequestId request = drafting.add(tokens_of(60, 8), params);
    std::vector<int32_t> got;
    while (drafting.has_work()) {
      for (const StepOutput& output : drafting.step()) {
        CHECK_EQ(output.error, "");
        for (const SampledToken& token : output.tokens) got.push_back(token.token);
      }
      drafting.kv_cache().check_integrity();
    }
    CHECK(got == expected);
    CHECK(drafting.metrics(request).speculation.accepted > 0);
  }
}

TEST("decoding replays recordings, which serve batches of other sizes and contexts") {
  needs_every_value();
  const std::shared_ptr<const Model> model = model_of("q8_0");
  SamplingParams params;
  params.max_tokens = 40;
  const auto prompt = [](int i) { return tokens_of(240 + 9 * i, 11); };
  std::vector<std::vector<int32_t>> alone;
  EngineOptions options = options_on(kGpu, Precision::fast);
  options.num_pages = 32;
  for (int i = 0; i < 3; ++i) {
    Engine engine(model, options);
    const Replays replays;
    alone.push_back(engine.generate(prompt(i), params));
    // One key a power of two of the items of attention, which grow by a chunk of 256 tokens.
    replays.expect_at_least(36);
  }
  Engine engine(model, options);
  const Replays replays;
  std::map<RequestId, size_t> requests;
  for (int i = 0; i < 3; ++i) {
    params.max_tokens = 40 - 5 * i;  // the batch shrinks
    requests[engine.add(prompt(i), params)] = static_cast<size_t>(i);
  }
  std::vector<std::vector<int32_t>> together(3);
  while (engine.has_work()) {
    for (const StepOutput& output : engine.step()) {
      for (const SampledToken& token : output.tokens) {
        together[requests.at(output.request)].push_back(token.token);
      }
    }
  }
  engine.kv_cache().check_integrity();
  replays.expect_at_least(25);
  for (size_t i = 0; i < 3; ++i) {
    alone[i].resize(together[i].size());
    CHECK_EQ(together[i].size(), 40 - 5 * i);
    CHECK(together[i] == alone[i]);
  }
}

TEST("texts over encoded pages depend on no batch, no prefix cache, no pages and no replays") {
  needs_every_value();
  const std::shared_ptr<const Model> model = model_of("q8_0");
  SamplingParams params;
  params.max_tokens = 40;
  const auto prompt = [](int i) { return tokens_of(200 + 31 * i, 11); };
  EngineOptions options = options_on(kGpu, Precision::fast);
  options.kv_coding = {.bits = 2, .residual = 20};
  std::map<int, std::vector<int32_t>> alone;
  for (int i = 0; i < 3; ++i) {
    Engine engine(model, options);
    const Replays replays;
    alone[i] = engine.generate(prompt(i), params);
    replays.expect_at_least(30);  // most numbers of coded pages are a power of two
  }
  options.kv_coding = {};
  CHECK(Engine(model, options).generate(prompt(0), params) != alone[0]);
  options.kv_coding = {.bits = 2, .residual = 20};
  options.num_pages = 10;  // prompts take 12
  Engine engine(model, options);
  for (int round = 0; round < 2; ++round) {
    std::map<RequestId, int> requests;
    for (int i = 0; i < 3; ++i) requests[engine.add(prompt(i), params)] = i;
    CHECK(texts_of(engine, requests) == alone);
  }
}

TEST("every operator of graphs runs on a GPU") {
  const std::vector<int32_t> tokens = tokens_of(70, 4);
  // Those of BitNet and Gemma are in tests/models/test_families_on_gpu.py, of techniques in
  // tests/techniques/test_eviction_on_gpu.py and test_on_gpu.py.
  std::set<std::string> seen = {"ternary_linear", "add_rms_norm", "attention_mass", "copy_index",
                                "history_index"};
  const auto run = [&](const std::string& type, const IndexText& index, const UnaryText& gate) {
    const std::shared_ptr<const Model> model = model_of(type, index, gate);
    EngineOptions options = options_on(kGpu, Precision::f32);
    options.max_batch_tokens = 70;
    options.kv_dtype = DType::bf16;
    Engine engine(model, options);
    const std::vector<float> got = logits_of(engine, tokens, Phase::prefill);
    options.device = {};
    Engine host(model, options);
    // Queries and weights of attention are rounded to bfloat16 on GPUs.
    CHECK(distance(got, logits_of(host, tokens, Phase::prefill)) < 1e-2);
    for (const Graph* graph : {&model->graph, &engine.executable().graph()}) {
      for (const Node& node : graph->nodes) seen.insert(node.op);
    }
  };
  ops::for_unary_ops([&](ops::UnaryOp op) {
    const std::string parameter(ops::names(op).parameter);
    run("f32", {},
        {std::string(ops::name(op)), parameter.empty() ? "" : " {" + parameter + " = 1.5}"});
  });
  run("q4_0", {"block_index", "pages = 2"}, {});
  run("q4_0", {"column_index", "columns = 70"}, {});
  run("q4_0", {"page_index", "keys = 128"}, {});
  run("q4_0", {"key_index", "keys = 128"}, {});
  run("q4_0", {"strided_index", "stride = 2"}, {});
  run("q4_0", {"hash_index", "tables = 8"}, {});
  run("q4_0", {"bucket_index", "samples = 64"}, {});
  for (const graph::OpSpec& op : graph::all_ops()) {
    if (!seen.contains(std::string(op.name))) check::fail(__FILE__, __LINE__, std::string(op.name));
  }
}

TEST("a profile has a record of each call of a step, timed on the device") {
  EngineOptions options = options_on(kGpu, Precision::fast);
  options.prefix_cache = false;
  Engine engine(model_of("q8_0"), options);
  SamplingParams params;
  params.max_tokens = 8;
  params.temperature = 0.0f;
  const std::vector<int32_t> expected = engine.generate(tokens_of(90, 6), params);
  const Replays replays;
  engine.start_profile(7);  // two steps of the prompt, five tokens that follow the first one
  CHECK(engine.generate(tokens_of(90, 6), params) == expected);
  const Profile profile = engine.take_profile();
  CHECK_EQ(profile.device, "cuda:0");
  CHECK_EQ(profile.threads, 1);
  CHECK_EQ(static_cast<int>(profile.steps.size()), 7);
  CHECK_EQ(profile.dropped_steps, 2);
  int64_t tokens = 0;
  for (const StepRecord& step : profile.steps) {
    tokens += step.tokens;
    CHECK(step.begin_ns < step.end_ns);
    CHECK(step.times.size() == step.calls.size());
    int64_t last = step.begin_ns;
    int64_t bytes = 0;
    bool has_attention = false;
    for (size_t i = 0; i < step.calls.size(); ++i) {
      const CallTimes& times = step.time(0, i);
      CHECK(last <= times.begin_ns && times.begin_ns < times.done_ns);
      CHECK(times.done_ns == times.end_ns && times.end_ns <= step.end_ns);
      last = times.end_ns;
      const CallInfo& info = profile.calls[static_cast<size_t>(step.calls[i].info)];
      if (info.kernel.find(".cuda") == std::string::npos)
        check::fail(__FILE__, __LINE__, info.kernel);
      bytes += step.calls[i].bytes;
      has_attention |= info.kernel == "attention.cuda" && step.calls[i].ops > 0;
    }
    CHECK(has_attention && bytes > 0);
    const auto last_info = static_cast<size_t>(step.calls.back().info);
    if (step.phase == Phase::decode) CHECK_EQ(profile.calls[last_info].what, "highest logits");
  }
  CHECK_EQ(tokens, 90 + 5);
  // Only what came after the recorded steps was replayed.
  replays.expect_at_most(2);
  CHECK(summarize(profile, Phase::decode).kernels.size() > 5);
  CHECK(trace_json(profile).find("\"name\":\"cuda:0\"") != std::string::npos);
}

CHECK_MAIN()
