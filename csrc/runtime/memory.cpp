#include "runtime/memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>

namespace effinfer::runtime {

size_t physical_memory_bytes() {
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

}  // namespace effinfer::runtime
