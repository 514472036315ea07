// Finds races in kernels that are built with -fsanitize=thread but linked with this file in place
// of ThreadSanitizer's library: the compiler then tells of each load and store. Since all that
// orders memory in a kernel is barriers that whole blocks or warps pass, counting them is exact:
// two accesses of different threads to a byte of which one writes are ordered if the block, or the
// warp of both, has passed a barrier between them. Of blocks: see host_unit.h.
//
// A launch with a race throws std::logic_error at the next barrier.
//
// Never built with -fsanitize=thread itself.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/unit.h"
#include "gpu/banks.h"
#include "gpu/fiber.h"
#include "gpu/hopper.h"
#include "gpu/host_unit.h"

namespace effinfer::cuda::host {
namespace {

constexpr size_t kPage = 4096;
// More than that is given back between launches.
constexpr size_t kPagesKept = 512;

// Stand for instructions that are not the program's own.
const char kReads = 0;
const char kCopies = 1;

std::string place_of(const void* caller);

// Who touched a byte, and when. Runs of blocks are numbered from 1 on, through all launches.
struct Access {
  uint32_t run = 0;
  uint32_t syncs = 0;
  uint32_t step = 0;  // `warp_syncs` of its thread or, where clocks are kept, the epoch
  uint16_t thread = 0;
  uint16_t fences = 0;
  uint16_t async_fences = 0;
  bool has_clock = false;

  bool operator==(const Access&) const = default;
};

// The last write of a byte, and two reads since then that stand for all: while neither is ordered
// before another read, they are of two threads, of two warps or blocks where there were such. In
// kernels that order some threads only (clocks.h) all reads count that are not ordered before
// others.
struct Byte {
  Access write;
  std::array<Access, 2> reads;
  bool awaits_copy = false;
  std::unique_ptr<std::vector<Access>> more_reads;

