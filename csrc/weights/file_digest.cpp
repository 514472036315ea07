// A record is one line of text named after the file's device and inode:
//
//   effinfer file 1 <device> <inode> <size> <modified ns> <changed ns> <digested at ns>
//   <digest high> <digest low> <check>
//
// where the check is a digest of what stands before it. A file system's clock ticks in steps of up
// to two seconds: a file that changed less than that before it was read may have changed again
// without looking different, so such a record is not trusted (git calls these "racily clean").
#include "weights/file_digest.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <sstream>
#include <vector>

#include "effinfer/error.h"
#include "io/atomic_file.h"
#include "io/mapped_file.h"

namespace effinfer::weights {
namespace {

constexpr int64_t kClockStepNs = 2'000'000'000;

int64_t now_ns() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

std::string record_path(const FileState& state, const std::string& folder) {
  return folder + "/" + std::to_string(state.device) + "-" + std::to_string(state.inode) + ".file";
}

std::string record_head(const FileState& state) {
  std::ostringstream text;
  text << "effinfer file 1 " << state.device << ' ' << state.inode << ' ' << state.size << ' '
       << state.modified_ns << ' ' << state.changed_ns << ' ';
  return text.str();
}

std::string check_of(const std::string& text) {
  return to_hex(digest_chunk({reinterpret_cast<const uint8_t*>(text.data()), text.size()}));
}

bool read_record(const FileState& state, const std::string& folder, Digest& digest) {
  std::ifstream file(record_path(state, folder));
  const std::string line{std::istreambuf_iterator<char>(file), {}};
  const std::string head = record_head(state);
  const size_t space = line.rfind(' ');
  if (!line.starts_with(head) || space == std::string::npos ||
      line.substr(space + 1) != check_of(line.substr(0, space))) {
    return false;
  }
  std::istringstream rest(line.substr(head.size()));
  int64_t digested_at = 0;
  if (!(rest >> digested_at >> digest.high >> digest.low)) return false;
  return digested_at - kClockStepNs >= std::max(state.modified_ns, state.changed_ns);
}

void write_record(const FileState& state, const std::string& folder, int64_t digested_at,
                  const Digest& digest) {
  std::ostringstream text;
  text << record_head(state) << digested_at << ' ' << digest.high << ' ' << digest.low;
  const std::string line = text.str() + " " + check_of(text.str());
  AtomicFile file(record_path(state, folder), "[pack_cache]");
  file.write(line.data(), line.size());
  file.commit();
}

// Reads through buffers of the threads: a mapping would keep the whole file resident.
Digest read_digest(int fd, uint64_t size, const std::string& path, ThreadPool& pool) {
  std::vector<Digest> chunks((size + kDigestChunk - 1) / kDigestChunk);
  pool.parallel([&](Team& team) {
    std::vector<uint8_t> buffer(kDigestChunk);
    team.for_chunks(static_cast<int64_t>(chunks.size()), [&](int64_t index) {
      const uint64_t begin = static_cast<uint64_t>(index) * kDigestChunk;
      const size_t count = std::min<uint64_t>(kDigestChunk, size - begin);
      for (size_t done = 0; done < count;) {
        const ssize_t got =
            ::pread(fd, buffer.data() + done, count - done, static_cast<off_t>(begin + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) throw FileError("[pack_cache] " + path + ": cannot read: " + errno_text());
        done += static_cast<size_t>(got);
      }
      chunks[static_cast<size_t>(index)] = digest_chunk({buffer.data(), count});
    });
  });
  return digest_chunks(chunks, size);
}

}  // namespace

Digest file_digest(const std::string& path, const FileState& state, const std::string& folder,
                   ThreadPool& pool) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  const auto check = [&] {
    if (file_state(file.get(), path) == state) return;
    throw FileError("[pack_cache] " + path + ": the file changed while it was loaded");
  };
  check();
  Digest digest;
  if (read_record(state, folder, digest)) return digest;
  const int64_t digested_at = now_ns();
  digest = read_digest(file.get(), state.size, path, pool);
  check();
  try {
    write_record(state, folder, digested_at, digest);
  } catch (const FileError&) {
    // Storing the weights will fail as well, and say why.
  }
  return digest;
}

}  // namespace effinfer::weights
