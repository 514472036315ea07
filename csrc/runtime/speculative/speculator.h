// The drafting half of a step: who is asked, what is wrong with an answer, what gets a row.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "effinfer/speculative.h"
#include "runtime/speculative/draft.h"

namespace effinfer::runtime {

// The values of the graph that these proposers want to see, each once.
std::vector<std::string> wanted_outputs(const Speculation& parts);

class Speculator {
 public:
  // What a step drafts for one request.
  struct Entry {
    DraftView view;
    bool asked = false;   // whether proposers were
    uint64_t keep = 0;    // nodes of `proposed`
    Draft proposed;       // of all proposers
    DraftTree tree;       // what has rows
    std::string trouble;  // why a proposer's draft was refused; empty: none was
  };

  // Throws InvalidArgument for more than eight proposers, null, and parts that an engine has.
  Speculator(const Speculation& parts, const DraftIds& ids, size_t max_requests);

  bool drafts() const { return !parts_.proposers.empty(); }
  Verifier& verifier() const { return *parts_.verifier; }
  // The highest logits of each row that proposers want to see.
  int32_t top_k() const { return top_k_; }
  // The values of the graph that they want to see, each once.
  const std::vector<std::string>& outputs() const { return outputs_; }

  void clear() { count_ = 0; }
  void add(const DraftView& view);
  std::span<Entry> entries() { return std::span(entries_).first(count_); }
  // The entry of a request, or null.
  Entry* find(RequestId request);

  // Asks the proposers for the entries' drafts, and the controller for their rows. Who throws where
  // no single request is to blame is not asked again; the requests of the next step are told.
  void propose(const StepBudget& budget);
  // Tells everybody what a step gave.
  void observe(const StepCost& cost, std::span<const StepFacts> facts);
  void forget(RequestId request);

 private:
  // Marks a part as this engine's for as long as it lives: its state is of one engine's requests.
  class Claim {
   public:
    explicit Claim(const void* part);
    ~Claim();
    Claim(Claim&& other) noexcept : part_(std::exchange(other.part_, nullptr)) {}
    Claim& operator=(Claim&&) = delete;

   private:
    const void* part_;
  };

  // Why a part is not asked again; empty: it is.
  struct Broken {
    std::string why;
    bool told = false;
  };

  void claim_parts();
  void tell_broken();
  void ask(uint8_t source);
  static void add_draft(const Draft& draft, uint8_t source, const DraftView& view, Draft& proposed);
  void ask_controller();
  void choose(const StepBudget& budget);

  Speculation parts_;
  std::vector<Claim> claims_;
  DraftIds ids_;
  int32_t top_k_ = 0;
  std::vector<std::string> outputs_;
  std::vector<Broken> broken_;  // by proposer, then the controller
  std::vector<Entry> entries_;  // [max_requests]
  size_t count_ = 0;
  // Of those that are asked.
  std::vector<size_t> asked_;
  std::vector<DraftView> views_;
  std::vector<Draft> drafts_;
  std::vector<uint64_t> keep_;
};

}  // namespace effinfer::runtime
