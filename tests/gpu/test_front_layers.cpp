// A model on a GPU and the CPU: as many layers there as its memory holds, and the same texts
// whoever shares their steps.
#include <map>
#include <string>

#include "cpp/check.h"
#include "effinfer/engine.h"
#include "effinfer/error.h"
#include "gpu/device_arrays.h"
#include "gpu/host_backend.h"
#include "gpu/paths.h"
#include "gpu/tiny_model.h"

using namespace effinfer;
using cuda::host::MemoryFacts;
using cuda::host::set_memory;

namespace {

constexpr int kLayers = 4;

std::shared_ptr<const Model> deep_model() {
  static const std::shared_ptr<const Model> model = model_of("q8_0", {}, {}, false, kLayers);
  return model;
}

EngineOptions options_of(Device first, Device others, std::optional<int32_t> count,
                         Precision precision = Precision::fast) {
  EngineOptions options;
  options.device = others;
  options.front = FrontLayers{first, count};
  options.precision = precision;
  options.max_batch_tokens = 64;
  options.max_sequences = 4;
  options.num_pages = 24;
  return options;
}

size_t layers_on_gpu(Engine& engine) {
  const Executable& executable = engine.executable();
  if (executable.front() == nullptr) return executable.options().device == kGpu ? kLayers : 0;
  const size_t front = layers_of(executable.front()->graph()).size();
  return executable.options().device == kGpu ? kLayers - front : front;
}

struct Emulated {
  explicit Emulated(const MemoryFacts& facts) { set_memory(facts); }
  ~Emulated() { set_memory({}); }
};

}  // namespace

TEST("logits are the CPU's, wherever the line is") {
  const std::vector<int32_t> tokens = tokens_of(70, 5);
  EngineOptions options = options_of({}, {}, 0, Precision::f32);
  options.front.reset();
  Engine reference(deep_model(), options);
  std::vector<float> expected = logits_of(reference, tokens, Phase::prefill);
  for (const Precision precision : {Precision::fast, Precision::f32}) {
    for (const auto& [first, others] : {std::pair{kGpu, Device{}}, std::pair{Device{}, kGpu}}) {
      constexpr int32_t kCounts[] = {1, 3};
      for (const int32_t count : of_one_path(kCounts)) {
        Engine engine(deep_model(), options_of(first, others, count, precision));
        const auto on_gpu = static_cast<size_t>(first == kGpu ? count : kLayers - count);
        CHECK_EQ(layers_on_gpu(engine), on_gpu);
        const double rounded = distance(logits_of(engine, tokens, Phase::prefill), expected);
        CHECK(rounded > 0 && rounded < (precision == Precision::f32 ? 1e-5 : 4e-2));
      }
    }
  }
  const std::vector<int32_t> few(tokens.begin(), tokens.begin() + 9);
  expected.resize(few.size() * 80);
  Engine engine(deep_model(), options_of({}, kGpu, 2));
  CHECK(distance(logits_of(engine, few, Phase::decode), expected) < 4e-2);
  engine.kv_cache().check_integrity();
}

TEST("tokens do not depend on the batch, on drafts or on the prefix cache") {
  for (const auto& [first, others] : {std::pair{kGpu, Device{}}, std::pair{Device{}, kGpu}}) {
    EngineOptions options = options_of(first, others, 2);
    SamplingParams params;
    params.max_tokens = 10;
    std::map<int, std::vector<int32_t>> alone;
    const auto ask = [&](int i) {
      params.temperature = i == 0 ? 0.0f : 0.9f;
      params.seed = static_cast<uint64_t>(i);
      return tokens_of(60 + i, 7);
    };
    Engine plain(deep_model(), options);
    for (int i = 0; i < 3; ++i) {
      const std::vector<int32_t> prompt = ask(i);
      alone[i] = plain.generate(prompt, params);
    }
    options.speculation.proposers = {recycling_proposer({.width = 4})};
    options.speculation.controller = fixed_controller(7);
    options.num_pages = 4;  // each begins with one and needs two
    Engine engine(deep_model(), options);
    for (int round = 0; round < 2; ++round) {
      std::map<RequestId, int> requests;
      for (int i = 0; i < 3; ++i) {
        const std::vector<int32_t> prompt = ask(i);
        requests[engine.add(prompt, params)] = i;
      }
      std::map<int, std::vector<int32_t>> together = texts_of(engine, requests);
      for (int i = 0; i < 3; ++i) CHECK(together[i] == alone[i]);
    }
    CHECK(engine.stats().preemptions > 0);
  }
}

