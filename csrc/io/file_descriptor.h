// A POSIX file descriptor that closes itself, and what errno says.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

namespace effinfer {

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  // Closes now; returns what close() returned.
  int close() {
    const int status = ::close(fd_);
    fd_ = -1;
    return status;
  }

 private:
  int fd_;
};

inline std::string errno_text() {
  return std::error_code(errno, std::generic_category()).message();
}

}  // namespace effinfer