  Byte clone() const {
    Byte copy{write, reads, awaits_copy, nullptr};
    if (more_reads) copy.more_reads = std::make_unique<std::vector<Access>>(*more_reads);
    return copy;
  }
};

constexpr uintptr_t kWord = 4;

// Of four bytes, which are told apart once something has touched less than all.
struct Word {
  Byte whole;
  std::unique_ptr<std::array<Byte, kWord>> parts;
  uint32_t since = 0;  // the launch, or the run of a block for which shared memory is new
};

// What blocks have done for each other.
struct Fences {
  uint32_t released_syncs = 0;           // accesses before that barrier are seen by others
  uint32_t acquired_syncs = UINT32_MAX;  // accesses after that barrier see those of others
  std::vector<uint16_t> of_thread;
};

class Detector final : public Observer {
 public:
  void launch_begins(const Grid& grid) override {
    first_run_ = run_ + 1;
    threads_ = static_cast<size_t>(grid.threads);
    fences_.clear();
    complaint_.clear();
    if (pages_.size() > kPagesKept) {
      pages_.clear();
      recent_ = {};
    }
  }
  void block_begins(const void* shared, size_t bytes) override {
    ++run_;
    fences_.emplace_back().of_thread.resize(threads_ + Hopper::kMostBarriers);
    async_fences_.assign(threads_ + Hopper::kMostBarriers, {});
    syncs_.clear();
    shared_ = reinterpret_cast<uintptr_t>(shared);
    if (shared_words_.size() < bytes / kWord + 1) shared_words_.resize(bytes / kWord + 1);
    shared_size_ = bytes;
  }
  void resumes(const Progress* thread) override;
  void passes_sync(uint32_t, const Where& where) override {
    syncs_.push_back(where);
    if (banks_) banks_->pass_barrier();
  }
  void block_ends() override {
    if (banks_) banks_->pass_barrier();
  }
  void count_banks() override { banks_.emplace(); }
  Banks take_banks() override {
    return std::exchange(banks_, {})->total([](const void* instruction) {
      return instruction == &kReads    ? "ldmatrix"
             : instruction == &kCopies ? "copy_async"
                                       : place_of(instruction);
    });
  }
  void releases(const Progress& thread) override {
    Fences& mine = fences_.back();
    mine.released_syncs = std::max(mine.released_syncs, thread.fence_syncs);
    mine.of_thread[static_cast<size_t>(thread.thread)] = static_cast<uint16_t>(thread.fences);
  }
  void acquires(const Progress& thread) override {
    fences_.back().acquired_syncs = std::min(fences_.back().acquired_syncs, thread.syncs);
  }
  void reads(const Progress& thread, const void* from, size_t bytes) override {
    use_banks(thread, from, bytes, &kReads);
    touch(thread, from, bytes, false, nullptr);
  }
  void loads(const Progress& thread, const void* from, size_t bytes) override {
    for_bytes(from, bytes, [&](uintptr_t at, const Byte& here) {
      if (here.write.run >= first_run_) {
        complain(at, here.write, access_of(thread), "takes from load()", "wrote", nullptr);
      }
    });
  }
  void begins_copy(const Progress& thread, void* to, size_t bytes) override {
    use_banks(thread, to, bytes, &kCopies);
    touch(thread, to, bytes, true, nullptr);
    await_copy(to, bytes, true);
  }
  void skips_copy(const Progress& thread) override {
    if (banks_) banks_->skip(&kCopies, thread.thread);
  }
  void ends_copy(const Progress& thread, void* to, size_t bytes) override {
    await_copy(to, bytes, false);
    touch(thread, to, bytes, true, nullptr);
  }
  void begins_bulk(const Progress& thread, void* to, size_t bytes) override {
    require_fenced(thread, to, bytes, "copies over");
    touch(thread, to, bytes, true, nullptr);
    await_copy(to, bytes, true);
  }
  void reads_async(const Progress& thread, const void* from, size_t bytes) override {
    touch(thread, from, bytes, false, nullptr);
    require_fenced(thread, from, bytes, "multiplies");
  }
  void fences_async(const Progress& thread) override {
    async_fences_[static_cast<size_t>(thread.thread)].push_back(thread.epoch);
  }
  bool has_complaint() const override { return !complaint_.empty(); }
  std::string complaint() const override { return complaint_; }

  void touch(const Progress& thread, const void* place, size_t bytes, bool writes, void* caller);
  // An access by an instruction of that address.
  void use_banks(const Progress& thread, const void* place, size_t bytes, const void* instruction) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(place) - shared_;
    if (banks_ && at < shared_size_) banks_->add(instruction, thread.thread, at, bytes);
  }

 private:
  using Page = std::array<Word, kPage / kWord>;
  struct RecentPage {
    uintptr_t number = 0;
    Page* page = nullptr;
  };

