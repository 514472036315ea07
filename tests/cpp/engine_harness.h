// The engine over the fake model, every step checked: for tests of scheduling and speculation.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "effinfer/engine.h"
#include "fake_runner.h"
#include "runtime/engine_core.h"

namespace fake {

using runtime::EngineCore;
using runtime::EngineCoreOptions;

struct Setup {
  bool one_arithmetic = false;
  int32_t num_pages = 64;
  int64_t max_batch_tokens = 32;
  int64_t max_sequences = 8;
  int64_t max_seq_len = 400;
  bool prefix_cache = true;
  std::vector<int32_t> eos = {};
  Speculation speculation = {};
  StepHooks hooks = {};
  std::vector<TechniqueFacts> techniques = {};
  int probe_ids = 0;  // of the model's embedding, behind the vocabulary
};

struct Harness {
  Log log;
  std::unique_ptr<EngineCore> engine;
  std::map<RequestId, StepOutput> outputs;

  explicit Harness(const Setup& setup) {
    log.probe_ids = setup.probe_ids;
    EngineCoreOptions options;
    options.max_seq_len = setup.max_seq_len;
    options.max_batch_tokens = setup.max_batch_tokens;
    options.max_sequences = setup.max_sequences;
    options.prefix_cache = setup.prefix_cache;
    options.mixed_phases = setup.one_arithmetic;
    options.eos_token_ids = setup.eos;
    options.speculation = setup.speculation;
    options.hooks = setup.hooks;
    options.techniques = setup.techniques;
    const runtime::StepLimits limits{setup.max_batch_tokens, setup.max_sequences, 64};
    engine = std::make_unique<EngineCore>(
        std::make_unique<Runner>(setup.one_arithmetic, limits, &log),
        std::make_unique<KvCache>(KvCacheConfig{.num_layers = 2,
                                                .num_kv_heads = 2,
                                                .head_dim = 16,
                                                .dtype = DType::f32,
                                                .num_pages = setup.num_pages,
                                                .rope = {{}, {}}}),  // keys are tokens
        options);
  }

  void step() {
    for (StepOutput& output : engine->step()) {
      StepOutput& all = outputs[output.request];
      CHECK(all.finish == FinishReason::none);
      all.finish = output.finish;
      all.error = output.error;
      if (!output.warning.empty()) {
        CHECK(all.warning.empty());  // one a request
        all.warning = output.warning;
      }
      all.tokens.insert(all.tokens.end(), output.tokens.begin(), output.tokens.end());
      all.prompt.insert(all.prompt.end(), output.prompt.begin(), output.prompt.end());
    }
    engine->cache().check_integrity();
    CHECK_EQ(log.faults, 0);
  }
  void finish() {
    int steps = 0;
    while (engine->has_work()) {
      step();
      CHECK(++steps < 20000);
      if (steps >= 20000) break;
    }
    // Nothing but cached prefixes is left in the pool.
    CHECK_EQ(engine->cache().available_pages(), engine->cache().config().num_pages);
  }
  std::vector<int32_t> text(RequestId id) const {
    std::vector<int32_t> tokens;
    for (const SampledToken& sampled : outputs.at(id).tokens) tokens.push_back(sampled.token);
    return tokens;
  }
};

inline std::vector<int32_t> random_prompt(std::mt19937& random, size_t size) {
  std::vector<int32_t> prompt(size);
  for (int32_t& token : prompt) token = static_cast<int32_t>(random() % 90);
  return prompt;
}

inline SamplingParams greedy(int32_t max_tokens) {
  SamplingParams params;
  params.temperature = 0.0f;
  params.max_tokens = max_tokens;
  params.ignore_eos = true;
  return params;
}

struct Ask {
  std::vector<int32_t> prompt;
  SamplingParams params;
};

inline std::vector<Ask> ragged_requests(uint32_t seed, int count, int32_t longest) {
  std::mt19937 random(seed);
  std::vector<Ask> asks;
  for (int i = 0; i < count; ++i) {
    SamplingParams params = greedy(1 + static_cast<int32_t>(random() % 90));
    if (i % 3 == 1) {
      params.temperature = 1.0f;
      params.top_p = 0.9f;
      params.repetition_penalty = 1.2f;
      params.seed = random();
    } else if (i % 3 == 2) {
      params.temperature = 1.0f;
      params.top_k = 2 + i % 5;
      params.seed = static_cast<uint64_t>(100 + i);
    }
    asks.push_back({random_prompt(random, 1 + random() % static_cast<uint32_t>(longest)), params});
  }
  return asks;
}

inline void check_texts(Harness& harness, const std::vector<Ask>& asks, bool one_arithmetic) {
  std::vector<RequestId> ids;
  for (const Ask& ask : asks) ids.push_back(harness.engine->add(ask.prompt, ask.params));
  harness.finish();
  for (size_t i = 0; i < asks.size(); ++i) {
    CHECK(harness.text(ids[i]) == reference(asks[i].prompt, asks[i].params, one_arithmetic));
    CHECK(harness.outputs.at(ids[i]).finish == FinishReason::length);
  }
}

// Two threads add the requests three times, cancel the second round's, and call look(request),
// while the engine steps: those that end have their text, those cancelled the beginning of it.
template <class Look>
void check_callers(Harness& harness, const std::vector<Ask>& asks, int steps, bool one_arithmetic,
                   const Look& look) {
  std::vector<std::vector<RequestId>> ids(2);
  std::vector<std::thread> callers;
  for (std::vector<RequestId>& own : ids) {
    callers.emplace_back([&] {
      for (int round = 0; round < 3; ++round) {
        for (const Ask& ask : asks) {
          own.push_back(harness.engine->add(ask.prompt, ask.params));
          if (round == 1) harness.engine->cancel(own.back());
          look(own.back());
        }
      }
    });
  }
  for (int i = 0; i < steps; ++i) harness.step();
  for (std::thread& caller : callers) caller.join();
  harness.finish();
  for (const std::vector<RequestId>& own : ids) {
    for (size_t i = 0; i < own.size(); ++i) {
      const Ask& ask = asks[i % asks.size()];
      const std::vector<int32_t> text = reference(ask.prompt, ask.params, one_arithmetic);
      if (harness.outputs.at(own[i]).finish != FinishReason::cancelled) {
        CHECK(harness.text(own[i]) == text);
      } else if (!harness.outputs.at(own[i]).tokens.empty()) {
        const std::vector<int32_t> begin = harness.text(own[i]);
        CHECK(begin.size() <= text.size() && std::equal(begin.begin(), begin.end(), text.begin()));
      }
    }
  }
}

}  // namespace fake
