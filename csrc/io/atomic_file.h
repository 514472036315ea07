// A file that appears under its name complete or not at all.
#pragma once

#include <cstdint>
#include <string>

#include "io/file_descriptor.h"

namespace effinfer {

// Written beside its place, then renamed; without commit() nothing is left. Links are followed.
// Throws FileError, whose message begins with `label`.
class AtomicFile {
 public:
  AtomicFile(const std::string& path, std::string label);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  uint64_t written() const { return written_; }
  void write(const void* data, size_t size);
  // Data first, then the name, then the directory that holds the name: what survives a power cut is
  // the old file or the whole new one.
  void commit();

 private:
  [[noreturn]] void fail(const char* what, const std::string& path) const;

  std::string label_;
  std::string path_;
  std::string temporary_;
  FileDescriptor file_;
  uint64_t written_ = 0;
  bool committed_ = false;
};

}  // namespace effinfer