TEST("the GPU gets as many layers as its memory holds, and a slower one the rest") {
  const std::vector<int32_t> tokens = tokens_of(20, 5);
  EngineOptions on_cpu = options_of({}, {}, 0, Precision::f32);
  on_cpu.front.reset();
  Engine reference(deep_model(), on_cpu);
  const std::vector<float> expected = logits_of(reference, tokens, Phase::prefill);
  // 200 pages of a layer are 1.6 MB, and its weights next to nothing.
  for (const auto& [first, others] : {std::pair{kGpu, Device{}}, std::pair{Device{}, kGpu}}) {
    for (const size_t megabytes : {1, 5, 12}) {
      if (first == kGpu && megabytes == 12) continue;  // all layers are on one device
      const Emulated emulated({megabytes << 20, 1e12});
      EngineOptions options = options_of(first, others, std::nullopt);
      options.num_pages = 200;
      Engine engine(deep_model(), options);
      const size_t layers = layers_on_gpu(engine);
      CHECK_EQ(layers, static_cast<size_t>(megabytes == 1 ? 0 : megabytes == 5 ? 2 : kLayers));
      CHECK(distance(logits_of(engine, tokens, Phase::prefill), expected) < 4e-2);
      const std::string explained = engine.executable().explain();
      CHECK(explained.starts_with("layer") &&
            explained.find("cuda:0 reads memory at 1000.0 GB/s and cpu at ") != std::string::npos);
    }
  }
  const Emulated emulated({size_t{4} << 30, 1e6});
  Engine engine(deep_model(), options_of(kGpu, {}, std::nullopt));
  CHECK_EQ(layers_on_gpu(engine), size_t{0});
}

TEST("more layers than the memory holds, and wrong devices, are refused") {
  {
    const Emulated emulated({size_t{200} << 10, 1e12});
    CHECK_THROWS(OutOfMemory, "on cuda:0",
                 Engine engine(deep_model(), options_of(kGpu, {}, kLayers - 1)));
    EngineOptions options = options_of({}, kGpu, 1);
    options.num_pages = 400;
    CHECK_THROWS(OutOfMemory, "cuda:0", Engine engine(deep_model(), options));
  }
  CHECK_THROWS(InvalidArgument, "expected another device than cuda:0",
               Engine engine(deep_model(), options_of(kGpu, kGpu, 1)));
  CHECK_THROWS(InvalidArgument, "expected 0..4 layers, got 7",
               Engine engine(deep_model(), options_of(kGpu, {}, 7)));
  CHECK_THROWS(InvalidArgument, "front",
               Engine engine(deep_model(), options_of({DeviceKind::cuda, 5}, {}, 1)));
  Engine engine(deep_model(), options_of(kGpu, {}, 1));
  KvCache other({kLayers, 2, 16, DType::bf16, 4});
  Executable& executable = engine.executable();
  const std::vector<int32_t> ids = {1}, zero = {0}, one = {1}, indptr = {0, 1};
  const Batch batch{Phase::decode, ids, zero, indptr, indptr, zero, one, zero};
  std::vector<float> logits(80);
  CHECK_THROWS(InvalidArgument, "on cuda:0, got 4 layers", executable.run(batch, other, logits));
}

CHECK_MAIN()
