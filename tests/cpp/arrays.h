// What tests of operators share: every ISA level in turn, random arrays, and views of vectors.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "effinfer/device.h"
#include "effinfer/tensor.h"

namespace effinfer {

// Calls body() at each level of the machine, and restores the level.
template <class Body>
void at_every_isa(Body&& body) {
  const Isa before = current_isa();
  for (const Isa isa : available_isas()) {
    set_isa(isa);
    body();
  }
  set_isa(before);
}

inline std::vector<float> normals(int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) x = normal(random);
  return values;
}

inline TensorView ints(const std::vector<int32_t>& values) {
  return {values.data(), DType::i32, {static_cast<int64_t>(values.size())}};
}

}  // namespace effinfer
