// What a GgufFile holds: shared by the reader and the writer.
//
//   file = [magic "GGUF"][version u32][tensor count u64][metadata count u64]
//          [metadata: key string, value type u32, value]...
//          [tensor: name string, rank u32, dims u64 (innermost first), type u32, offset u64]...
//          [padding to the alignment][data: offsets count from here]
//
// Source: docs/gguf.md of ggml.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "effinfer/gguf.h"
#include "io/mapped_file.h"

namespace effinfer {

struct GgufFile::Impl {
  std::unique_ptr<MappedFile> mapping;  // null for parse()
  std::span<const uint8_t> bytes;
  std::string label;  // the path, or what parse() was told
  uint32_t version = 0;
  uint64_t alignment = 32;

  std::vector<std::pair<std::string_view, GgufValue>> metadata;
  std::unordered_map<std::string_view, size_t> metadata_index;
  std::vector<GgufTensor> tensors;
  std::unordered_map<std::string_view, size_t> tensor_index;

  // Where things are in the file, for copying them unchanged.
  std::vector<uint64_t> metadata_begin;  // of each entry
  uint64_t tensor_infos_begin = 0;       // the end of the last metadata entry
  uint64_t tensor_infos_end = 0;
  uint64_t data_begin = 0;  // at most the file's size

  // Of a split model, the files after the first, whose `tensors` are those of all.
  std::vector<std::unique_ptr<Impl>> shards;
  const Impl& holder(const GgufTensor& tensor) const;  // the file that a tensor's data lies in
};

// Maps and parses one file. Throws FileError, FormatError.
std::unique_ptr<GgufFile::Impl> open_gguf(const std::string& path);
// Adds the other files of a split model to its first. Throws FileError, FormatError.
void open_shards(GgufFile::Impl& first);

}  // namespace effinfer
