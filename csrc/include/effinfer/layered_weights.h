// Weights in memory in front of those of another source.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "effinfer/export.h"
#include "effinfer/weights.h"

namespace effinfer {

// What add() named is ours; every other name is the base's.
class EFFINFER_API LayeredWeights : public MemoryWeights {
 public:
  explicit LayeredWeights(std::shared_ptr<const WeightSource> base) : base_(std::move(base)) {}
  bool contains(std::string_view name) const override;
  TensorView weight(std::string_view name) const override;
  void release(std::string_view name, size_t begin, size_t end) const override;
  std::optional<WeightOrigin> origin(std::string_view name) const override;

 private:
  std::shared_ptr<const WeightSource> base_;
};

}  // namespace effinfer
