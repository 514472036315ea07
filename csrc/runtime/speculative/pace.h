// How long drafts of a model shall be: what a level of them costs against what it brings.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace effinfer::runtime {

// Learns how often drafts come true down to each depth, and how long a level and the target's step
// take.
class Pace {
 public:
  static constexpr int32_t kMostDepth = 63;

  // A draft had this depth along the text that came, and was right down to `right`.
  void count(int32_t depth, int32_t right);
  void add_level(double seconds) { level_s_ = blend(level_s_, seconds); }
  void add_step(double seconds) { step_s_ = blend(step_s_, seconds); }
  // How often a guess that the model gave this probability came true, where its parent had.
  void count_guess(float score, bool right);
  float belief(float score) const;
  // Whether a level is worth its time for a path of that probability.
  bool pays(float path) const { return static_cast<double>(path) >= level_s_ * rate_; }
  // The depth, of 0..most, with the most expected tokens a second. Where that is 0 a draft is tried
  // now and then.
  int32_t depth(int32_t most);

 private:
  static constexpr double kMemory = 0.99;
  static constexpr double kTrust = 4.0;  // drafts that the belief before any is worth
  static constexpr int32_t kRare = 64;
  static constexpr int32_t kRarest = 4096;
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
};

}  // namespace effinfer::runtime
