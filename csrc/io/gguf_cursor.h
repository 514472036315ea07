// A reading position in the bytes of a GGUF file: nothing is read, and no count is believed, before
// it was compared with what is left of the file.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "effinfer/error.h"

namespace effinfer::gguf {

// A name from a file or a caller for an error message: shortened, control characters replaced.
inline std::string quoted(std::string_view text) {
  constexpr size_t kMaxLength = 80;
  std::string out = "\"";
  for (const char c : text.substr(0, kMaxLength)) {
    out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  }
  return out + (text.size() > kMaxLength ? "...\"" : "\"");
}

class Cursor {
 public:
  Cursor(std::span<const uint8_t> bytes, const std::string& label) : bytes_(bytes), label_(label) {}

  uint64_t position() const { return position_; }
  uint64_t remaining() const { return bytes_.size() - position_; }

  [[noreturn]] void fail(const std::string& what) const {
    throw FormatError("[gguf] " + label_ + ": " + what);
  }

  std::span<const uint8_t> read_bytes(uint64_t count, std::string_view what) {
    if (count > remaining()) fail_short(count, what);
    const auto result = bytes_.subspan(position_, count);
    position_ += count;
    return result;
  }

  // A little-endian number.
  template <class T>
  T read(std::string_view what) {
    T value;
    std::memcpy(&value, read_bytes(sizeof(T), what).data(), sizeof(T));
    return value;
  }

  // [length u64][bytes], no terminator.
  std::string_view read_string(std::string_view what) {
    const auto length = read<uint64_t>(what);
    const auto bytes = read_bytes(length, what);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  // A count of things that take at least `min_bytes` each in the rest of the file.
  uint64_t read_count(uint64_t min_bytes, std::string_view what) {
    const auto count = read<uint64_t>(what);
    check_count(count, min_bytes, what);
    return count;
  }

  void check_count(uint64_t count, uint64_t min_bytes, std::string_view what) const {
    if (count > remaining() / min_bytes) {
      fail(std::string(what) + ": expected at most " + std::to_string(remaining() / min_bytes) +
           ", which is what the rest of the file can hold, got " + std::to_string(count));
    }
  }

 private:
  [[noreturn]] void fail_short(uint64_t count, std::string_view what) const {
    fail("truncated in " + std::string(what) + ": expected " + std::to_string(count) +
         " bytes at offset " + std::to_string(position_) + ", got " + std::to_string(remaining()));
  }

  std::span<const uint8_t> bytes_;
  const std::string& label_;
  uint64_t position_ = 0;
};

}  // namespace effinfer::gguf
