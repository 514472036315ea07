// Scheduling, preemption and reuse of the engine over a fake model that checks every step.
#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "effinfer/engine.h"
#include "engine_harness.h"

using namespace effinfer;
using namespace fake;

TEST("steps ask for the highest logits only, while no request needs more") {
  Harness harness({});
  std::vector<Ask> asks = ragged_requests(3, 6, 20);
  for (Ask& ask : asks) ask.params.repetition_penalty = 1.0f;
  for (Ask& ask : asks) ask.params.top_p = 1.0f;
  asks.erase(asks.begin() + 1);  // draws from all logits
  asks.erase(asks.begin() + 3);
  check_texts(harness, asks, false);
  CHECK(harness.log.top_steps > 0);
  // All but prompt chunks that sample nothing.
  CHECK(harness.log.top_steps >= harness.log.steps - 4);
  const int before = harness.log.top_steps;
  asks[0].params.logprobs = 0;
  const RequestId id = harness.engine->add(asks[0].prompt, asks[0].params);
  harness.finish();
  CHECK_EQ(harness.log.top_steps, before);
  asks[0].params.logprobs = -1;
  CHECK(harness.text(id) == fake::reference(asks[0].prompt, asks[0].params, false));
}

TEST("tokens that the runner draws make the same texts, and are asked for where they may be") {
  Harness harness({});
  harness.log.draws = true;
  std::vector<Ask> asks = ragged_requests(5, 12, 40);
  check_texts(harness, asks, false);
  CHECK(harness.log.drawn_steps > 0);
  CHECK(harness.log.read_rows > 0);
  // Penalties, typical_p and log-probabilities are the host's.
  for (int what = 0; what < 3; ++what) {
    SamplingParams params = asks[0].params;
    params.repetition_penalty = what == 0 ? 1.2f : 1.0f;
    params.typical_p = what == 1 ? 0.8f : 1.0f;
    params.logprobs = what == 2 ? 0 : -1;
    params.top_k = 0;
    const int before = harness.log.drawn_steps;
    const RequestId id = harness.engine->add(asks[0].prompt, params);
    harness.finish();
    CHECK_EQ(harness.log.drawn_steps, before);
    params.logprobs = -1;
    CHECK(harness.text(id) == fake::reference(asks[0].prompt, params, false));
  }
}

TEST("texts do not depend on the batch, the chunk size or prefix reuse") {
  const std::vector<Ask> asks = ragged_requests(1, 12, 150);
  for (const bool one_arithmetic : {false, true}) {
    for (const int64_t chunk : {1, 2, 7, 64, 65, 1000}) {
      for (const int64_t sequences : {1, 3, 12}) {
        Setup setup;
        setup.one_arithmetic = one_arithmetic;
        setup.max_batch_tokens = chunk;
        setup.max_sequences = sequences;
        setup.prefix_cache = chunk % 2 == 0;
        Harness harness(setup);
        check_texts(harness, asks, one_arithmetic);
        CHECK(harness.log.largest_step <= chunk);
        if (one_arithmetic && chunk > 2 && sequences > 1) CHECK(harness.log.mixed_steps > 0);
        CHECK_EQ(harness.engine->stats().preemptions, 0);
      }
    }
  }
}

TEST("preemption under a tiny pool loses and repeats nothing") {
  const std::vector<Ask> asks = ragged_requests(2, 14, 130);
  for (const bool one_arithmetic : {false, true}) {
    for (const bool prefix_cache : {false, true}) {
      for (const int32_t pages : {4, 5, 7, 11}) {
        Setup setup;
        setup.one_arithmetic = one_arithmetic;
        setup.num_pages = pages;
        setup.prefix_cache = prefix_cache;
        Harness harness(setup);
        check_texts(harness, asks, one_arithmetic);
        if (pages < 8) CHECK(harness.engine->stats().preemptions > 0);
      }
    }
  }
}

TEST("decodes and prefills take turns on the fast path") {
  Setup setup;
  setup.max_batch_tokens = 16;
  Harness harness(setup);
  std::mt19937 random(3);
  const RequestId first = harness.engine->add(random_prompt(random, 10), greedy(60));
  harness.step();
  harness.engine->add(random_prompt(random, 300), greedy(5));
  for (int i = 0; i < 20; ++i) harness.step();
  // Half of the steps went to each.
  CHECK_EQ(harness.text(first).size(), 11u);
  CHECK_EQ(harness.log.prefill_rows, 10 + 10 * 16);
  harness.finish();
}

