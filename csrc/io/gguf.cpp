#include "effinfer/gguf.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "core/mapped_pages.h"
#include "effinfer/error.h"
#include "io/gguf_cursor.h"
#include "io/gguf_impl.h"
#include "io/gguf_types.h"
#include "io/gguf_values.h"

namespace effinfer {

static_assert(std::endian::native == std::endian::little,
              "GGUF numbers are read as they lie in the file: little-endian");

namespace {

using gguf::array_type;
using gguf::Cursor;
using gguf::quoted;
using gguf::ValueType;

constexpr uint32_t kMaxGgufRank = 4;
constexpr uint64_t kMaxNameLength = 65535;  // of keys and tensor names
constexpr uint64_t kMinMetadataBytes = 8 + 4 + 1;
constexpr uint64_t kMinTensorBytes = 8 + 4 + 4 + 8;
constexpr uint64_t kMaxAlignment = uint64_t{1} << 30;

bool read_bool(Cursor& cursor, const std::string& what) {
  const auto value = cursor.read<uint8_t>(what);
  if (value > 1) cursor.fail(what + ": expected a bool of 0 or 1, got " + std::to_string(value));
  return value == 1;
}

// Bytes of a number of this type; 0 for string and array.
uint64_t number_bytes(ValueType type) {
  switch (type) {
    case ValueType::u8:
    case ValueType::i8:
    case ValueType::boolean:
      return 1;
    case ValueType::u16:
    case ValueType::i16:
      return 2;
    case ValueType::u32:
    case ValueType::i32:
    case ValueType::f32:
      return 4;
    case ValueType::u64:
    case ValueType::i64:
    case ValueType::f64:
      return 8;
    case ValueType::string:
    case ValueType::array:
      break;
  }
  return 0;
}

GgufArray read_array(Cursor& cursor, const std::string& what) {
  const auto type_id = cursor.read<uint32_t>(what);
  if (type_id > static_cast<uint32_t>(ValueType::f64)) {
    cursor.fail(what + ": expected an element type in 0..12, got " + std::to_string(type_id));
  }
  const auto type = static_cast<ValueType>(type_id);
  if (type == ValueType::array) {
    cursor.fail(what + ": expected an array of numbers, bools or strings, got an array of arrays");
  }
  GgufArray array;
  array.type = array_type(type);
  if (type == ValueType::string) {
    array.size = cursor.read_count(sizeof(uint64_t), what);
    array.places.reserve(array.size / GgufArray::kStride + 1);
    const uint64_t begin = cursor.position();
    const uint8_t* data = cursor.read_bytes(0, what).data();
    for (uint64_t i = 0; i < array.size; ++i) {
      if (i % GgufArray::kStride == 0) array.places.push_back(cursor.position() - begin);
      cursor.read_string(what);
    }
    array.bytes = {data, cursor.position() - begin};
    return array;
  }
  const uint64_t element = number_bytes(type);
  array.size = cursor.read_count(element, what);
  array.bytes = cursor.read_bytes(array.size * element, what);
  if (type == ValueType::boolean &&
      std::any_of(array.bytes.begin(), array.bytes.end(), [](uint8_t b) { return b > 1; })) {
    cursor.fail(what + ": expected bools of 0 or 1, got another byte");
  }
  return array;
}

GgufValue read_value(Cursor& cursor, std::string_view key) {
  const std::string what = "metadata " + quoted(key);
  const auto type_id = cursor.read<uint32_t>(what);
  switch (static_cast<ValueType>(type_id)) {
    case ValueType::u8:
      return uint64_t{cursor.read<uint8_t>(what)};
    case ValueType::i8:
      return int64_t{cursor.read<int8_t>(what)};
    case ValueType::u16:
      return uint64_t{cursor.read<uint16_t>(what)};
    case ValueType::i16:
      return int64_t{cursor.read<int16_t>(what)};
    case ValueType::u32:
      return uint64_t{cursor.read<uint32_t>(what)};
    case ValueType::i32:
      return int64_t{cursor.read<int32_t>(what)};
    case ValueType::u64:
      return cursor.read<uint64_t>(what);
    case ValueType::i64:
      return cursor.read<int64_t>(what);
    case ValueType::f32:
      return double{cursor.read<float>(what)};
    case ValueType::f64:
      return cursor.read<double>(what);
    case ValueType::boolean:
      return read_bool(cursor, what);
    case ValueType::string:
      return cursor.read_string(what);
    case ValueType::array:
      return read_array(cursor, what);
  }
  cursor.fail(what + ": expected a value type in 0..12, got " + std::to_string(type_id));
}

void check_name_length(const Cursor& cursor, std::string_view name, std::string_view what) {
  if (name.size() > kMaxNameLength) {
    cursor.fail(std::string(what) + " " + quoted(name) + ": expected at most " +
                std::to_string(kMaxNameLength) + " bytes, got " + std::to_string(name.size()));
  }
}

uint32_t read_version(Cursor& cursor) {
  if (cursor.remaining() == 0) cursor.fail("expected a GGUF file, got no bytes");
  const auto magic = cursor.read_bytes(4, "magic");
  if (std::memcmp(magic.data(), "GGUF", 4) != 0) {
    const std::string_view got(reinterpret_cast<const char*>(magic.data()), 4);
    cursor.fail("magic: expected \"GGUF\", got " +
                (std::all_of(got.begin(), got.end(), [](char c) { return c >= 32 && c < 127; })
                     ? quoted(got)
                     : "other bytes"));
  }
  const auto version = cursor.read<uint32_t>("version");
  if (version != 0 && (version & 0xffffu) == 0) {
    cursor.fail("byte order: expected little-endian, got a big-endian file");
  }
  if (version != 2 && version != 3) {
    cursor.fail("version: expected 2 or 3, got " + std::to_string(version));
  }
  return version;
}

void read_metadata(Cursor& cursor, uint64_t count, GgufFile::Impl& file) {
  file.metadata.reserve(count);
  file.metadata_begin.reserve(count);
  file.metadata_index.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    file.metadata_begin.push_back(cursor.position());
    const std::string_view key = cursor.read_string("metadata key");
    check_name_length(cursor, key, "metadata key");
    if (!file.metadata_index.emplace(key, i).second) {
      cursor.fail("metadata " + quoted(key) + ": expected each key once, got it twice");
    }
    file.metadata.emplace_back(key, read_value(cursor, key));
  }
  file.tensor_infos_begin = cursor.position();
}

void read_alignment(const Cursor& cursor, GgufFile::Impl& file) {
  const auto entry = file.metadata_index.find("general.alignment");
  if (entry == file.metadata_index.end()) return;
  const auto* value = std::get_if<uint64_t>(&file.metadata[entry->second].second);
  if (value == nullptr || !std::has_single_bit(*value) || *value > kMaxAlignment) {
    cursor.fail("general.alignment: expected a power of two up to 2^30, got " +
                (value == nullptr ? "another type" : std::to_string(*value)));
  }
  file.alignment = *value;
}

// The dims as in the file, innermost first, into `tensor`, outermost first. Returns the number of
// bytes, or nothing when the type's size is unknown.
std::optional<uint64_t> read_shape(Cursor& cursor, const std::string& what, GgufTensor& tensor) {
  const auto rank = cursor.read<uint32_t>(what);
  if (rank > kMaxGgufRank) {
    cursor.fail(what + ": expected at most " + std::to_string(kMaxGgufRank) + " dimensions, got " +
                std::to_string(rank));
  }
  std::array<int64_t, kMaxGgufRank> dims{};
  int64_t elements = 1;  // zeros left out, so that no order of multiplication can overflow
  bool empty = false;
  for (uint32_t i = 0; i < rank; ++i) {
    const auto dim = cursor.read<uint64_t>(what);
    if (dim > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) ||
        __builtin_mul_overflow(elements, std::max<int64_t>(static_cast<int64_t>(dim), 1),
                               &elements)) {
      cursor.fail(what + ": expected fewer than 2^63 elements, got dimension " +
                  std::to_string(dim));
    }
    dims[i] = static_cast<int64_t>(dim);
    empty = empty || dim == 0;
  }
  for (uint32_t i = rank; i > 0; --i) tensor.dims.push_back(dims[i - 1]);

