#include "core/huge_memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>

namespace effinfer {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

std::shared_ptr<void> allocate_huge(size_t bytes) {
  if (bytes < kHugePage) {
    void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    return memory == nullptr ? nullptr : std::shared_ptr<void>(memory, std::free);
  }
  // There is room to move the start to a huge page's boundary; untouched pages cost nothing.
  if (bytes > SIZE_MAX - 2 * kHugePage) return nullptr;
  const size_t mapped = (bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
  void* base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  const auto address = reinterpret_cast<uintptr_t>(base);
  auto* memory = static_cast<uint8_t*>(base) + (kHugePage - address % kHugePage) % kHugePage;
#if defined(MADV_HUGEPAGE)
  // Not the last bytes: a huge page would be taken for them whole.
  madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
  return {memory, [base, mapped](void*) { munmap(base, mapped); }};
}

}  // namespace effinfer
