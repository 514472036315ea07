// A whole model on the GPU: its logits against the CPU's in float32, its bits whatever the batch.
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <string>

#include "cpp/arrays.h"
#include "cpp/check.h"
#include "effinfer/compiler.h"
#include "effinfer/engine.h"
#include "effinfer/error.h"
#include "effinfer/gguf.h"
#include "effinfer/quantize.h"
#include "gpu/device_arrays.h"
#include "gpu/hopper_device.h"
#include "gpu/host_backend.h"

using namespace effinfer;

namespace {

constexpr int kLayers = 2;

// `index`: the attributes of a block_index that attention follows, or nothing.
std::string layer_text(int layer, const std::string& type, const std::string& index) {
  const std::string n = std::to_string(layer);
  const std::string in = layer == 0 ? "%x" : "%m" + std::to_string(layer - 1);
  return "  weight %na" + n + " = \"na" + n + "\" : f32[64]\n  weight %nm" + n + " = \"nm" + n +
         "\" : f32[64]\n  weight %q" + n + " = \"q" + n + "\" : " + type + "[64, 64]\n  weight %k" +
         n + " = \"k" + n + "\" : " + type + "[32, 64]\n  weight %v" + n + " = \"v" + n +
         "\" : " + type + "[32, 64]\n  weight %p" + n + " = \"p" + n + "\" : " + type +
         "[64, 64]\n  weight %g" + n + " = \"g" + n + "\" : " + type + "[96, 64]\n  weight %u" + n +
         " = \"u" + n + "\" : " + type + "[96, 64]\n  weight %d" + n + " = \"d" + n +
         "\" : " + type + "[64, 96]\n" + "  %a" + n + " : f32[T, 64] = rms_norm(" + in + ", %na" +
         n + ") {eps = 1e-06}\n" + "  %qa" + n + " : f32[T, 64] = linear(%a" + n + ", %q" + n +
         ")\n" + "  %ka" + n + " : f32[T, 32] = linear(%a" + n + ", %k" + n + ")\n" + "  %va" + n +
         " : f32[T, 32] = linear(%a" + n + ", %v" + n + ")\n" + "  %qr" + n +
         " : f32[T, 64] = rope(%qa" + n + ", %t) {heads = 4, head_dim = 16}\n" + "  %kr" + n +
         " : f32[T, 32] = rope(%ka" + n + ", %t) {heads = 2, head_dim = 16}\n" + "  %kv" + n +
         " : kv[" + n + ", 2, 16] = kv_append(%kr" + n + ", %va" + n + ") {layer = " + n +
         ", heads = 2, head_dim = 16}\n" +
         (index.empty()
              ? ""
              : "  %i" + n + " : visits[" + n + ", 2] = block_index(%qr" + n + ", %kv" + n +
                    ") {layer = " + n +
                    ", heads = 4, kv_heads = 2, head_dim = 16, sm_scale = 0.25, " + index + "}\n") +
         "  %o" + n + " : f32[T, 64] = attention(%qr" + n + ", %kv" + n +
         (index.empty() ? "" : ", %i" + n) + ") {layer = " + n +
         ", heads = 4, kv_heads = 2, head_dim = 16, sm_scale = 0.25}\n" + "  %op" + n +
         " : f32[T, 64] = linear(%o" + n + ", %p" + n + ")\n" + "  %y" + n +
         " : f32[T, 64] = add(%op" + n + ", " + in + ")\n" + "  %b" + n +
         " : f32[T, 64] = rms_norm(%y" + n + ", %nm" + n + ") {eps = 1e-06}\n" + "  %gb" + n +
         " : f32[T, 96] = linear(%b" + n + ", %g" + n + ")\n" + "  %ub" + n +
         " : f32[T, 96] = linear(%b" + n + ", %u" + n + ")\n" + "  %gs" + n +
         " : f32[T, 96] = silu(%gb" + n + ")\n" + "  %gu" + n + " : f32[T, 96] = mul(%gs" + n +
         ", %ub" + n + ")\n" + "  %db" + n + " : f32[T, 64] = linear(%gu" + n + ", %d" + n + ")\n" +
         "  %m" + n + " : f32[T, 64] = add(%db" + n + ", %y" + n + ")\n";
}

void replace_all(std::string& text, std::string_view what, std::string_view with) {
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at)) {
    text.replace(at, what.size(), with);
    at += with.size();
  }
}

// Llama's blocks, small. `wide`: with one head of 64 dims.
Graph graph_of(const std::string& type, const std::string& index = "", bool wide = false) {
  std::string text =
      "graph tiny {\n  meta context_length = 512\n  input %token_ids : i32[T]\n"
      "  input %positions : i32[T]\n  input %logit_rows : i32[R]\n"
      "  weight %embed = \"embed\" : " +
      type +
      "[80, 64]\n  weight %n = \"n\" : f32[64]\n"
      "  %x : f32[T, 64] = embedding(%token_ids, %embed)\n"
      "  %t : f32[T, 16] = rope_table(%positions) {dims = 16, theta = 10000.0}\n";
  for (int layer = 0; layer < kLayers; ++layer) text += layer_text(layer, type, index);
  text += "  %z : f32[T, 64] = rms_norm(%m" + std::to_string(kLayers - 1) +
          ", %n) {eps = 1e-06}\n"
          "  %r : f32[R, 64] = select_rows(%z, %logit_rows)\n"
          "  %logits : f32[R, 80] = linear(%r, %embed)\n  return %logits\n}\n";
  if (wide) {
    replace_all(text, "heads = 4", "heads = 1");
    replace_all(text, "heads = 2", "heads = 1");
    replace_all(text, "dim = 16", "dim = 64");
    replace_all(text, "dims = 16", "dims = 64");
    replace_all(text, ", 2, 16]", ", 1, 64]");
    replace_all(text, "[32, 64]", "[64, 64]");
    replace_all(text, "[T, 32]", "[T, 64]");
    replace_all(text, "[T, 16]", "[T, 64]");
  }
  return Graph::parse(text);
}