  tensor.type_id = cursor.read<uint32_t>(what);
  const gguf::TensorType* type = gguf::find_tensor_type(tensor.type_id);
  if (type == nullptr) {
    tensor.type_name = "type " + std::to_string(tensor.type_id);
    return std::nullopt;
  }
  tensor.type_name = type->name;
  tensor.dtype = type->dtype;
  const int64_t row = rank == 0 ? 1 : dims[0];
  if (row % type->block_size != 0) {
    cursor.fail(what + ": expected rows of a multiple of " + std::to_string(type->block_size) +
                " elements for type " + tensor.type_name + ", got shape " +
                tensor.dims.to_string());
  }
  if (empty) return 0;
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(static_cast<uint64_t>(elements) / type->block_size,
                             uint64_t{type->block_bytes}, &bytes)) {
    cursor.fail(what + ": expected fewer than 2^64 bytes, got shape " + tensor.dims.to_string());
  }
  return bytes + type->tail_bytes;
}

struct Extent {
  uint64_t offset;  // from the beginning of the data
  uint64_t bytes;   // 0 when unknown
  size_t tensor;
};

std::vector<Extent> read_tensor_infos(Cursor& cursor, uint64_t count, GgufFile::Impl& file) {
  std::vector<Extent> extents;
  extents.reserve(count);
  file.tensors.reserve(count);
  file.tensor_index.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    GgufTensor tensor;
    tensor.name = cursor.read_string("tensor name");
    check_name_length(cursor, tensor.name, "tensor name");
    const std::string what = "tensor " + quoted(tensor.name);
    if (!file.tensor_index.emplace(tensor.name, i).second) {
      cursor.fail(what + ": expected each name once, got it twice");
    }
    const uint64_t bytes = read_shape(cursor, what, tensor).value_or(0);
    const auto offset = cursor.read<uint64_t>(what);
    if (offset % file.alignment != 0) {
      cursor.fail(what + ": expected an offset that is a multiple of " +
                  std::to_string(file.alignment) + ", got " + std::to_string(offset));
    }
    tensor.num_bytes = bytes;
    extents.push_back({offset, bytes, i});
    file.tensors.push_back(std::move(tensor));
  }
  file.tensor_infos_end = cursor.position();
  return extents;
}

