// The engine over any StepRunner: queues, admission, preemption, the step.
//
// Requests belong to the thread that holds step_mutex_. Other threads leave new requests and
// cancellations in an inbox and read published metrics, both behind mutex_.
#pragma once

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "effinfer/engine.h"
#include "effinfer/kv_cache.h"
#include "effinfer/sampling.h"
#include "runtime/request.h"
#include "runtime/scheduler.h"
#include "runtime/speculative/speculator.h"
#include "runtime/step_batch.h"
#include "runtime/step_runner.h"
#include "runtime/techniques.h"

namespace effinfer::runtime {

struct EngineCoreOptions {
  int64_t max_seq_len = 0;
  int64_t max_batch_tokens = 512;
  int64_t max_sequences = 64;
  bool prefix_cache = true;
  bool mixed_phases = false;
  std::vector<int32_t> eos_token_ids;
  Speculation speculation;
  StepHooks hooks;
  std::vector<TechniqueFacts> techniques;
};

class EngineCore {
 public:
  // Sizes are lowered to what the runner and the cache can hold; policy: null is FCFS.
  EngineCore(std::unique_ptr<StepRunner> runner, std::unique_ptr<KvCache> cache,
             const EngineCoreOptions& options, std::unique_ptr<SchedulerPolicy> policy = nullptr);

  // These are documented in effinfer/engine.h.
  RequestId add(std::span<const int32_t> prompt, const SamplingParams& params,
                const std::shared_ptr<TokenConstraint>& constraint = nullptr) {
    return add_answers(prompt, {&params, 1}, {&constraint, 1}).front();
  }
  std::vector<RequestId> add_answers(
      std::span<const int32_t> prompt, std::span<const SamplingParams> params,
      std::span<const std::shared_ptr<TokenConstraint>> constraints = {});
  void cancel(RequestId id);
  bool has_work() const;
  std::vector<StepOutput> step();
  void logits(std::span<const int32_t> tokens, std::span<float> out, Phase phase);
  void log_likelihoods(std::span<const int32_t> tokens, std::span<double> out, Phase phase);
  RequestMetrics metrics(RequestId id) const;
  void forget(RequestId id);
  EngineStats stats() const;
  // No step runs while the result lives.
  std::unique_lock<std::mutex> pause() { return std::unique_lock(step_mutex_); }

  int64_t max_seq_len() const { return options_.max_seq_len; }
  int64_t vocab_size() const { return runner_->vocab_size(); }
  KvCache& cache() { return *cache_; }

 private:
  using Requests = std::vector<std::unique_ptr<Request>>;
  struct Record {
    RequestMetrics metrics;
    bool finished = false;
  };
  struct Hook {
    std::shared_ptr<StepHook> hook;
    Triggers triggers;
    uint64_t technique = 0;  // its bit; 0: it runs for all requests
    bool changes_nothing = false;

    bool runs_for(const Request& request) const {
      return technique == 0 || (technique & request.techniques.names) != 0;
    }
  };

  // engine_core.cpp: who is served, with which pages.
  void check_tokens(std::span<const int32_t> tokens, const char* argument) const;
  void check_request(std::span<const int32_t> prompt, const SamplingParams& params) const;
  std::unique_ptr<Request> make_request(std::span<const int32_t> prompt,
                                        const SamplingParams& params) const;
  void admit(std::vector<StepOutput>& outputs);
  std::span<const ScheduledRequest> admissible();
  // Whether its slots stay within max_seq_len however long its text is, and how many tokens that
  // may have.
  bool is_bounded(const RequestTechniques& techniques) const {
    return techniques.peak_slots > 0 && techniques.peak_slots <= options_.max_seq_len;
  }
  int64_t most_tokens(const RequestTechniques& techniques) const {
    return is_bounded(techniques) ? std::numeric_limits<int32_t>::max() : options_.max_seq_len;
  }
  size_t pages_of_slots(const Request& request, size_t slots) const;
  int64_t missing_pages(const Request& request, size_t more, SequenceId sequence) const;
  static int64_t copied_pages(const Request& fork, size_t fed);
  int64_t pages_of_running() const;
  bool try_admit(Request& request);
  bool try_import(Request& request);
  bool make_room(SequenceId sequence, int64_t count);
  bool take_pages(SequenceId sequence);
  void preempt(size_t index);

  // engine_answers.cpp: several answers to one prompt.
  const Request* sibling_of(const Request& request) const;
  bool waits_for_prompt(const Request& request) const;
  SequenceId start_sequence(const Request& request, int32_t& cached);
  bool keep_prompt(const Request& request);
  void fork_prompt(const Request& request);
  bool waits_answer(RequestId group) const;
  void drop_unwanted_prompts();
  bool drop_prompts();

  // engine_encode.cpp: older pages in fewer bits.
  bool encodes() const { return cache_->config().coding.bits != 0; }
  bool encodes(const Request& request) const {
    return encodes() && request.techniques.prefix.encodes;
  }
  bool encode_pages(SequenceId sequence);
  int64_t rows_of_one_state(const Request& request) const;

