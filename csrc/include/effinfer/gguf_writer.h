// Writer of GGUF v3 files: metadata first, then the descriptions of all tensors, then their data in
// that order, in pieces of any size.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "effinfer/dtype.h"
#include "effinfer/export.h"
#include "effinfer/gguf.h"
#include "effinfer/tensor.h"

namespace effinfer {

// The file appears at its path with commit(), complete or not at all. Throws FileError, and
// InvalidArgument for what no file can hold or what comes out of order.
class EFFINFER_API GgufWriter {
 public:
  explicit GgufWriter(const std::string& path);
  ~GgufWriter();

  // Sets metadata; a key that is there already keeps its place. Integers become 32-bit numbers
  // where they fit, floats 32-bit ones.
  void set(std::string_view key, const GgufValue& value);
  void remove(std::string_view key);
  // Sets all of a file's metadata, byte for byte, but for its alignment.
  void copy_metadata(const GgufFile& source);

  void add_tensor(std::string_view name, DType dtype, const Dims& dims);
  // The next bytes of the tensors' data, at most to the end of the tensor that they are of. The
  // first call ends the description.
  void write(const void* data, size_t size);
  void commit();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace effinfer
