// Guesses of tokens that are drawn at random with numbers that are known beforehand.
//
// The engine draws the n-th token of an output with the number philox_uniform(seed, n): the one in
// whose share of [0, 1), shares being in the order of ids, that number falls. A draft model that
// looks where it falls among its own shares finds that token wherever it believes what the target
// believes, however high the temperature is; its likeliest token would be drawn with that token's
// probability alone. The text does not depend on it (a coupling without communication, Daliri et
// al. 2024, arXiv:2408.07978, which draws by Gumbel noise where this inverts the distribution).
//
// As shares of two models begin at places that differ, the number is taken for the mean of a
// Laplace distribution. How wide that is for a pair of models shows by the tokens that come.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "effinfer/sampling.h"
#include "effinfer/speculative.h"

namespace effinfer::runtime {

struct Likely {
  int32_t token;
  float score;  // believed probability
};

class Foresight {
 public:
  // Scales of the Laplace distribution. The last is so wide that the likeliest token wins.
  static constexpr std::array<double, 5> kSpreads = {1.0 / 256, 1.0 / 32, 0.1, 0.25, 4.0};
  // What would have been guessed first with each of them.
  using Firsts = std::array<int32_t, kSpreads.size()>;

  // The token that was drawn where these had been guessed.
  void count(const Firsts& firsts, int32_t drawn);
  // The spread that was right most often, as its place in kSpreads.
  size_t best() const;

 private:
  static constexpr double kMemory = 0.99;
  std::array<double, kSpreads.size()> right_ = {};
};

// A draw whose number is known.
struct KnownDraw {
  const SamplingParams* params = nullptr;
  uint64_t index = 0;  // of the token in the output
  size_t spread = 0;
};

// What follows a row of a draft model, by the row's highest logits (highest first) and their
// tokens.
class Guesser {
 public:
  // The `count` likeliest tokens, the likeliest first.
  void find(std::span<const float> logits, std::span<const int32_t> tokens, size_t count,
            std::vector<Likely>& out) const;
  // Those that the draw gives most likely; returns what each spread puts first. There are Laplace
  // distributions around its number; `out` has shares of the one with its spread.
  Foresight::Firsts find_drawn(std::span<const float> logits, std::span<const int32_t> tokens,
                               const KnownDraw& draw, size_t count, std::vector<Likely>& out);

 private:
  std::vector<Draft::Candidate> shares_;  // in the order of ids
  std::vector<Likely> ranked_;
};

}  // namespace effinfer::runtime