TEST("a prompt that was computed before is not computed again") {
  Harness harness(Setup{});
  std::mt19937 random(4);
  const std::vector<int32_t> prompt = random_prompt(random, 200);
  const RequestId first = harness.engine->add(prompt, greedy(10));
  harness.finish();
  const int before = harness.log.prefill_rows;
  CHECK_EQ(before, 200);
  const RequestId second = harness.engine->add(prompt, greedy(10));
  harness.finish();
  CHECK_EQ(harness.log.prefill_rows - before, 200 - 192);
  CHECK(harness.text(first) == harness.text(second));
  CHECK_EQ(harness.engine->metrics(first).cached_tokens, 0);
  const RequestMetrics metrics = harness.engine->metrics(second);
  CHECK_EQ(metrics.cached_tokens, 192);
  CHECK_EQ(metrics.prompt_tokens, 200);
  CHECK_EQ(metrics.output_tokens, 10);
  CHECK(metrics.time_to_first_token_s > 0 && metrics.total_s >= metrics.time_to_first_token_s);
  // A running request shares its prompt as soon as it is computed.
  const std::vector<int32_t> other = random_prompt(random, 130);
  harness.engine->add(other, greedy(100));
  for (int i = 0; i < 10; ++i) harness.step();
  const RequestId third = harness.engine->add(other, greedy(4));
  harness.finish();
  CHECK_EQ(harness.engine->metrics(third).cached_tokens, 128);
}

TEST("the failure of one request ends that request alone") {
  for (const bool one_arithmetic : {false, true}) {
    Setup setup;
    setup.one_arithmetic = one_arithmetic;
    Harness harness(setup);
    std::vector<Ask> asks = ragged_requests(5, 6, 60);
    std::map<RequestId, size_t> good;
    std::vector<RequestId> bad;
    for (size_t i = 0; i < asks.size(); ++i) {
      good[harness.engine->add(asks[i].prompt, asks[i].params)] = i;
      const std::vector<int32_t> broken = {1, 2, i % 2 == 0 ? fake::kPoison : fake::kExplosive, 4};
      bad.push_back(harness.engine->add(broken, greedy(5)));
    }
    harness.finish();
    for (const auto& [id, i] : good) {
      CHECK(harness.text(id) == fake::reference(asks[i].prompt, asks[i].params, one_arithmetic));
    }
    for (size_t i = 0; i < bad.size(); ++i) {
      const StepOutput& output = harness.outputs.at(bad[i]);
      CHECK(output.finish == FinishReason::error);
      CHECK(output.error.find(i % 2 == 0 ? "NaN" : "exploded") != std::string::npos);
      CHECK(output.tokens.empty());
    }
  }
}

TEST("stop tokens, end of sequence, lengths") {
  std::mt19937 random(6);
  const std::vector<int32_t> prompt = random_prompt(random, 20);
  const std::vector<int32_t> text = fake::reference(prompt, greedy(40), false);
  const auto first = [&](int32_t token) {
    return static_cast<size_t>(std::find(text.begin(), text.end(), token) - text.begin());
  };
  Setup setup;
  setup.eos = {text[12]};
  setup.max_seq_len = 50;
  Harness harness(setup);
  SamplingParams params = greedy(1000);
  const RequestId full = harness.engine->add(prompt, params);
  params.stop_token_ids = {text[5]};
  const RequestId stopped = harness.engine->add(prompt, params);
  params.stop_token_ids.clear();
  params.ignore_eos = false;
  const RequestId ended = harness.engine->add(prompt, params);
  harness.finish();
  CHECK_EQ(harness.text(full).size(), 30u);
  CHECK(harness.outputs.at(full).finish == FinishReason::length);
  CHECK_EQ(harness.text(stopped).size(), first(text[5]) + 1);
  CHECK(harness.outputs.at(stopped).finish == FinishReason::stop);
  CHECK_EQ(harness.text(ended).size(), first(text[12]) + 1);
  CHECK(harness.outputs.at(ended).finish == FinishReason::stop);
}

TEST("bad requests are refused when they are added") {
  Setup setup;
  setup.num_pages = 2;
  Harness harness(setup);
  EngineCore& engine = *harness.engine;
  CHECK_EQ(engine.max_seq_len(), 128);
  CHECK_THROWS(InvalidArgument, "[engine] prompt", engine.add({}, greedy(1)));
  const std::vector<int32_t> outside = {1, kVocab};
  CHECK_THROWS(InvalidArgument, "0..96", engine.add(outside, greedy(1)));
  const std::vector<int32_t> long_prompt(128, 1);
  CHECK_THROWS(InvalidArgument, "num_pages", engine.add(long_prompt, greedy(1)));
  SamplingParams params = greedy(1);
  params.top_p = 2.0f;
  const std::vector<int32_t> one = {1};
  CHECK_THROWS(InvalidArgument, "top_p", engine.add(one, params));
  CHECK_THROWS(InvalidArgument, "no request", engine.metrics(77));
  CHECK(!engine.has_work());
  const RequestId id = engine.add(std::vector<int32_t>(127, 1), greedy(9));
  harness.finish();
  CHECK_EQ(harness.text(id).size(), 1u);
  engine.forget(id);
  CHECK_THROWS(InvalidArgument, "no request", engine.metrics(id));
}

