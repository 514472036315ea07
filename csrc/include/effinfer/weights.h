// Where a graph's named weights come from: a GGUF file, a folder of safetensors, arrays in memory.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "effinfer/export.h"
#include "effinfer/tensor.h"

namespace effinfer {

// A file's state as the system tells it: any write to the file changes it.
struct FileState {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t size = 0;
  int64_t modified_ns = 0;  // of the contents
  int64_t changed_ns = 0;   // of the contents or of the inode; programs cannot set it
  bool operator==(const FileState&) const = default;
};

// Throws FileError unless `path` is a regular file.
EFFINFER_API FileState file_state(const std::string& path);

// Where a weight lies in a file that is mapped read-only.
struct WeightOrigin {
  std::string path;
  FileState state;  // when it was mapped
  uint64_t offset = 0;
};

class EFFINFER_API WeightSource {
 public:
  virtual ~WeightSource() = default;
  virtual bool contains(std::string_view name) const = 0;
  // A view that stays valid while the source lives. Throws InvalidArgument for an unknown name.
  virtual TensorView weight(std::string_view name) const = 0;
  // The weight's bytes [begin, end) will not be read soon: a source that maps a file gives the
  // memory of these pages back. Reading them again is slower, never wrong.
  virtual void release(std::string_view name, size_t begin, size_t end) const;
  // Empty for bytes that are in no file.
  virtual std::optional<WeightOrigin> origin(std::string_view name) const;
};

// Named views over memory that `owner` keeps alive.
class EFFINFER_API MemoryWeights : public WeightSource {
 public:
  // `origin`: the bytes are mapped read-only from a file, so that their pages may be dropped.
  void add(std::string name, const TensorView& view, std::shared_ptr<void> owner,
           std::optional<WeightOrigin> origin = std::nullopt);
  bool contains(std::string_view name) const override;
  TensorView weight(std::string_view name) const override;
  void release(std::string_view name, size_t begin, size_t end) const override;
  std::optional<WeightOrigin> origin(std::string_view name) const override;

 private:
  struct Entry {
    TensorView view;
    std::shared_ptr<void> owner;
    std::optional<WeightOrigin> origin;
  };
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace effinfer
