// Limits of an operator that its node in a graph has too.
#pragma once

namespace effinfer::ops {

inline constexpr int kMaxMatmulParts = 4;  // weight matrices that share an operand

}  // namespace effinfer::ops