  // engine_eval.cpp: whole sequences.
  // Feeds a sequence in chunks of at most `rows` tokens; the logits of the `count` tokens from
  // `first` on are written to place(first, count), and done(first, count) is told.
  void feed(std::span<const int32_t> tokens, Phase phase, size_t rows,
            const std::function<std::span<float>(size_t first, size_t count)>& place,
            const std::function<void(size_t first, size_t count)>& done);

  // engine_step.cpp: the step.
  void take_inbox(std::vector<StepOutput>& outputs);
  std::span<const ScheduledRequest> scheduled(const Requests& requests);
  void append_chunks(std::vector<StepOutput>& outputs);
  int64_t chunk_tokens(const Request& request, int64_t chosen) const;
  void run_chunks(Phase phase, std::vector<StepOutput>& outputs);
  std::string try_run(std::span<Request* const> requests, Phase phase);
  void add_scored_rows(const Request& request);
  int32_t wanted_logits(std::span<Request* const> requests) const;
  bool set_draws(std::span<Request* const> requests);
  StepOutput end(Request& request, FinishReason reason, std::string error = {});
  StepOutput end_without_room(Request& request);
  void publish();

  // engine_prompt.cpp: what the model thinks of a prompt.
  void resize_rows(int64_t rows);
  void make_prompt_rows();
  int64_t prompt_rows() const;
  void score_in_chunks(Request& request) const;
  int64_t free_rows() const;
  void score_prompt(Request& request, size_t row, StepOutput& output);
  StepOutput advance_prompt(Request& request, size_t row);

  // engine_tokens.cpp: from logits to tokens.
  class Rows;
  void advance(std::span<Request* const> requests, std::vector<StepOutput>& outputs);
  static StepOutput begin_output(Request& request);
  StepOutput verify(Request& request, size_t row, StepOutput output);
  void commit(Request& request, std::span<const int32_t> accepted);
  std::vector<int32_t>& next_path();
  SampledToken sample_row(Request& request, size_t row);
  std::span<const uint32_t> allowed_tokens(const Request& request);
  bool is_stop_token(const Request& request, int32_t token) const;
  FinishReason finish_reason(const Request& request, int32_t token) const;

  // engine_hooks.cpp: what techniques do between steps.
  void take_hooks(const StepHooks& hooks);
  std::string run_hooks(Request& request, size_t first);
  int64_t tokens_until_hook(const Request& request) const;
  void forget_in_hooks(RequestId id);

  // engine_speculate.cpp: drafts.
  int64_t most_rows() const;
  bool may_draft(const Request& request) const;
  bool has_aligned_slots(SequenceId sequence) const;
  void append_drafts();
  void append_draft(Request& request, Speculator::Entry& entry);
  bool drop_drafts();
  static void count_drafts(Request& request, std::span<const int32_t> accepted);
  void add_facts(const Request& request, size_t num_emitted, std::span<const int32_t> accepted,
                 size_t row);
  TopLogits top_of(size_t row, size_t rows);
  void tell_speculator(Phase phase, double propose_seconds, double seconds);
  void forget_ended();

  const std::unique_ptr<StepRunner> runner_;
  const std::unique_ptr<KvCache> cache_;
  EngineCoreOptions options_;
  const std::unique_ptr<SchedulerPolicy> policy_;
  const std::shared_ptr<ThreadPool> pool_;  // for work between steps

  std::mutex step_mutex_;  // taken before mutex_ by those who need both
  Requests waiting_;       // by id
  Requests running_;       // by id
  // Sequences of prompts for answers that wait while those that had them ended, by group.
  std::map<RequestId, SequenceId> prompts_;
  Sampler sampler_;
  std::vector<uint32_t> allowed_;  // of the row at hand, by its constraint
  StepBatch batch_;
  // The step's logits: all of them, or the highest when nobody needs more.
  std::unique_ptr<float[]> logits_;  // [num_rows_, vocab]
  int64_t num_rows_ = 0;
  int32_t top_k_ = 0;              // of each row; 0: all
  std::vector<float> top_values_;  // [most_rows, max_top]
  std::vector<int32_t> top_tokens_;
  // Tokens in place of logits, of each row; no draws: there are logits.
  std::vector<RowDraw> draws_;
  std::vector<int32_t> drawn_tokens_;
  std::vector<uint8_t> decided_;
  Speculator speculator_;
  const Techniques techniques_;
  std::vector<Hook> hooks_;
  // Of the step at hand.
  std::vector<ScheduledRequest> scheduled_;
  std::vector<size_t> admissible_;  // indices into waiting_, of those in scheduled_
  StepChoice choice_;
  std::vector<Request*> active_;
  std::vector<StepFacts> facts_;
  std::vector<OutputRows> outputs_;          // that proposers asked for
  std::vector<std::vector<int32_t>> paths_;  // [max_sequences], accepted nodes by number of facts
  std::vector<int32_t> kept_;
  std::vector<RequestId> ended_;  // requests that speculation and hooks have to forget

  mutable std::mutex mutex_;
  Requests incoming_;
  std::set<RequestId> cancelled_;
  std::unordered_map<RequestId, Record> records_;
  RequestId next_id_ = 1;
  int64_t unfinished_ = 0;
  EngineStats stats_;
};

}  // namespace effinfer::runtime
