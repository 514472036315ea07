#include "effinfer/gguf_writer.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "effinfer/error.h"
#include "io/atomic_file.h"
#include "io/gguf_cursor.h"
#include "io/gguf_impl.h"
#include "io/gguf_types.h"
#include "io/gguf_values.h"

namespace effinfer {
namespace {

constexpr uint64_t kAlignment = 32;
constexpr size_t kMaxNameLength = 65535;
constexpr int kMaxGgufRank = 4;

using gguf::append_number;
using gguf::append_string;
using gguf::ValueType;

[[noreturn]] void fail(const std::string& what) {
  throw InvalidArgument("[gguf] " + what);
}

void append_type(std::string& out, ValueType type) {
  append_number(out, static_cast<uint32_t>(type));
}

// The bytes of a value with its type before it, as in the file.
struct Encoder {
  std::string out;

  void operator()(uint64_t value) {
    if (value <= std::numeric_limits<uint32_t>::max()) {
      append_type(out, ValueType::u32);
      append_number(out, static_cast<uint32_t>(value));
    } else {
      append_type(out, ValueType::u64);
      append_number(out, value);
    }
  }
  void operator()(int64_t value) {
    if (value == static_cast<int32_t>(value)) {
      append_type(out, ValueType::i32);
      append_number(out, static_cast<int32_t>(value));
    } else {
      append_type(out, ValueType::i64);
      append_number(out, value);
    }
  }
  void operator()(double value) {
    append_type(out, ValueType::f32);
    append_number(out, static_cast<float>(value));
  }
  void operator()(bool value) {
    append_type(out, ValueType::boolean);
    append_number(out, static_cast<uint8_t>(value));
  }
  void operator()(std::string_view value) {
    append_type(out, ValueType::string);
    append_string(out, value);
  }
  void operator()(const GgufArray& array) {
    append_type(out, ValueType::array);
    append_type(out, gguf::value_type(array.type));
    append_number(out, array.size);
    out.append(reinterpret_cast<const char*>(array.bytes.data()), array.bytes.size());
  }
};

std::string tensor_info(std::string_view name, uint32_t type, const Dims& dims, uint64_t offset) {
  std::string out;
  append_string(out, name);
  append_number(out, static_cast<uint32_t>(dims.rank()));
  for (int axis = dims.rank(); axis > 0; --axis) {
    append_number(out, static_cast<uint64_t>(dims[axis - 1]));
  }
  append_number(out, type);
  append_number(out, offset);
  return out;
}

uint64_t padding(uint64_t bytes) {
  return (0 - bytes) & (kAlignment - 1);
}

}  // namespace

struct GgufWriter::Impl {
  AtomicFile file;
  std::vector<std::pair<std::string, std::string>> metadata;  // key, encoded value
  std::vector<std::pair<std::string, uint64_t>> tensors;      // name, bytes
  std::string tensor_infos;
  uint64_t data_bytes = 0;
  bool begun = false;
  size_t tensor = 0;     // that the next bytes are of
  uint64_t written = 0;  // bytes of it

  explicit Impl(const std::string& path) : file(path, "[gguf]") {}

  auto find(std::string_view key) {
    return std::find_if(metadata.begin(), metadata.end(),
                        [&](const auto& entry) { return entry.first == key; });
  }

  void set(std::string_view key, std::string value) {
    if (begun) fail("metadata: expected before the first data, got " + gguf::quoted(key));
    if (key.empty() || key.size() > kMaxNameLength) fail("key: expected 1 to 65535 bytes");
    const auto entry = find(key);
    if (entry != metadata.end()) {
      entry->second = std::move(value);
    } else {
      metadata.emplace_back(key, std::move(value));
    }
  }

  void write_zeros(uint64_t count) {
    const std::vector<char> zeros(count);
    file.write(zeros.data(), zeros.size());
  }

