// Drafts of a device of their own, made while the target verifies those before them.
//
// The drafter keeps, for each request, a chain of guesses behind its text and makes it longer all
// the time. A step takes what is there of it, and the drafter goes on past what is being verified.
// When the step's tokens are not what it guessed, the chain is void: the kernel that the drafter is
// in is its last for it, and its cache is rolled back to where the text parted from the guesses.
//
// A level costs the target no time, so it is made while its guess is likely enough to be reached.
// Waiting costs time: behind a wrong guess a step waits for one more level while that brings more
// tokens a second than the text has had so far.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "effinfer/job_executor.h"
#include "effinfer/speculative.h"
#include "runtime/speculative/draft_runner.h"
#include "runtime/speculative/pace.h"

namespace effinfer::runtime {

struct AheadOptions {
  int32_t length = 7;  // of a draft at most; the chain is up to twice as long, and a token
  int32_t width = 1;   // children of a node of the chain, of which the likeliest goes on
  bool adaptive = true;
  std::string label = "draft_model";
};

class DraftAhead : public Proposer {
 public:
  DraftAhead(const AheadOptions& options, const Placement& placement);
  ~DraftAhead() override;

  // Once, before requests come.
  void set_runner(std::unique_ptr<DraftRunner> runner);

  std::string_view name() const override { return label_; }
  void attach(int64_t vocab_size) override;
  void propose(std::span<const DraftView> views, std::span<Draft> drafts) override;
  void observe(std::span<const StepFacts> facts) override;
  void forget(RequestId request) override;
  void start_profile(int64_t target_steps) override;
  std::optional<NamedProfile> take_profile() override;
  std::optional<DraftingStats> drafting() const override;

 protected:
  JobExecutor& executor() { return *executor_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Level {
    std::vector<Likely> likely;  // the first goes on
    std::optional<Foresight::Firsts> firsts;
  };
  struct Request {
    std::vector<int32_t> tokens;  // the text, as the engine told
    std::deque<Level> chain;      // what follows it
    // Of its draws, where they are plain decoding's.
    std::shared_ptr<const SamplingParams> params;
    size_t prompt_size = 0;
    uint64_t turn = 0;    // how often the text left the chain
    size_t end = 0;       // tokens that it can get to have
    bool read = false;    // whether a level of it has ended
    int32_t unasked = 0;  // steps since a draft was asked for
    bool gone = false;    // it is not drafted for any more
    std::string refusal;  // why, until it is told
  };
  // What the drafter works at.
  struct Member {
    RequestId request;
    uint64_t turn;
  };

  // These hold mutex_.
  void follow(Request& request, std::span<const int32_t> tokens);
  float path(const Request& request) const;
  void wait(std::unique_lock<std::mutex>& lock, std::span<const DraftView> views);
  bool pays_to_wait(std::span<const DraftView> views) const;
  void fill(const Request& request, const DraftView& view, Draft& draft) const;
  bool wants_more(const Request& request) const;
  bool has_work() const;
  bool is_void_level() const;
  void kick();
  void stop();
  bool take_texts(uint64_t job, std::vector<AheadText>& texts);
  void keep_answers(std::vector<AheadText>& texts, double seconds);

  void run_alone(const std::function<void()>& task);
  // On the executor.
  void work(uint64_t job, const CancelToken& cancel);

  const AheadOptions options_;
  const std::string label_;
  int64_t vocab_size_ = 0;
  std::unique_ptr<DraftRunner> runner_;  // used on the executor

  mutable std::mutex mutex_;
  std::unordered_map<RequestId, Request> requests_;
  std::vector<RequestId> released_;  // that the runner still has
  Pace pace_;                        // what guesses are worth
  Foresight foresight_;
  double right_ = 0.5;    // share of guesses that came true where those before had
  double level_s_ = 0.0;  // of a level, without reading prompts
  double rate_ = 0.0;     // tokens a second of a request
  std::optional<Clock::time_point> asked_;  // when the step at hand did
  bool level_reads_ = false;                // whether the level at hand reads a prompt
  std::condition_variable grown_;
  DraftingStats stats_;
  std::string failure_;  // of the device; empty: there was none, or it has been told
  bool failed_ = false;
  bool busy_ = false;  // a job is there that has not found that nothing is left to do
  uint64_t job_ = 0;   // its number: others leave
  Ticket ticket_;      // its
  std::vector<Member> level_;

  std::unique_ptr<JobExecutor> executor_;  // the last: it ends first
};

}  // namespace effinfer::runtime
