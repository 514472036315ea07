// How often what a proposer believes comes true.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "effinfer/speculative.h"

namespace effinfer::runtime {

// By proposer, by the score's odds in powers of two, and by depth; and a factor for each request,
// whose text may be easier or harder to guess than others. Every guess counts whose parent was
// right, with a row or without: the text tells what would have been accepted.
class Calibration {
 public:
  static constexpr size_t kSources = 8;  // proposers of an engine, at most

  // P(token | parent) of a node of the request. A probe is worth the tokens that its proposer's
  // other nodes bring for each probe that ran.
  float probability(RequestId request, uint8_t source, float score, int32_t depth) const;
  void observe(const StepFacts& facts);
  void forget(RequestId request) { requests_.erase(request); }

 private:
  static constexpr int kOdds = 15;
  static constexpr int kDepths = 3;
  static constexpr float kTrust = 6.0f;     // guesses that a score itself is worth
  static constexpr float kMemory = 0.995f;  // of a bin
  static constexpr float kRequestTrust = 4.0f;
  static constexpr float kRequestMemory = 0.98f;
  // What a probe is worth before any was paid for, and for how many of them that is believed.
  static constexpr float kProbeWorth = 0.1f;
  static constexpr float kProbeTrust = 64.0f;

  struct Bin {
    float tried = 0.0f;
    float right = 0.0f;
  };
  struct Share {
    float expected = 0.0f;
    float right = 0.0f;
  };
  using Bins = std::array<std::array<Bin, kDepths>, kOdds>;
  using Shares = std::array<Share, kSources>;

  static size_t odds_of(float score);
  static size_t depth_of(int32_t depth) { return static_cast<size_t>(depth < 3 ? depth : 3) - 1; }
  float believed(uint8_t source, float score, int32_t depth) const;
  void count_probes(const StepFacts& facts);
  void count(RequestId request, uint8_t source, float score, int32_t depth, bool right);

  std::array<Bins, kSources> bins_ = {};
  Shares probes_ = {};  // expected counts probes, right what was accepted
  // From a request's first step on, drafted for or not: later ones take no memory.
  std::unordered_map<RequestId, Shares> requests_;
};

}  // namespace effinfer::runtime
