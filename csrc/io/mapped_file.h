// A file mapped read-only into memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace effinfer {

class MappedFile {
 public:
  // Throws FileError: missing, a directory, unreadable. An empty file gives empty bytes. Shrinking
  // a mapped file makes later reads fault: replace model files by rename, never in place.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const uint8_t> bytes() const { return bytes_; }

 private:
  std::span<const uint8_t> bytes_;
};

}  // namespace effinfer
