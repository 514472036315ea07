// Fuzzes the GGUF reader: damaged files must parse or give a typed error, and whatever parsed must
// be readable to its last byte.
//
//   fuzz_gguf CORPUS_DIR MUTATIONS [SEED]     mutates the corpus; needs no fuzzing engine
//
// With -DEFFINFER_LIBFUZZER the main() is left out, for -fsanitize=fuzzer.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "effinfer/error.h"
#include "effinfer/gguf.h"

namespace {

using namespace effinfer;
using Bytes = std::vector<uint8_t>;

volatile uint8_t sink;  // reads that are not optimised away

void touch(const void* data, size_t size) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i < size; ++i) sink = bytes[i];
}

void touch_value(const GgufValue& value) {
  if (const auto* text = std::get_if<std::string_view>(&value)) {
    touch(text->data(), text->size());
  } else if (const auto* array = std::get_if<GgufArray>(&value)) {
    touch(array->bytes.data(), array->bytes.size());
    if (array->type == GgufArray::Type::string) {
      array->for_each_string([](std::string_view item) { touch(item.data(), item.size()); });
    }
  }
}

void touch_tensor(const GgufFile& file, const GgufTensor& tensor) {
  touch(tensor.name.data(), tensor.name.size());
  if (tensor.num_bytes > 0) {
    touch(tensor.data, 1);
    touch(tensor.data + tensor.num_bytes - 1, 1);
  }
  try {
    const TensorView view = file.weight(tensor.name);
    if (view.num_bytes() != tensor.num_bytes) throw InternalError("[fuzz] sizes differ");
    const DTypeInfo& info = dtype_info(view.dtype);
    if (!info.quantized || tensor.num_bytes == 0) return;
    std::array<float, 256> block;
    dequantize_part(view, view.dims.num_elements() - info.block_size, info.block_size,
                    block.data());
  } catch (const Unsupported&) {
    if (tensor.dtype) throw;
  }
}

