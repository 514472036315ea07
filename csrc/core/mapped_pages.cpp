#include "core/mapped_pages.h"

#include <sys/mman.h>
#include <unistd.h>

namespace effinfer {

void drop_mapped_pages(std::span<const uint8_t> bytes) {
  if (bytes.empty()) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data()) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(bytes.data() + bytes.size()) + page - 1) / page;
  // A failure (pages locked by the user) leaves the pages where they are.
  madvise(reinterpret_cast<void*>(begin), end * page - begin, MADV_DONTNEED);
}

}  // namespace effinfer
