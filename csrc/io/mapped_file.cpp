#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "effinfer/error.h"
#include "io/file_descriptor.h"

namespace effinfer {

namespace {

FileDescriptor open_file(const std::string& path) {
  return FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
}

int64_t nanoseconds(const timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

FileState file_state(int fd, const std::string& path) {
  if (fd < 0) throw FileError("[file] " + path + ": cannot open: " + errno_text());
  struct stat status;
  if (::fstat(fd, &status) != 0) {
    throw FileError("[file] " + path + ": cannot stat: " + errno_text());
  }
  if (!S_ISREG(status.st_mode)) {
    throw FileError("[file] " + path + ": expected a regular file, got " +
                    (S_ISDIR(status.st_mode) ? "a directory" : "a special file"));
  }
  return {static_cast<uint64_t>(status.st_dev), static_cast<uint64_t>(status.st_ino),
          static_cast<uint64_t>(status.st_size), nanoseconds(status.st_mtim),
          nanoseconds(status.st_ctim)};
}

FileState file_state(const std::string& path) {
  const FileDescriptor file = open_file(path);
  return file_state(file.get(), path);
}

MappedFile::MappedFile(const std::string& path) {
  const FileDescriptor file = open_file(path);
  state_ = file_state(file.get(), path);
  const auto size = static_cast<size_t>(state_.size);
  if (size == 0) return;
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (address == MAP_FAILED) {
    throw FileError("[file] " + path + ": cannot map: " + errno_text());
  }
  bytes_ = {static_cast<const uint8_t*>(address), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<uint8_t*>(bytes_.data()), bytes_.size());
}

}  // namespace effinfer