  Word& word(uintptr_t at) {
    const bool is_shared = at - shared_ < shared_size_;
    Word& found = is_shared ? shared_words_[(at - shared_) / kWord] : global_word(at);
    const uint32_t since = is_shared ? run_ : first_run_;
    if (found.since != since) found = {{}, nullptr, since};
    return found;
  }
  Word& global_word(uintptr_t at) {
    const uintptr_t number = at / kPage;
    RecentPage& recent = recent_[number % recent_.size()];
    if (recent.page == nullptr || recent.number != number) {
      std::unique_ptr<Page>& page = pages_[number];
      if (!page) page = std::make_unique<Page>();
      recent = {number, page.get()};
    }
    return (*recent.page)[at % kPage / kWord];
  }
  // each(address, Byte) for all of them, or once for four that are still alike.
  template <class F>
  void for_bytes(const void* place, size_t size, F&& each) {
    auto at = reinterpret_cast<uintptr_t>(place);
    for (const uintptr_t end = at + size; at < end;) {
      Word& here = word(at);
      const uintptr_t stop = std::min(end, (at / kWord + 1) * kWord);
      if (stop - at == kWord && !here.parts) {
        each(at, here.whole);
        at = stop;
        continue;
      }
      if (!here.parts) {
        here.parts = std::make_unique<std::array<Byte, kWord>>();
        for (Byte& part : *here.parts) part = here.whole.clone();
      }
      for (; at < stop; ++at) each(at, (*here.parts)[at % kWord]);
    }
  }
  Access access_of(const Progress& thread) const {
    const auto index = static_cast<size_t>(thread.thread);
    const bool has_clock = thread.clock != nullptr;
    return {run_,
            thread.syncs,
            has_clock ? thread.epoch : thread.warp_syncs,
            static_cast<uint16_t>(thread.thread),
            static_cast<uint16_t>(thread.fences),
            static_cast<uint16_t>(async_fences_[index].size()),
            has_clock};
  }
  // That who wrote has fenced since, and that the thread knows of it.
  void require_fenced(const Progress& thread, const void* from, size_t bytes, const char* does) {
    for_bytes(from, bytes, [&](uintptr_t at, const Byte& here) {
      if (here.write.run != run_ || here.write.thread >= threads_) return;
      const std::vector<uint32_t>& fences = async_fences_[here.write.thread];
      const size_t first = here.write.async_fences;
      const bool is_fenced =
          first < fences.size() &&
          (here.write.thread == thread.thread || fences[first] <= thread.clock[here.write.thread]);
      if (!is_fenced) {
        complain(at, here.write, access_of(thread), does, "wrote without a fence_async", nullptr);
      }
    });
  }
  bool ordered(const Access& before, const Access& now, const Progress& thread) const {
    return before.run < first_run_ || ordered_in_launch(before, now, thread);
  }
  bool ordered_in_launch(const Access& before, const Access& now, const Progress& thread) const;
  void await_copy(void* to, size_t bytes, bool awaits) {
    for_bytes(to, bytes, [=](uintptr_t, Byte& here) { here.awaits_copy = awaits; });
  }
  void remember_read(Byte& byte, const Access& now, const Progress& thread) const;
  void complain(uintptr_t at, const Access& before, const Access& now, const char* does,
                const char* did, void* caller);
  std::string since(const Access& access) const;

