// Metadata values as they lie in GGUF files: their types' numbers, and writing them.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "effinfer/gguf.h"

namespace effinfer::gguf {

// Value types as numbered in the file.
enum class ValueType : uint32_t {
  u8 = 0,
  i8 = 1,
  u16 = 2,
  i16 = 3,
  u32 = 4,
  i32 = 5,
  f32 = 6,
  boolean = 7,
  string = 8,
  array = 9,
  u64 = 10,
  i64 = 11,
  f64 = 12
};

// GgufArray::Type has the file's order without `array`.
inline GgufArray::Type array_type(ValueType type) {
  const auto id = static_cast<uint32_t>(type);
  return static_cast<GgufArray::Type>(id > static_cast<uint32_t>(ValueType::array) ? id - 1 : id);
}
inline ValueType value_type(GgufArray::Type type) {
  const auto id = static_cast<uint32_t>(type);
  return static_cast<ValueType>(id >= static_cast<uint32_t>(ValueType::array) ? id + 1 : id);
}

template <class T>
void append_number(std::string& out, T value) {
  std::array<char, sizeof(T)> bytes;
  std::memcpy(bytes.data(), &value, sizeof(T));
  out.append(bytes.data(), bytes.size());
}

inline void append_string(std::string& out, std::string_view text) {
  append_number<uint64_t>(out, text.size());
  out.append(text);
}

}  // namespace effinfer::gguf
