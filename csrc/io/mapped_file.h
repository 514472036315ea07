// A file mapped read-only into memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "effinfer/weights.h"

namespace effinfer {

// The state of an open file; throws FileError unless it is a regular one. `path` is for messages.
FileState file_state(int fd, const std::string& path);

class MappedFile {
 public:
  // Throws FileError: missing, a directory, unreadable. An empty file gives empty bytes. Shrinking
  // a mapped file makes later reads fault: replace model files by rename, never in place.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const uint8_t> bytes() const { return bytes_; }
  const FileState& state() const { return state_; }  // when it was mapped

 private:
  FileState state_;
  std::span<const uint8_t> bytes_;
};

}  // namespace effinfer
