// Where a graph's named weights come from: a GGUF file, a folder of safetensors, arrays in memory.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "effinfer/export.h"
#include "effinfer/tensor.h"

namespace effinfer {

class EFFINFER_API WeightSource {
 public:
  virtual ~WeightSource() = default;
  virtual bool contains(std::string_view name) const = 0;
  // A view that stays valid while the source lives. Throws InvalidArgument for an unknown name.
  virtual TensorView weight(std::string_view name) const = 0;
};

// Named views over memory that `owner` keeps alive.
class EFFINFER_API MemoryWeights : public WeightSource {
 public:
  void add(std::string name, const TensorView& view, std::shared_ptr<void> owner);
  bool contains(std::string_view name) const override;
  TensorView weight(std::string_view name) const override;

 private:
  struct Entry {
    TensorView view;
    std::shared_ptr<void> owner;
  };
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace effinfer
