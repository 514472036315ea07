// What a warp asks for ahead, which changes nothing. As fiber.cpp, never built with
// -fsanitize=thread.
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "gpu/block.h"
#include "gpu/host_backend.h"
#include "gpu/host_unit.h"

namespace effinfer::cuda::host {
namespace {

class Prefetches {
 public:
  void record() {
    const std::lock_guard lock(mutex_);
    all_.clear();
    recording_ = true;
  }
  std::vector<Prefetched> recorded() {
    const std::lock_guard lock(mutex_);
    recording_ = false;
    return std::exchange(all_, {});
  }
  void add(Prefetched one) {
    if (!recording_) return;
    const std::lock_guard lock(mutex_);
    all_.push_back(std::move(one));
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> recording_ = false;
  std::vector<Prefetched> all_;
};

Prefetches& prefetches() {
  static Prefetches all;
  return all;
}

}  // namespace

void Unit::prefetch(const void* from, int bytes, Where where) {
  require_global(from, 16, "prefetch");
  require(bytes > 0 && bytes % 16 == 0, "prefetch", "expected a multiple of 16 bytes");
  const uint64_t mine[] = {reinterpret_cast<uintptr_t>(from), static_cast<uint64_t>(bytes)};
  for (const uint64_t number : mine) {
    const bool same = shuffled(number, 0, "prefetch", where) == number;
    require(same, "prefetch", "expected the same bytes of all lanes");
  }
  if (lane != 0) return;
  const Machine machine(*owner_, owner_->thread(*this).progress);
  require(is_allocated(from, static_cast<size_t>(bytes)), "prefetch",
          "expected bytes of one allocation");
  prefetches().add({owner_->grid().name, static_cast<const std::byte*>(from), bytes});
}

void record_prefetches() {
  prefetches().record();
}

std::vector<Prefetched> recorded_prefetches() {
  return prefetches().recorded();
}

}  // namespace effinfer::cuda::host