TEST("requests come and are cancelled from other threads") {
  Setup setup;
  setup.num_pages = 12;
  Harness harness(setup);
  const std::vector<Ask> asks = ragged_requests(8, 40, 120);
  std::vector<RequestId> ids(asks.size());
  std::atomic<bool> any_cancelled = false;
  std::atomic<bool> done = false;
  std::thread client([&] {
    for (size_t i = 0; i < asks.size(); ++i) {
      ids[i] = harness.engine->add(asks[i].prompt, asks[i].params);
      if (i % 4 == 3) {
        harness.engine->cancel(ids[i - i % 3]);
        any_cancelled = true;
      }
      harness.engine->stats();
      std::this_thread::yield();
    }
    done = true;
  });
  // The first to be cancelled has not begun then, however slow this thread is.
  while (!any_cancelled) std::this_thread::yield();
  while (!done || harness.engine->has_work()) harness.step();
  client.join();
  int cancelled = 0;
  for (size_t i = 0; i < asks.size(); ++i) {
    const std::vector<int32_t> want = fake::reference(asks[i].prompt, asks[i].params, false);
    const std::vector<int32_t> got = harness.text(ids[i]);
    if (harness.outputs.at(ids[i]).finish == FinishReason::cancelled) {
      ++cancelled;
      CHECK(std::equal(got.begin(), got.end(), want.begin()));
    } else {
      CHECK(got == want);
    }
  }
  CHECK(cancelled > 0);
  harness.finish();
}

TEST("teacher forcing leaves the running requests alone") {
  Setup setup;
  setup.num_pages = 6;
  Harness harness(setup);
  const std::vector<Ask> asks = ragged_requests(9, 5, 60);
  std::vector<RequestId> ids;
  for (const Ask& ask : asks) ids.push_back(harness.engine->add(ask.prompt, ask.params));
  std::mt19937 random(10);
  const std::vector<int32_t> tokens = random_prompt(random, 250);
  std::vector<float> logits(tokens.size() * kVocab);
  std::vector<float> row(kVocab);
  for (const Phase phase : {Phase::prefill, Phase::decode}) {
    for (int i = 0; i < 9; ++i) harness.step();
    harness.engine->logits(tokens, logits, phase);
    harness.engine->cache().check_integrity();
    std::vector<int32_t> contents;
    for (size_t i = 0; i < tokens.size(); ++i) {
      contents.push_back(fake::content(tokens[i], phase, false));
      fake::fill_logits(contents, row.data());
      CHECK(
          std::equal(row.begin(), row.end(), logits.begin() + static_cast<ptrdiff_t>(i * kVocab)));
    }
  }
  harness.finish();
  for (size_t i = 0; i < asks.size(); ++i) {
    CHECK(harness.text(ids[i]) == fake::reference(asks[i].prompt, asks[i].params, false));
  }
  CHECK_THROWS(InvalidArgument, "out",
               harness.engine->logits(tokens, {logits.data(), 5}, Phase::prefill));
}

TEST("pages held outside of requests give errors, not hangs") {
  Setup setup;
  setup.num_pages = 3;
  setup.max_seq_len = 150;
  Harness harness(setup);
  KvCache& cache = harness.engine->cache();
  const SequenceId outside = cache.create({});
  cache.append(outside, std::vector<int32_t>(100, 1));
  std::mt19937 random(11);
  const RequestId no_start = harness.engine->add(random_prompt(random, 70), greedy(5));
  const RequestId no_end = harness.engine->add(random_prompt(random, 60), greedy(30));
  const RequestId fits = harness.engine->add(random_prompt(random, 20), greedy(5));
  while (harness.engine->has_work()) harness.step();
  CHECK(harness.outputs.at(no_start).finish == FinishReason::error);
  CHECK(harness.outputs.at(no_end).finish == FinishReason::error);
  CHECK_EQ(harness.text(no_end).size(), 5u);
  CHECK(harness.outputs.at(fits).finish == FinishReason::length);
  cache.release(outside);
  harness.finish();
}

CHECK_MAIN()
