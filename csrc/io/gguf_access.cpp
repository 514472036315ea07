// Look-ups in an open GGUF file.
#include <algorithm>
#include <cstring>
#include <limits>

#include "core/mapped_pages.h"
#include "effinfer/error.h"
#include "effinfer/gguf.h"
#include "io/gguf_cursor.h"
#include "io/gguf_impl.h"

namespace effinfer {

using gguf::quoted;

std::string_view GgufArray::string_at(uint64_t& place) const {
  uint64_t length = 0;
  std::memcpy(&length, bytes.data() + place, sizeof(length));
  const auto* text = reinterpret_cast<const char*>(bytes.data() + place + sizeof(length));
  place += sizeof(length) + length;
  return {text, length};
}

std::string_view GgufArray::string(uint64_t index) const {
  uint64_t place = places.at(index / kStride);
  for (uint64_t i = index % kStride; i > 0; --i) string_at(place);
  return string_at(place);
}

GgufFile::GgufFile(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

GgufFile::~GgufFile() = default;

uint32_t GgufFile::version() const {
  return impl_->version;
}

uint64_t GgufFile::alignment() const {
  return impl_->alignment;
}

const std::string& GgufFile::path() const {
  return impl_->label;
}

size_t GgufFile::file_bytes() const {
  size_t size = impl_->bytes.size();
  for (const auto& shard : impl_->shards) size += shard->bytes.size();
  return size;
}

const std::vector<std::pair<std::string_view, GgufValue>>& GgufFile::metadata() const {
  return impl_->metadata;
}

const GgufValue* GgufFile::find(std::string_view key) const {
  const auto entry = impl_->metadata_index.find(key);
  return entry == impl_->metadata_index.end() ? nullptr : &impl_->metadata[entry->second].second;
}

namespace {

[[noreturn]] void fail_get(const GgufFile& file, std::string_view key, std::string_view expected) {
  throw FormatError("[gguf] " + file.path() + ": metadata " + quoted(key) + ": expected " +
                    std::string(expected) + ", got " +
                    (file.find(key) == nullptr ? "no such key" : "another type"));
}

}  // namespace

std::string_view GgufFile::get_string(std::string_view key) const {
  const auto* value = std::get_if<std::string_view>(find(key));
  if (value == nullptr) fail_get(*this, key, "a string");
  return *value;
}

int64_t GgufFile::get_int(std::string_view key) const {
  const GgufValue* value = find(key);
  if (const auto* number = std::get_if<int64_t>(value)) return *number;
  const auto* number = std::get_if<uint64_t>(value);
  if (number == nullptr || *number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    fail_get(*this, key, "an integer below 2^63");
  }
  return static_cast<int64_t>(*number);
}

double GgufFile::get_float(std::string_view key) const {
  const auto* value = std::get_if<double>(find(key));
  if (value == nullptr) fail_get(*this, key, "a float");
  return *value;
}

const std::vector<GgufTensor>& GgufFile::tensors() const {
  return impl_->tensors;
}

const GgufTensor* GgufFile::find_tensor(std::string_view name) const {
  const auto entry = impl_->tensor_index.find(name);
  return entry == impl_->tensor_index.end() ? nullptr : &impl_->tensors[entry->second];
}

bool GgufFile::contains(std::string_view name) const {
  return find_tensor(name) != nullptr;
}

TensorView GgufFile::weight(std::string_view name) const {
  const GgufTensor* tensor = find_tensor(name);
  if (tensor == nullptr) {
    throw InvalidArgument("[gguf] " + path() + ": no tensor named " + quoted(name));
  }
  if (!tensor->dtype) {
    throw Unsupported("[gguf] " + path() + ": tensor " + quoted(name) + ": type " +
                      tensor->type_name + " is not supported");
  }
  return {tensor->data, *tensor->dtype, tensor->dims};
}

std::optional<WeightOrigin> GgufFile::origin(std::string_view name) const {
  const GgufTensor* tensor = find_tensor(name);
  if (tensor == nullptr || impl_->mapping == nullptr) return std::nullopt;
  const Impl& file = impl_->holder(*tensor);
  const auto offset = static_cast<uint64_t>(tensor->data - file.bytes.data());
  return WeightOrigin{file.label, file.mapping->state(), offset};
}

void GgufFile::release(std::string_view name, size_t begin, size_t end) const {
  const GgufTensor* tensor = find_tensor(name);
  if (tensor == nullptr || impl_->mapping == nullptr) return;
  end = std::min(end, tensor->num_bytes);
  if (begin >= end) return;
  // A fault maps as much of the file as the page cache holds in one piece, 2 MB at most: neighbours
  // that were dropped already, or are not wanted before other tensors.
  constexpr size_t kPiece = size_t{2} << 20;
  const std::span<const uint8_t> bytes = impl_->holder(*tensor).bytes;
  const size_t place = static_cast<size_t>(tensor->data - bytes.data());
  const size_t first = place + begin - std::min(kPiece, place + begin);
  const size_t last = std::min(place + end + kPiece, bytes.size());
  drop_mapped_pages(bytes.subspan(first, last - first));
}

}  // namespace effinfer