  uint32_t run_ = 0;
  uint32_t first_run_ = 1;
  size_t threads_ = 0;
  std::vector<Fences> fences_;                       // of the launch's blocks
  std::vector<Where> syncs_;                         // of the block
  std::vector<std::vector<uint32_t>> async_fences_;  // of each thread, in which epochs
  uintptr_t shared_ = 0;
  size_t shared_size_ = 0;
  std::vector<Word> shared_words_;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
  std::array<RecentPage, 64> recent_;  // of those, by their numbers
  std::string complaint_;
  std::optional<BankCounter> banks_;  // while they are counted
};

// Whose instructions run; nobody's while the emulator works for them.
struct Running {
  Detector* detector = nullptr;
  const Progress* thread = nullptr;
};
[[gnu::tls_model("initial-exec")]] thread_local Running running;

void Detector::resumes(const Progress* thread) {
  running = thread == nullptr ? Running{} : Running{this, thread};
}

bool Detector::ordered_in_launch(const Access& before, const Access& now,
                                 const Progress& thread) const {
  if (before.run == now.run && thread.clock != nullptr) {
    return before.thread == now.thread || before.step <= thread.clock[before.thread];
  }
  if (before.run == now.run) {
    return before.thread == now.thread || before.syncs < now.syncs ||
           (before.thread / kWarp == now.thread / kWarp && before.step < now.step);
  }
  if (!thread.has_acquired && fences_.back().acquired_syncs >= now.syncs) return false;
  const Fences& theirs = fences_[before.run - first_run_];
  return before.syncs < theirs.released_syncs || before.fences < theirs.of_thread[before.thread];
}

void Detector::remember_read(Byte& byte, const Access& now, const Progress& thread) const {
  if (thread.clock != nullptr) {
    if (!byte.more_reads) byte.more_reads = std::make_unique<std::vector<Access>>();
    std::erase_if(*byte.more_reads, [&](const Access& read) { return ordered(read, now, thread); });
    byte.more_reads->push_back(now);
    return;
  }
  for (Access& read : byte.reads) {
    if (ordered(read, now, thread)) {
      read = now;
      return;
    }
  }
  const auto same_warp = [](const Access& a, const Access& b) {
    return a.run == b.run && a.thread / kWarp == b.thread / kWarp;
  };
  if (same_warp(byte.reads[0], byte.reads[1]) && !same_warp(byte.reads[0], now)) {
    byte.reads[1] = now;
  }
}

void Detector::touch(const Progress& thread, const void* place, size_t bytes, bool writes,
                     void* caller) {
  const Access now = access_of(thread);
  const char* const does = writes ? "writes" : "reads";
  for_bytes(place, bytes, [&](uintptr_t at, Byte& here) {
    if (here.awaits_copy) complain(at, here.write, now, "touches", "has yet to wait for", caller);
    if (!writes && here.reads[0] == now) return;
    if (!ordered(here.write, now, thread)) complain(at, here.write, now, does, "wrote", caller);
    if (!writes) return remember_read(here, now, thread);
    for (const Access& read : here.reads) {
      if (!ordered(read, now, thread)) complain(at, read, now, does, "read", caller);
    }
    if (here.more_reads) {
      for (const Access& read : *here.more_reads) {
        if (!ordered(read, now, thread)) complain(at, read, now, does, "read", caller);
      }
      here.more_reads->clear();
    }
    here.write = now;
    here.reads = {};
  });
}

std::string Detector::since(const Access& access) const {
  if (access.run != run_) return " of another block";
  if (access.thread >= threads_) return " as a copy";
  if (access.has_clock) return "";
  if (access.syncs == 0) return " since the start";
  const Where& where = syncs_[access.syncs - 1];
  return " since the sync at " + std::string(where.file_name()) + ":" +
         std::to_string(where.line());
}

// The call before that address, for a shell.
std::string place_of(const void* caller) {
  Dl_info module;
  if (dladdr(caller, &module) == 0) return "unknown";
  const auto offset =
      reinterpret_cast<uintptr_t>(caller) - reinterpret_cast<uintptr_t>(module.dli_fbase) - 1;
  char text[32];
  std::snprintf(text, sizeof text, " 0x%zx", static_cast<size_t>(offset));
  return "addr2line -e " + std::string(module.dli_fname) + text;
}

void Detector::complain(uintptr_t at, const Access& before, const Access& now, const char* does,
                        const char* did, void* caller) {
  if (!complaint_.empty()) return;
  const bool is_shared = at - shared_ < shared_size_;
  complaint_ = "race: thread " + std::to_string(now.thread) + " " + does + " " +
               (is_shared ? "byte " + std::to_string(at - shared_) + " of shared memory"
                          : std::string("global memory")) +
               " that thread " + std::to_string(before.thread) + " " + did + since(before);
  if (caller != nullptr) complaint_ += " (" + place_of(caller) + ")";
}

Observer& detector() {
  static thread_local Detector own;
  return own;
}

const bool registered = [] {
  set_observer(&detector);
  return true;
}();

// An access of the code that runs, of which its own stack is nobody's business.
[[gnu::noinline]] void tell_watched(const void* place, size_t bytes, bool writes, void* caller) {
  const auto frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  if (reinterpret_cast<uintptr_t>(place) - frame < Fiber::kStackBytes) return;
  const Running mine = std::exchange(running, {});
  mine.detector->use_banks(*mine.thread, place, bytes, caller);
  mine.detector->touch(*mine.thread, place, bytes, writes, caller);
  running = mine;
}

// Most launches are not watched: nothing is spilled for them.
inline void tell(const void* place, size_t bytes, bool writes, void* caller) {
  if (running.detector != nullptr) [[unlikely]]
    tell_watched(place, bytes, writes, caller);
}

}  // namespace

}  // namespace effinfer::cuda::host

