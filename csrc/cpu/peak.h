// Loops of independent multiply-adds in registers: what no kernel of that arithmetic can pass.
#pragma once

#include <cstdint>

namespace effinfer::cpu {

// Does `rounds` rounds and returns the number of operations, a multiply-add being two.
using PeakProbe = int64_t (*)(int64_t rounds);

// The loops of a level; null where a lower level has the same, or where there is none.
struct PeakProbes {
  PeakProbe f32;
  PeakProbe int8;
  PeakProbe bf16;
};

}  // namespace effinfer::cpu
