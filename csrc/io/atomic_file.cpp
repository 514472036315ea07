#include "io/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "effinfer/error.h"

namespace effinfer {
namespace {

std::string temporary_name(const std::string& path) {
  static std::atomic<uint64_t> serial{0};
  return path + ".tmp." + std::to_string(::getpid()) + "." + std::to_string(serial++);
}

// Where a link leads to. What is no file, as a device, would not be written but replaced.
std::string place_of(const std::string& path, const std::string& label) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) return path;
  if (!std::filesystem::is_regular_file(status)) {
    throw FileError(label + " cannot write " + path + ": expected a file");
  }
  const std::filesystem::path place = std::filesystem::canonical(path, error);
  return error ? path : place.string();
}

int create(const std::string& path) {
  return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path, std::string label)
    : label_(std::move(label)),
      path_(place_of(path, label_)),
      temporary_(temporary_name(path_)),
      file_(create(temporary_)) {
  if (!file_.valid()) fail("cannot create", path_);
}

AtomicFile::~AtomicFile() {
  if (!committed_) ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, size_t size) {
  constexpr size_t kChunk = size_t{16} << 20;
  const auto* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t count = ::write(file_.get(), next, std::min(size, kChunk));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail("cannot write", path_);
    next += count;
    size -= static_cast<size_t>(count);
    written_ += static_cast<uint64_t>(count);
  }
}

void AtomicFile::commit() {
  if (::fsync(file_.get()) != 0) fail("cannot write", path_);
  if (file_.close() != 0) fail("cannot write", path_);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot write", path_);
  committed_ = true;
  const std::string folder = std::filesystem::path(path_).parent_path().string();
  const FileDescriptor directory(
      ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.valid()) ::fsync(directory.get());  // not every file system can
}

void AtomicFile::fail(const char* what, const std::string& path) const {
  const std::string reason = errno_text();
  throw FileError(label_ + " " + what + " " + path + ": " + reason);
}

}  // namespace effinfer
