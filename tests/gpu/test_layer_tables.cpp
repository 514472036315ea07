// Layers with page tables of their own, whose keys a plane weighs, on a GPU: the CPU's texts, from
// steps that are replayed.
#include <cmath>
#include <string>

#include "cpp/check.h"
#include "effinfer/engine.h"
#include "effinfer/hooks.h"
#include "gpu/device_arrays.h"
#include "gpu/paths.h"
#include "gpu/replays.h"
#include "gpu/tiny_model.h"

using namespace effinfer;

namespace {

// Behind the prompt layers keep other numbers of keys, which count more or less than once, and
// every few tokens some of them more.
class Dropping final : public StepHook {
 public:
  Triggers triggers() const override {
    Triggers triggers;
    triggers.prompt_end = true;
    triggers.every = 5;
    return triggers;
  }
  std::string_view technique() const override { return "test"; }

  void run(const StepEvent& event, SequenceState& sequence) override {
    if (event.fired.prompt_end) {
      CHECK_EQ(sequence.num_whole_groups(), 2);
      // Whole pages, as tables end at one place of a page.
      sequence.evict(0, 10, 74);
      sequence.evict(1, 20, 148);
    }
    const SlotPlane plane = sequence.plane("counts");
    for (int64_t head = 0; head < plane.num_heads; ++head) {
      for (int64_t slot = 0; slot < 60; ++slot) {
        plane.values[head * plane.stride + slot] += 0.1f * static_cast<float>((head + slot) % 4);
      }
    }
  }
};

std::shared_ptr<const Model> weighing_model() {
  std::shared_ptr<const Model> made = model_of("q8_0");
  Graph graph = made->graph;
  for (Node& node : graph.nodes) {
    if (node.op != "attention") continue;
    node.attributes["weights"] = std::string("counts");
    node.attributes["first_percent"] = std::vector<int64_t>{50, 100, 200, 30};
  }
  graph.metadata["technique.test"] = std::string("test");
  graph.metadata["technique.test.weights"] = std::string("counts");
  graph.metadata["technique.test.layer_groups"] = int64_t{1};
  return std::make_shared<Model>(Model{graph, made->weights});
}

EngineOptions options_on(Device device, std::optional<Device> front = std::nullopt) {
  EngineOptions options;
  options.device = device;
  if (front) options.front = FrontLayers{*front, 1};
  options.precision = Precision::f32;
  options.max_batch_tokens = 64;
  options.max_sequences = 4;
  options.num_pages = 24;
  options.hooks = {std::make_shared<Dropping>()};
  return options;
}

// What follows a prompt of so many tokens.
std::vector<int32_t> text_behind(Engine& engine, int count) {
  SamplingParams params;
  params.max_tokens = 24;
  params.temperature = 0.0f;
  return engine.generate(tokens_of(count, 7), params);
}

}  // namespace

TEST("a plane weighs keys of layers with page tables of their own") {
  needs_every_value();
  const std::shared_ptr<const Model> model = weighing_model();
  for (const int count : {200, 290}) {
    Engine reference(model, options_on({}));
    const std::vector<int32_t> expected = text_behind(reference, count);
    EngineOptions dense = options_on({});
    dense.hooks.clear();
    Engine plain(model_of("q8_0"), dense);
    CHECK(text_behind(plain, count) != expected);
    Engine engine(model, options_on(kGpu));
    const Replays replays;
    CHECK(text_behind(engine, count) == expected);
    replays.expect_at_least(16);
    engine.kv_cache().check_integrity();
  }
}

TEST("layers on two devices have page tables of their own") {
  needs_every_value();
  const std::shared_ptr<const Model> model = weighing_model();
  Engine reference(model, options_on({}));
  const std::vector<int32_t> expected = text_behind(reference, 200);
  for (const auto& [first, others] : {std::pair{kGpu, Device{}}, std::pair{Device{}, kGpu}}) {
    Engine engine(model, options_on(others, first));
    CHECK(text_behind(engine, 200) == expected);
    engine.kv_cache().check_integrity();
  }
}

CHECK_MAIN()