// What code that is built with -fsanitize=thread calls.
#define EFFINFER_ACCESS(name, bytes, writes)                                       \
  void __tsan_##name(void* place) {                                                \
    effinfer::cuda::host::tell(place, bytes, writes, __builtin_return_address(0)); \
  }
#define EFFINFER_ATOMICS(bits, Number)                                                      \
  Number __tsan_atomic##bits##_load(const volatile void* from, int) {                       \
    return __atomic_load_n(static_cast<const volatile Number*>(from), __ATOMIC_SEQ_CST);    \
  }                                                                                         \
  void __tsan_atomic##bits##_store(volatile void* to, Number value, int) {                  \
    __atomic_store_n(static_cast<volatile Number*>(to), value, __ATOMIC_SEQ_CST);           \
  }                                                                                         \
  Number __tsan_atomic##bits##_exchange(volatile void* at, Number value, int) {             \
    return __atomic_exchange_n(static_cast<volatile Number*>(at), value, __ATOMIC_SEQ_CST); \
  }                                                                                         \
  Number __tsan_atomic##bits##_fetch_add(volatile void* at, Number value, int) {            \
    return __atomic_fetch_add(static_cast<volatile Number*>(at), value, __ATOMIC_SEQ_CST);  \
  }                                                                                         \
  Number __tsan_atomic##bits##_fetch_sub(volatile void* at, Number value, int) {            \
    return __atomic_fetch_sub(static_cast<volatile Number*>(at), value, __ATOMIC_SEQ_CST);  \
  }                                                                                         \
  bool __tsan_atomic##bits##_compare_exchange_strong(volatile void* at, void* expected,     \
                                                     Number value, int, int) {              \
    return __atomic_compare_exchange_n(static_cast<volatile Number*>(at),                   \
                                       static_cast<Number*>(expected), value, false,        \
                                       __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                 \
  }                                                                                         \
  bool __tsan_atomic##bits##_compare_exchange_weak(volatile void* at, void* expected,       \
                                                   Number value, int, int) {                \
    return __tsan_atomic##bits##_compare_exchange_strong(at, expected, value, 0, 0);        \
  }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
EFFINFER_ACCESS(read1, 1, false)
EFFINFER_ACCESS(read2, 2, false)
EFFINFER_ACCESS(read4, 4, false)
EFFINFER_ACCESS(read8, 8, false)
EFFINFER_ACCESS(read16, 16, false)
EFFINFER_ACCESS(write1, 1, true)
EFFINFER_ACCESS(write2, 2, true)
EFFINFER_ACCESS(write4, 4, true)
EFFINFER_ACCESS(write8, 8, true)
EFFINFER_ACCESS(write16, 16, true)
EFFINFER_ACCESS(unaligned_read2, 2, false)
EFFINFER_ACCESS(unaligned_read4, 4, false)
EFFINFER_ACCESS(unaligned_read8, 8, false)
EFFINFER_ACCESS(unaligned_read16, 16, false)
EFFINFER_ACCESS(unaligned_write2, 2, true)
EFFINFER_ACCESS(unaligned_write4, 4, true)
EFFINFER_ACCESS(unaligned_write8, 8, true)
EFFINFER_ACCESS(unaligned_write16, 16, true)
void __tsan_read_range(void* place, unsigned long bytes) {
  effinfer::cuda::host::tell(place, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* place, unsigned long bytes) {
  effinfer::cuda::host::tell(place, bytes, true, __builtin_return_address(0));
}
EFFINFER_ATOMICS(8, unsigned char)
EFFINFER_ATOMICS(16, unsigned short)
EFFINFER_ATOMICS(32, unsigned int)
EFFINFER_ATOMICS(64, unsigned long)
void __tsan_atomic_thread_fence(int) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
void __tsan_atomic_signal_fence(int) {}
}