// Returns whether the bytes parsed. Only the errors that the reader promises are caught.
bool parse_and_touch(const uint8_t* data, size_t size) {
  try {
    const auto file = GgufFile::parse({data, size}, "fuzz");
    for (const auto& [key, value] : file->metadata()) {
      touch(key.data(), key.size());
      if (file->find(key) != &value) throw InternalError("[fuzz] a key is not found");
      touch_value(value);
    }
    for (const GgufTensor& tensor : file->tensors()) touch_tensor(*file, tensor);
    return true;
  } catch (const FormatError&) {
    return false;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  parse_and_touch(data, size);
  return 0;
}

#ifndef EFFINFER_LIBFUZZER

namespace {

// A number in a file that structure depends on: a count, length, type, dimension or offset.
struct Field {
  size_t offset;
  size_t width;
};

struct Seed {
  Bytes bytes;
  std::vector<Field> fields;
};

template <class T>
T load(const Bytes& bytes, size_t offset) {
  T value{};
  if (offset + sizeof(T) <= bytes.size()) std::memcpy(&value, &bytes[offset], sizeof(T));
  return value;
}

// Walks the header of an undamaged file and notes its fields.
class FieldFinder {
 public:
  explicit FieldFinder(const Bytes& bytes) : bytes_(bytes) {}

  std::vector<Field> find() {
    position_ = 4;
    number(4);
    const uint64_t tensors = number(8);
    const uint64_t metadata = number(8);
    for (uint64_t i = 0; i < metadata; ++i) {
      position_ += number(8);
      value(static_cast<uint32_t>(number(4)));
    }
    for (uint64_t i = 0; i < tensors; ++i) {
      position_ += number(8);
      const uint64_t rank = number(4);
      for (uint64_t d = 0; d < rank; ++d) number(8);
      number(4);
      number(8);
    }
    return std::move(fields_);
  }

 private:
  uint64_t number(size_t width) {
    const uint64_t value =
        width == 4 ? load<uint32_t>(bytes_, position_) : load<uint64_t>(bytes_, position_);
    fields_.push_back({position_, width});
    position_ += width;
    return value;
  }
  void value(uint32_t type) {
    constexpr std::array<size_t, 13> kWidths = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    if (type == 8) {
      position_ += number(8);
    } else if (type == 9) {
      const auto element = static_cast<uint32_t>(number(4));
      const uint64_t count = number(8);
      for (uint64_t i = 0; i < count; ++i) value(element);
    } else {
      position_ += kWidths.at(type);
    }
  }

  const Bytes& bytes_;
  std::vector<Field> fields_;
  size_t position_ = 0;
};

class Mutator {
 public:
  Mutator(const std::vector<Seed>& seeds, uint64_t seed) : seeds_(seeds), random_(seed) {}

  Bytes next() {
    const Seed& seed = seeds_[below(seeds_.size())];
    Bytes bytes = seed.bytes;
    for (uint64_t edits = 1 + below(3); edits > 0; --edits) {
      if (below(2) == 0 && !seed.fields.empty()) {
        edit_field(bytes, seed.fields[below(seed.fields.size())]);
      } else {
        edit_bytes(bytes);
      }
    }
    return bytes;
  }

 private:
  uint64_t below(uint64_t bound) { return bound == 0 ? 0 : random_() % bound; }

  uint64_t interesting(uint64_t old, size_t size) {
    switch (below(8)) {
      case 0:
        return below(20);  // small: types, ranks, versions
      case 1:
        return old + 1;
      case 2:
        return old - 1;
      case 3:
        return size + below(3) - 1;
      case 4:
        return uint64_t{1} << below(64);
      case 5:
        return (uint64_t{1} << below(64)) - 1;
      case 6:
        return ~below(64);
      default:
        return random_();
    }
  }

  void edit_field(Bytes& bytes, const Field& field) {
    if (field.offset + field.width > bytes.size()) return;
    const uint64_t old = load<uint64_t>(bytes, field.offset);
    const uint64_t value = interesting(old, bytes.size());
    std::memcpy(&bytes[field.offset], &value, field.width);
  }

  void edit_bytes(Bytes& bytes) {
    if (bytes.empty()) return;
    const size_t at = below(bytes.size());
    const auto here = bytes.begin() + static_cast<ptrdiff_t>(at);
    const auto end = here + static_cast<ptrdiff_t>(below(std::min<size_t>(bytes.size() - at, 64)));
    switch (below(7)) {
      case 0:
      case 1:
        bytes[at] ^= static_cast<uint8_t>(1u << below(8));
        return;
      case 2:
        bytes[at] = static_cast<uint8_t>(random_());
        return;
      case 3:
        bytes.resize(at);
        return;
      case 4:
        bytes.erase(here, end);
        return;
      case 5: {
        const Bytes copy(here, end);
        const auto target = bytes.begin() + static_cast<ptrdiff_t>(below(bytes.size()));
        bytes.insert(target, copy.begin(), copy.end());
        return;
      }
      default: {  // the beginning of this file, the end of another
        const Bytes& other = seeds_[below(seeds_.size())].bytes;
        bytes.resize(at);
        const size_t from = below(other.size());
        bytes.insert(bytes.end(), other.begin() + static_cast<ptrdiff_t>(from), other.end());
        return;
      }
    }
  }

  const std::vector<Seed>& seeds_;
  std::mt19937_64 random_;
};

std::vector<Seed> load_corpus(const std::string& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.is_regular_file()) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<Seed> seeds;
  for (const auto& path : paths) {
    std::ifstream in(path, std::ios::binary);
    Seed seed;
    seed.bytes.assign(std::istreambuf_iterator<char>(in), {});
    // Each file is sound, so that the mutations start from what a reader accepts.
    if (!parse_and_touch(seed.bytes.data(), seed.bytes.size())) {
      throw InvalidArgument("[fuzz] " + path.string() + ": expected a readable file");
    }
    seed.fields = FieldFinder(seed.bytes).find();
    seeds.push_back(std::move(seed));
  }
  if (seeds.empty()) throw InvalidArgument("[fuzz] " + folder + ": expected files, got none");
  return seeds;
}

int fuzz(const std::string& folder, uint64_t mutations, uint64_t seed) {
  const std::vector<Seed> seeds = load_corpus(folder);
  uint64_t parsed = 0;
  for (uint64_t i = 0; i < mutations; ++i) {
    const Bytes bytes = Mutator(seeds, seed + i).next();
    // A block of exactly this size, so that the address sanitizer sees the first byte beyond it.
    const auto exact = std::make_unique<uint8_t[]>(bytes.size());
    std::copy(bytes.begin(), bytes.end(), exact.get());
    try {
      parsed += parse_and_touch(exact.get(), bytes.size()) ? 1 : 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "fuzz_gguf: seed %llu: %s\n", static_cast<unsigned long long>(seed + i),
                   error.what());
      return 1;
    }
  }
  std::printf("fuzz_gguf: %llu mutations of %zu files: %llu readable, the rest typed errors\n",
              static_cast<unsigned long long>(mutations), seeds.size(),
              static_cast<unsigned long long>(parsed));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || argc > 4) {
    std::fprintf(stderr, "usage: fuzz_gguf CORPUS_DIR MUTATIONS [SEED]\n");
    return 2;
  }
  try {
    return fuzz(argv[1], std::strtoull(argv[2], nullptr, 10),
                argc == 4 ? std::strtoull(argv[3], nullptr, 10) : 1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fuzz_gguf: %s\n", error.what());
    return 2;
  }
}

#endif
