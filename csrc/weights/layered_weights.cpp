#include "effinfer/layered_weights.h"

namespace effinfer {

bool LayeredWeights::contains(std::string_view name) const {
  return MemoryWeights::contains(name) || base_->contains(name);
}

TensorView LayeredWeights::weight(std::string_view name) const {
  return MemoryWeights::contains(name) ? MemoryWeights::weight(name) : base_->weight(name);
}

void LayeredWeights::release(std::string_view name, size_t begin, size_t end) const {
  if (MemoryWeights::contains(name)) return MemoryWeights::release(name, begin, end);
  base_->release(name, begin, end);
}

std::optional<WeightOrigin> LayeredWeights::origin(std::string_view name) const {
  return MemoryWeights::contains(name) ? MemoryWeights::origin(name) : base_->origin(name);
}

}  // namespace effinfer
