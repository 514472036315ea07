// How long drafts of a model shall be: what a level of them costs against what it brings.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace effinfer::runtime {

// Learns how often drafts come true down to each depth, and how long a level and the target's step
// take. Where no depth pays, a draft is tried now and then: after a number of calls that doubles
// with each vain try, and only while all tries together have cost kMostLoss of the time.
class Pace {
 public:
  static constexpr int32_t kMostDepth = 63;

  // A draft had this depth along the text that came, and was right down to `right`.
  void count(int32_t depth, int32_t right);
  void add_level(double seconds) { level_s_ = blend(level_s_, seconds); }
  // What a step's drafts took to make, with what the model had to read before; 0: it had none.
  void add_draft(double seconds);
  // What the target's step took behind it.
  void add_step(double seconds, bool drafted);
  // How often a guess that the model gave this probability came true, where its parent had.
  void count_guess(float score, bool right);
  float belief(float score) const;
  // Whether a level is worth its time for a path of that probability.
  bool pays(float path) const { return static_cast<double>(path) >= level_s_ * rate_; }
  // The depth, of 0..most, with the most expected tokens a second, or that of a try.
  int32_t depth(int32_t most);

 private:
  static constexpr double kMemory = 0.99;
  static constexpr double kTrust = 4.0;  // drafts that the belief before any is worth
  static constexpr int32_t kRare = 64;
  static constexpr int32_t kRarest = 4096;
  static constexpr int32_t kTried = 2;  // levels of a try, the first draft of all with them
  static constexpr double kMostLoss = 0.005;
  static constexpr int32_t kBins = 16;  // of the odds, in powers of two

  struct Bin {
    double tried = 0.0;
    double right = 0.0;
  };
  static size_t bin_of(float score);

  static double blend(double old, double fresh) {
    return old == 0.0 ? fresh : 0.9 * old + 0.1 * fresh;
  }

  std::array<double, kMostDepth> tried_ = {};  // where all before were right
  std::array<double, kMostDepth> right_ = {};
  std::array<Bin, kBins> bins_;
  double rate_ = 0.0;  // tokens a second that are expected of the best depth
  double level_s_ = 0.0;
  double step_s_ = 0.0;
  int32_t idle_ = 0;
  int32_t rare_ = kRare;  // calls without a draft before one is tried
  bool tries_ = false;    // whether the draft at hand is a try
  double tried_s_ = 0.0;  // what all tries took to make, and the last one
  double last_try_s_ = 0.0;
  double elapsed_s_ = 0.0;
};

}  // namespace effinfer::runtime