// Checks that each tensor lies in the file and that no two share a byte; sets the data pointers.
void place_tensors(const Cursor& cursor, std::vector<Extent> extents, GgufFile::Impl& file) {
  const uint64_t size = file.bytes.size();
  const uint64_t padding = (0 - file.tensor_infos_end) & (file.alignment - 1);
  file.data_begin = std::min(size, file.tensor_infos_end + padding);
  const uint64_t available = size - file.data_begin;
  for (const Extent& extent : extents) {
    GgufTensor& tensor = file.tensors[extent.tensor];
    if (extent.offset > available || extent.bytes > available - extent.offset) {
      cursor.fail("tensor " + quoted(tensor.name) + ": expected " + std::to_string(extent.bytes) +
                  " bytes at offset " + std::to_string(extent.offset) + " of the data, got " +
                  std::to_string(available) + " bytes of data in all");
    }
    tensor.data = file.bytes.data() + file.data_begin + extent.offset;
  }
  std::erase_if(extents, [](const Extent& extent) { return extent.bytes == 0; });
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.offset < b.offset; });
  for (size_t i = 1; i < extents.size(); ++i) {
    if (extents[i - 1].offset + extents[i - 1].bytes > extents[i].offset) {
      cursor.fail("tensors " + quoted(file.tensors[extents[i - 1].tensor].name) + " and " +
                  quoted(file.tensors[extents[i].tensor].name) +
                  ": expected separate data, got an overlap");
    }
  }
}

void parse_file(GgufFile::Impl& file) {
  Cursor cursor(file.bytes, file.label);
  file.version = read_version(cursor);
  const auto tensor_count = cursor.read<uint64_t>("tensor count");
  const auto metadata_count = cursor.read_count(kMinMetadataBytes, "metadata count");
  cursor.check_count(tensor_count, kMinTensorBytes, "tensor count");
  read_metadata(cursor, metadata_count, file);
  read_alignment(cursor, file);
  cursor.check_count(tensor_count, kMinTensorBytes, "tensor count");
  place_tensors(cursor, read_tensor_infos(cursor, tensor_count, file), file);
}

}  // namespace

std::unique_ptr<GgufFile::Impl> open_gguf(const std::string& path) {
  auto impl = std::make_unique<GgufFile::Impl>();
  impl->mapping = std::make_unique<MappedFile>(path);
  impl->bytes = impl->mapping->bytes();
  impl->label = path;
  parse_file(*impl);
  // Vocabularies take megabytes, and are read again only by a tokenizer.
  drop_mapped_pages(impl->bytes.first(impl->data_begin));
  return impl;
}

std::shared_ptr<GgufFile> GgufFile::open(const std::string& path) {
  std::unique_ptr<Impl> impl = open_gguf(path);
  open_shards(*impl);
  return std::shared_ptr<GgufFile>(new GgufFile(std::move(impl)));
}

std::shared_ptr<GgufFile> GgufFile::parse(std::span<const uint8_t> bytes, std::string label) {
  auto impl = std::make_unique<Impl>();
  impl->bytes = bytes;
  impl->label = std::move(label);
  parse_file(*impl);
  return std::shared_ptr<GgufFile>(new GgufFile(std::move(impl)));
}

}  // namespace effinfer
