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
  // The weight's bytes [begin, end) will not be read soon: a source that maps a file gives the
  // memory of these pages back. Reading them again is slower, never wrong.
  virtual void release(std::string_view name, size_t begin, size_t end) const;
};

// Named views over memory that `owner` keeps alive.
class EFFINFER_API MemoryWeights : public WeightSource {
 public:
  // `is_mapped`: the bytes lie in a read-only mapping of a file, whose pages may be dropped.
  void add(std::string name, const TensorView& view, std::shared_ptr<void> owner,
           bool is_mapped = false);
  bool contains(std::string_view name) const override;
  TensorView weight(std::string_view name) const override;
  void release(std::string_view name, size_t begin, size_t end) const override;

 private:
  struct Entry {
    TensorView view;
    std::shared_ptr<void> owner;
    bool is_mapped = false;
  };
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace effinfer
