// Reader of GGUF v2 and v3 files: memory-mapped, every length and offset checked against the file
// before it is used. Strings and arrays are views into the mapping.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "effinfer/export.h"
#include "effinfer/tensor.h"
#include "effinfer/weights.h"

namespace effinfer {

// An array value: a typed span of bytes as they lie in the file. A vocabulary has hundreds of
// thousands of strings: of every kStride-th the place is known, and others are walked to.
struct EFFINFER_API GgufArray {
  enum class Type : uint8_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, u64, i64, f64 };
  static constexpr uint64_t kStride = 64;

  Type type;
  uint64_t size = 0;               // elements
  std::span<const uint8_t> bytes;  // numbers: little-endian, unaligned; strings: [length u64][text]
  std::vector<uint64_t> places;    // Type::string of a file: in `bytes`, of strings 0, kStride, ...

  // Of Type::string in a file; `index` is below `size`.
  std::string_view string(uint64_t index) const;
  // All from the first to the last.
  template <class Visit>
  void for_each_string(Visit&& visit) const {
    uint64_t place = 0;
    for (uint64_t i = 0; i < size; ++i) visit(string_at(place));
  }

 private:
  std::string_view string_at(uint64_t& place) const;  // moves `place` behind it
};

using GgufValue = std::variant<uint64_t, int64_t, double, bool, std::string_view, GgufArray>;

struct GgufTensor {
  std::string_view name;
  uint32_t type_id = 0;        // ggml type number
  std::string type_name;       // "q4_1", "iq1_s"; "type 99" for a number that ggml does not name
  std::optional<DType> dtype;  // empty when effinfer does not read this type
  Dims dims;                   // outermost first: [rows, cols], the reverse of the file's order
  const uint8_t* data = nullptr;
  size_t num_bytes = 0;  // 0 when the type's block size is unknown
};

class EFFINFER_API GgufFile : public WeightSource {
 public:
  // Of a model that is split into "x-00001-of-00003.gguf" and so on, the first opens all. Throws
  // FileError (missing, a directory, unreadable) or FormatError (empty, or anything wrong inside).
  static std::shared_ptr<GgufFile> open(const std::string& path);
  // Parses bytes that the caller keeps alive: for tests and fuzzing.
  static std::shared_ptr<GgufFile> parse(std::span<const uint8_t> bytes, std::string label);
  ~GgufFile() override;

  uint32_t version() const;
  uint64_t alignment() const;
  const std::string& path() const;
  size_t file_bytes() const;  // of all files of a split model

  // The entries are in file order.
  const std::vector<std::pair<std::string_view, GgufValue>>& metadata() const;
  const GgufValue* find(std::string_view key) const;  // null when absent
  // Typed access; throws FormatError when the key is absent or of another kind.
  std::string_view get_string(std::string_view key) const;
  int64_t get_int(std::string_view key) const;
  double get_float(std::string_view key) const;

  const std::vector<GgufTensor>& tensors() const;
  const GgufTensor* find_tensor(std::string_view name) const;

  // WeightSource
  bool contains(std::string_view name) const override;
  // Throws InvalidArgument for an unknown name, Unsupported (naming tensor and type) for a type
  // that effinfer does not read.
  TensorView weight(std::string_view name) const override;
  void release(std::string_view name, size_t begin, size_t end) const override;
  std::optional<WeightOrigin> origin(std::string_view name) const override;

  struct Impl;

 private:
  friend EFFINFER_API void write_gguf_with_metadata(const GgufFile&, std::string_view,
                                                    std::string_view, const std::string&);
  friend class GgufWriter;
  explicit GgufFile(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Decodes `count` elements (a whole number of blocks) of a weight dtype to float32, bit-equal to
// the reference decoder of the gguf package. For i2_s they are a whole tensor, whose scale follows.
EFFINFER_API void dequantize(DType dtype, const void* blocks, int64_t count, float* out);

// Decodes elements [first, first + count) of a tensor, whole blocks.
EFFINFER_API void dequantize_part(const TensorView& tensor, int64_t first, int64_t count,
                                  float* out);

// Writes a copy of `source` with metadata `key` = `value` (a string) added or replaced; the tensor
// data is copied as it is. The file appears at `path` complete or not at all; `path` may be the
// source's own. Throws FileError, InvalidArgument for a key that no file can hold, Unsupported for
// a source of several files.
EFFINFER_API void write_gguf_with_metadata(const GgufFile& source, std::string_view key,
                                           std::string_view value, const std::string& path);

}  // namespace effinfer
