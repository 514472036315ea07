// How what keys get of rows becomes a plane's numbers (ops/attention_mass.h).
#pragma once

namespace effinfer::ops {

// Of the rows in their order: a number becomes number * decay + p, where p is what the row's heads
// give together, or the greater of number * decay and what one of them gives most.
struct MassRule {
  float decay = 1.0f;
  bool maximum = false;
};

}  // namespace effinfer::ops
