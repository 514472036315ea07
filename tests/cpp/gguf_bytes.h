// GGUF files made byte by byte, sound or not.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace gguf_bytes {

// Numbers of value types and tensor types in the file.
enum : uint32_t { kU8 = 0, kU32 = 4, kI32 = 5, kF32 = 6, kBool = 7, kString = 8, kArray = 9 };
enum : uint32_t { kTypeF32 = 0, kTypeQ8_0 = 8, kTypeIq1S = 19, kTypeI2S = 36, kTypeUnknown = 77 };

// Bytes of a file under construction.
struct Bytes {
  std::vector<uint8_t> data;

  template <class T>
  Bytes& number(T value) {
    const size_t at = data.size();
    data.resize(at + sizeof(T));
    std::memcpy(&data[at], &value, sizeof(T));
    return *this;
  }
  Bytes& u32(uint32_t value) { return number(value); }
  Bytes& u64(uint64_t value) { return number(value); }
  Bytes& text(std::string_view value) {
    data.insert(data.end(), value.begin(), value.end());
    return *this;
  }
  Bytes& string(std::string_view value) { return u64(value.size()).text(value); }
  Bytes& header(uint64_t tensors, uint64_t metadata, uint32_t version = 3) {
    return text("GGUF").u32(version).u64(tensors).u64(metadata);
  }
  Bytes& tensor(std::string_view name, std::vector<uint64_t> dims, uint32_t type, uint64_t offset) {
    string(name).u32(static_cast<uint32_t>(dims.size()));
    for (const uint64_t dim : dims) u64(dim);
    return u32(type).u64(offset);
  }
  Bytes& pad(size_t alignment = 32) {
    while (data.size() % alignment != 0) data.push_back(0);
    return *this;
  }
  Bytes& fill(size_t count, uint8_t value) {
    data.insert(data.end(), count, value);
    return *this;
  }
};

// A path for a file of this test run.
inline std::string scratch(const std::string& name) {
  const std::string unique = "effinfer_test_" + std::to_string(::getpid()) + "_" + name;
  return (std::filesystem::temp_directory_path() / unique).string();
}

}  // namespace gguf_bytes