  void begin() {
    if (begun) return;
    begun = true;
    std::string header = "GGUF";
    append_number<uint32_t>(header, 3);
    append_number<uint64_t>(header, tensors.size());
    append_number<uint64_t>(header, metadata.size());
    for (const auto& [key, value] : metadata) {
      append_string(header, key);
      header += value;
    }
    header += tensor_infos;
    file.write(header.data(), header.size());
    write_zeros(padding(header.size()));
    skip_empty();
  }

  // Tensors without bytes are complete as they are.
  void skip_empty() {
    while (tensor < tensors.size() && tensors[tensor].second == written) {
      write_zeros(padding(written));
      written = 0;
      ++tensor;
    }
  }
};

GgufWriter::GgufWriter(const std::string& path) : impl_(std::make_unique<Impl>(path)) {}

GgufWriter::~GgufWriter() = default;

void GgufWriter::set(std::string_view key, const GgufValue& value) {
  if (key == "general.alignment") fail("key: general.alignment is 32 in what is written here");
  Encoder encoder;
  std::visit(encoder, value);
  impl_->set(key, std::move(encoder.out));
}

void GgufWriter::remove(std::string_view key) {
  const auto entry = impl_->find(key);
  if (entry != impl_->metadata.end()) impl_->metadata.erase(entry);
}

void GgufWriter::copy_metadata(const GgufFile& source) {
  const GgufFile::Impl& file = *source.impl_;
  for (size_t i = 0; i < file.metadata.size(); ++i) {
    const std::string_view key = file.metadata[i].first;
    // What is written here is one file.
    if (key == "general.alignment" || key.starts_with("split.")) continue;
    const uint64_t begin = file.metadata_begin[i] + sizeof(uint64_t) + key.size();
    const uint64_t end =
        i + 1 < file.metadata.size() ? file.metadata_begin[i + 1] : file.tensor_infos_begin;
    impl_->set(key,
               std::string(reinterpret_cast<const char*>(file.bytes.data()) + begin, end - begin));
  }
}

void GgufWriter::add_tensor(std::string_view name, DType dtype, const Dims& dims) {
  const gguf::TensorType* type = gguf::find_tensor_type(dtype);
  if (type == nullptr) {
    fail("tensor " + gguf::quoted(name) + ": expected a type of files, got " +
         std::string(effinfer::name(dtype)));
  }
  if (name.empty() || name.size() > kMaxNameLength || dims.rank() > kMaxGgufRank) {
    fail("tensor " + gguf::quoted(name) + ": expected a name of 1 to 65535 bytes and at most " +
         std::to_string(kMaxGgufRank) + " dimensions, got " + dims.to_string());
  }
  const auto same = [&](const auto& tensor) { return tensor.first == name; };
  if (impl_->begun || std::any_of(impl_->tensors.begin(), impl_->tensors.end(), same)) {
    fail("tensor " + gguf::quoted(name) + ": expected each once and before the first data");
  }
  const uint64_t bytes = TensorView{nullptr, dtype, dims}.num_bytes();
  impl_->tensor_infos += tensor_info(name, type->id, dims, impl_->data_bytes);
  impl_->tensors.emplace_back(name, bytes);
  impl_->data_bytes += bytes + padding(bytes);
}

void GgufWriter::write(const void* data, size_t size) {
  impl_->begin();
  if (size == 0) return;
  const uint64_t left = impl_->tensor < impl_->tensors.size()
                            ? impl_->tensors[impl_->tensor].second - impl_->written
                            : 0;
  if (size > left) {
    fail("data: expected at most " + std::to_string(left) + " bytes of " +
         (left == 0 ? "no more tensors" : gguf::quoted(impl_->tensors[impl_->tensor].first)) +
         ", got " + std::to_string(size));
  }
  impl_->file.write(data, size);
  impl_->written += size;
  impl_->skip_empty();
}

void GgufWriter::commit() {
  impl_->begin();
  if (impl_->tensor < impl_->tensors.size()) {
    fail("data: expected " + std::to_string(impl_->tensors[impl_->tensor].second - impl_->written) +
         " more bytes of " + gguf::quoted(impl_->tensors[impl_->tensor].first) + " before the end");
  }
  impl_->file.commit();
}

}  // namespace effinfer
