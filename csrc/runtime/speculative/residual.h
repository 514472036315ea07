// What is left of the target's distribution at a row while children are refused.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "effinfer/speculative.h"

namespace effinfer::runtime {

// A child whose token was drawn from q and is refused leaves the target p with max(keep p - q, 0),
// normalised. q is not zero for few tokens, so these are kept, and a factor for all others: a row
// of any vocabulary takes memory for its candidates and children.
class Residual {
 public:
  // `target` [vocab] sums to 1; `children` are those of the row, in order.
  void start(std::span<const double> target, const Draft& draft, int32_t row,
             std::span<const int32_t> children);
  // Of the next child, which has this token: what the target gives it now, and with what
  // probability it was drawn.
  double target(int32_t token) const { return find(token).target; }
  double guess(int32_t token) const;
  // Goes on to what is left when that child is refused. Returns the mass before it is normalised;
  // 0: nothing is left, since the child had to be accepted.
  double refuse(int32_t token, double keep);
  // The target's distribution, in place of the one that start() got.
  void apply(std::span<double> target) const;

 private:
  struct Entry {
    int32_t token;
    double target;
    double guess;  // not normalised
  };
  const Entry& find(int32_t token) const;

  std::vector<Entry> entries_;
  Draft::Draw draw_ = Draft::Draw::none;
  double guesses_ = 0.0;  // their sum
  double outside_ = 0.0;  // the target's mass of all tokens without an entry
  double factor_ = 1.0;   // of these
};

}  // namespace effinfer::runtime
