#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "effinfer/error.h"
#include "io/file_descriptor.h"

namespace effinfer {

MappedFile::MappedFile(const std::string& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.valid()) throw FileError("[file] " + path + ": cannot open: " + errno_text());
  struct stat status;
  if (::fstat(file.get(), &status) != 0) {
    throw FileError("[file] " + path + ": cannot stat: " + errno_text());
  }
  if (!S_ISREG(status.st_mode)) {
    throw FileError("[file] " + path + ": expected a regular file, got " +
                    (S_ISDIR(status.st_mode) ? "a directory" : "a special file"));
  }
  const auto size = static_cast<size_t>(status.st_size);
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
