// Copies a GGUF file with one more string in its metadata.
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "effinfer/error.h"
#include "effinfer/gguf.h"
#include "io/file_descriptor.h"
#include "io/gguf_impl.h"

namespace effinfer {
namespace {

constexpr uint32_t kStringType = 8;

// A file that appears under its name complete or not at all: written beside it, then renamed.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path)
      : path_(path), temporary_(temporary_name(path)), file_(create(temporary_)) {
    if (!file_.valid()) fail("cannot create", temporary_);
  }
  ~AtomicFile() {
    if (!committed_) ::unlink(temporary_.c_str());
  }
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  uint64_t written() const { return written_; }

  void write(const void* data, size_t size) {
    constexpr size_t kChunk = size_t{16} << 20;
    const auto* next = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t count = ::write(file_.get(), next, std::min(size, kChunk));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) fail("cannot write", temporary_);
      next += count;
      size -= static_cast<size_t>(count);
      written_ += static_cast<uint64_t>(count);
    }
  }

  // Data first, then the name, then the directory that holds the name: what survives a power cut is
  // the old file or the whole new one.
  void commit() {
    if (::fsync(file_.get()) != 0) fail("cannot flush", temporary_);
    if (file_.close() != 0) fail("cannot close", temporary_);
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot rename to", path_);
    committed_ = true;
    const std::string folder = std::filesystem::path(path_).parent_path().string();
    const FileDescriptor directory(
        ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (directory.valid()) ::fsync(directory.get());  // not every file system can
  }

 private:
  static std::string temporary_name(const std::string& path) {
    static std::atomic<uint64_t> serial{0};
    return path + ".tmp." + std::to_string(::getpid()) + "." + std::to_string(serial++);
  }
  static int create(const std::string& path) {
    return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  }
  [[noreturn]] static void fail(const char* what, const std::string& path) {
    const std::string reason = errno_text();
    throw FileError("[gguf] " + std::string(what) + " " + path + ": " + reason);
  }

  std::string path_;
  std::string temporary_;
  FileDescriptor file_;
  uint64_t written_ = 0;
  bool committed_ = false;
};

template <class T>
void append_number(std::string& out, T value) {
  std::array<char, sizeof(T)> bytes;
  std::memcpy(bytes.data(), &value, sizeof(T));
  out.append(bytes.data(), bytes.size());
}

void append_string(std::string& out, std::string_view text) {
  append_number<uint64_t>(out, text.size());
  out.append(text);
}

}  // namespace

void write_gguf_with_metadata(const GgufFile& source, std::string_view key, std::string_view value,
                              const std::string& path) {
  constexpr size_t kMaxKeyLength = 65535;
  if (key.empty() || key.size() > kMaxKeyLength || key == "general.alignment") {
    throw InvalidArgument("[gguf] key: expected 1 to 65535 bytes, and not general.alignment");
  }
  const GgufFile::Impl& file = *source.impl_;
  const auto replaced = file.metadata_index.find(key);
  const bool is_new = replaced == file.metadata_index.end();

  std::string header = "GGUF";
  append_number<uint32_t>(header, file.version);
  append_number<uint64_t>(header, file.tensors.size());
  append_number<uint64_t>(header, file.metadata.size() + (is_new ? 1 : 0));
  std::string entry;
  append_string(entry, key);
  append_number<uint32_t>(entry, kStringType);
  append_string(entry, value);

  // The metadata in three parts: before the entry, the entry, after it.
  const size_t index = is_new ? file.metadata.size() : replaced->second;
  const auto begin_of = [&](size_t i) {
    return i < file.metadata_begin.size() ? file.metadata_begin[i] : file.tensor_infos_begin;
  };
  const auto copy = [&](AtomicFile& out, uint64_t begin, uint64_t end) {
    out.write(file.bytes.data() + begin, end - begin);
  };
  AtomicFile out(path);
  out.write(header.data(), header.size());
  copy(out, begin_of(0), begin_of(index));
  out.write(entry.data(), entry.size());
  copy(out, begin_of(is_new ? index : index + 1), file.tensor_infos_end);

  const std::vector<char> zeros((0 - out.written()) & (file.alignment - 1));
  out.write(zeros.data(), zeros.size());
  copy(out, file.data_begin, file.bytes.size());
  out.commit();
}

}  // namespace effinfer