std::shared_ptr<const Model> model_of(const std::string& type, const std::string& index = "",
                                      bool wide = false) {
  const Graph graph = graph_of(type, index, wide);
  auto weights = std::make_shared<MemoryWeights>();
  std::mt19937 random(3);
  ThreadPool pool(1);
  for (const ValueId id : graph.weights) {
    const Value& value = graph.value(id);
    TensorView plain;
    for (const Dim& dim : value.shape) plain.dims.push_back(dim.value);
    std::vector<float> numbers = normals(plain.dims.num_elements(), random);
    const float scale = value.shape.size() == 1 ? 0.1f : 0.15f;
    for (float& x : numbers) x = x * scale + (value.shape.size() == 1 ? 1.0f : 0.0f);
    plain.data = numbers.data();
    TensorView stored = plain;
    stored.dtype = value.dtype;
    auto bytes = std::make_shared<std::vector<std::byte>>(stored.num_bytes());
    stored.data = bytes->data();
    quantize(plain, value.dtype, pool, bytes->data());
    weights->add(value.weight_name, stored, bytes);
  }
  return std::make_shared<Model>(Model{graph, weights});
}

EngineOptions options_on(Device device, Precision precision) {
  EngineOptions options;
  options.device = device;
  options.precision = precision;
  options.max_batch_tokens = 64;
  options.max_sequences = 4;
  options.num_pages = 24;
  return options;
}

std::vector<int32_t> tokens_of(int count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 80);
  return tokens;
}

std::vector<float> logits_of(Engine& engine, const std::vector<int32_t>& tokens, Phase phase) {
  std::vector<float> logits(tokens.size() * static_cast<size_t>(engine.vocab_size()));
  engine.logits(tokens, logits, phase);
  return logits;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(double{a[i]} - b[i], 2);
    norm += std::pow(double{b[i]}, 2);
  }
  return std::sqrt(difference / norm);
}

}  // namespace

TEST("logits are the CPU's, in both precisions") {
  const std::vector<int32_t> tokens = tokens_of(90, 5);
  for (const char* type : {"q4_0", "q8_0", "bf16"}) {
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
  const std::shared_ptr<const Model> model = model_of("q8_0", "", true);
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

TEST("sparse prefill visits what it does on the CPU") {
  const std::vector<int32_t> tokens = tokens_of(400, 12);
  const auto run = [&](Device device, const std::string& index) {
    EngineOptions options = options_on(device, Precision::fast);
    options.max_batch_tokens = 192;
    Engine engine(model_of("q8_0", index), options);
    return logits_of(engine, tokens, Phase::prefill);
  };
  const std::vector<float> dense = run(kGpu, "");
  for (const char* index :
       {"stride = 8, pages = 2, sink_tokens = 4", "mass = 0.6, local_tokens = 40"}) {
    const std::vector<float> expected = run({}, index);
    const std::vector<float> got = run(kGpu, index);
    CHECK(distance(got, expected) < 3e-2);
    CHECK(distance(got, dense) > 2 * distance(got, expected));
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
    std::map<int, std::vector<int32_t>> together;
    while (engine.has_work()) {
      for (const StepOutput& output : engine.step()) {
        CHECK_EQ(output.error, "");
        for (const SampledToken& token : output.tokens) {
          together[requests.at(output.request)].push_back(token.token);
        }
      }
      engine.kv_cache().check_integrity();
    }
    for (int i = 0; i < 3; ++i) CHECK(together[i] == alone[i]);
  }
}

TEST("the highest logits give the tokens that all logits give") {
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
  for (const DType kv : {DType::bf16, DType::i8, DType::f32}) {
    for (const float temperature : {0.0f, 0.8f}) {
      SamplingParams params;
      params.max_tokens = 60;
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
}

TEST("decoding replays recordings, which serve batches of other sizes and contexts") {
  const std::shared_ptr<const Model> model = model_of("q8_0");
  SamplingParams params;
  params.max_tokens = 40;
  const auto prompt = [](int i) { return tokens_of(240 + 9 * i, 11); };
  std::vector<std::vector<int32_t>> alone;
  EngineOptions options = options_on(kGpu, Precision::fast);
  options.num_pages = 32;
  for (int i = 0; i < 3; ++i) {
    Engine engine(model, options);
    const int64_t before = cuda::host::num_replays();
    alone.push_back(engine.generate(prompt(i), params));
    // One key a power of two of the items of attention, which grow by a chunk of 256 tokens.
    CHECK(cuda::host::num_replays() - before >= 36);
  }
  Engine engine(model, options);
  const int64_t before = cuda::host::num_replays();
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
  CHECK(cuda::host::num_replays() - before >= 25);
  for (size_t i = 0; i < 3; ++i) {
    alone[i].resize(together[i].size());
    CHECK_EQ(together[i].size(), 40 - 5 * i);
    CHECK(together[i] == alone[i]);
  }
}

TEST("what a GPU cannot do yet is refused by name") {
  Engine engine(model_of("q8_0"), options_on(kGpu, Precision::fast));
  CHECK_THROWS(Unsupported, "cuda:0", engine.start_profile(3));
}

CHECK_MAIN()
