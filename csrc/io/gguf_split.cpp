// Models in several files, as llama.cpp splits them: "x-00001-of-00003.gguf" has the metadata, and
// each file its own tensors. split.no (from 0), split.count and split.tensors.count say what
// belongs together.
#include <cstdio>
#include <string>

#include "effinfer/error.h"
#include "io/gguf_cursor.h"
#include "io/gguf_impl.h"

namespace effinfer {
namespace {

using gguf::quoted;

[[noreturn]] void fail(const GgufFile::Impl& file, const std::string& what) {
  throw FormatError("[gguf] " + file.label + ": " + what);
}

// An integer of the metadata; `absent` where there is none.
uint64_t number(const GgufFile::Impl& file, std::string_view key, uint64_t absent) {
  const auto entry = file.metadata_index.find(key);
  if (entry == file.metadata_index.end()) return absent;
  const GgufValue& value = file.metadata[entry->second].second;
  if (const auto* found = std::get_if<uint64_t>(&value)) return *found;
  const auto* found = std::get_if<int64_t>(&value);
  if (found == nullptr || *found < 0) fail(file, quoted(key) + ": expected an integer >= 0");
  return static_cast<uint64_t>(*found);
}

std::string ending(uint64_t index, uint64_t count) {
  char text[64];
  std::snprintf(text, sizeof(text), "-%05llu-of-%05llu.gguf",
                static_cast<unsigned long long>(index + 1), static_cast<unsigned long long>(count));
  return text;
}

void take_tensors(GgufFile::Impl& first, const GgufFile::Impl& shard) {
  for (const GgufTensor& tensor : shard.tensors) {
    if (!first.tensor_index.emplace(tensor.name, first.tensors.size()).second) {
      fail(shard, "tensor " + quoted(tensor.name) + ": an earlier file of the model has it too");
    }
    first.tensors.push_back(tensor);
  }
}

}  // namespace

void open_shards(GgufFile::Impl& first) {
  const uint64_t count = number(first, "split.count", 0);
  if (count <= 1) return;
  constexpr uint64_t kMostFiles = 99999;
  const uint64_t own = number(first, "split.no", 0);
  const std::string& path = first.label;
  if (count > kMostFiles || own >= count || !path.ends_with(ending(own, count))) {
    fail(first, "expected the name of a file of a split model to end in " +
                    quoted(count > kMostFiles || own >= count ? "-00001-of-0000N.gguf"
                                                              : ending(own, count)));
  }
  const std::string stem = path.substr(0, path.size() - ending(own, count).size());
  if (own != 0) {
    fail(first, "a later file of a split model: expected the first, " + stem + ending(0, count));
  }
  for (uint64_t index = 1; index < count; ++index) {
    auto shard = open_gguf(stem + ending(index, count));
    if (number(*shard, "split.no", count) != index || number(*shard, "split.count", 0) != count) {
      fail(*shard, "expected file " + std::to_string(index + 1) + " of " + std::to_string(count));
    }
    take_tensors(first, *shard);
    first.shards.push_back(std::move(shard));
  }
  const uint64_t tensors = number(first, "split.tensors.count", first.tensors.size());
  if (tensors != first.tensors.size()) {
    fail(first, "expected " + std::to_string(tensors) + " tensors in all files, got " +
                    std::to_string(first.tensors.size()));
  }
}

const GgufFile::Impl& GgufFile::Impl::holder(const GgufTensor& tensor) const {
  for (const auto& shard : shards) {
    const std::span<const uint8_t> all = shard->bytes;
    if (tensor.data >= all.data() && tensor.data <= all.data() + all.size()) return *shard;
  }
  return *this;
}

}  // namespace effinfer
