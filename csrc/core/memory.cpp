#include "core/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "core/backend.h"

namespace effinfer {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

std::shared_ptr<void> heap(size_t bytes) {
  if (bytes > SIZE_MAX - 63) return nullptr;
  void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  return memory == nullptr ? nullptr : std::shared_ptr<void>(memory, std::free);
}

// Null when the system refuses.
std::shared_ptr<void> map(size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  return {base, [bytes](void* memory) { munmap(memory, bytes); }};
}

std::shared_ptr<void> map_huge(size_t bytes) {
  // There is room to move the start to a huge page's boundary; untouched pages cost nothing.
  if (bytes > SIZE_MAX - 2 * kHugePage) return nullptr;
  const std::shared_ptr<void> base =
      map((bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage);
  if (!base) return nullptr;
  const auto address = reinterpret_cast<uintptr_t>(base.get());
  auto* memory = static_cast<uint8_t*>(base.get()) + (kHugePage - address % kHugePage) % kHugePage;
#if defined(MADV_HUGEPAGE)
  // Not the last bytes: a huge page would be taken for them whole.
  madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
  return {base, memory};
}

class CpuMemory : public Memory {
 public:
  Device device() const override { return {}; }

  // The machine's memory, or the limit of this process's control group when that is less.
  size_t capacity() const override {
    const long pages = sysconf(_SC_PHYS_PAGES);
    const long page_size = sysconf(_SC_PAGESIZE);
    size_t bytes = pages > 0 && page_size > 0
                       ? static_cast<size_t>(pages) * static_cast<size_t>(page_size)
                       : SIZE_MAX;
    // cgroup v2 is asked first, then v1; "max" and absent files leave the limit alone.
    for (const char* path :
         {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
      std::ifstream file(path);
      uint64_t limit = 0;
      if (file >> limit && limit > 0) bytes = std::min<size_t>(bytes, limit);
    }
    return bytes;
  }

  std::shared_ptr<void> allocate(size_t bytes, Pages pages) const override {
    if (pages == Pages::lazy) return map(std::max<size_t>(bytes, 1));
    if (pages == Pages::huge && bytes >= kHugePage) return map_huge(bytes);
    std::shared_ptr<void> memory = heap(bytes);
    if (pages == Pages::huge && memory) zero(memory.get(), bytes);
    return memory;
  }
  void zero(void* to, size_t bytes) const override { std::memset(to, 0, bytes); }
  void copy(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

}  // namespace

void zero_lazily(void* from, size_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(from);
  const uintptr_t end = begin + bytes;
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = end / page * page;
  // Pages that the user locked stay.
  if (first >= last || madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED) != 0) {
    std::memset(from, 0, bytes);
    return;
  }
  std::memset(from, 0, first - begin);
  std::memset(reinterpret_cast<void*>(last), 0, end - last);
}

const Memory& memory_of(Device device) {
  static const CpuMemory cpu;
  check_device(device, "[memory] device");
  return device.kind == DeviceKind::cpu ? cpu : cuda_backend()->memory(device.index);
}

}  // namespace effinfer
