// Finds races in kernels that are built with -fsanitize=thread but linked with this file in place
// of ThreadSanitizer's library: the compiler then tells of each load and store. Since all that
// orders memory in a kernel is barriers that whole blocks or warps pass, counting them is exact:
// two accesses of different threads to a byte of which one writes are ordered if the block, or the
// warp of both, has passed a barrier between them. Of blocks: see host_unit.h.
//
// Accesses that are not aligned as their type says are told of, too: a GPU has none.
//
// A launch with either throws std::logic_error at the next barrier.
//
// Never built with -fsanitize=thread itself.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda/unit.h"
#include "gpu/banks.h"
#include "gpu/fiber.h"
#include "gpu/hopper.h"
#include "gpu/host_unit.h"
#include "gpu/shadow.h"

namespace effinfer::cuda::host {
namespace {

// Stand for instructions that are not the program's own.
const char kReads = 0;
const char kCopies = 1;

std::string place_of(const void* caller);

// What blocks have done for each other.
struct Fences {
  uint32_t released_syncs = 0;           // accesses before that barrier are seen by others
  uint32_t acquired_syncs = UINT32_MAX;  // accesses after that barrier see those of others
  std::vector<uint16_t> of_thread;
};

class Detector final : public Observer {
 public:
  void launch_begins(const Grid& grid, uint64_t series) override {
    first_run_ = run_ + 1;
    threads_ = static_cast<size_t>(grid.threads);
    fences_.clear();
    complaint_.clear();
    if (accesses_.are_used_up()) {
      accesses_.forget();
      shadow_.forget();
      first_of_series_ = 1;
    }
    accesses_.begin_launch();
    shadow_.begin_launch(accesses_.next());
    if (std::exchange(series_, series) != series) first_of_series_ = accesses_.next();
  }
  void block_begins(const void* shared, size_t bytes) override {
    ++run_;
    fences_.emplace_back().of_thread.resize(threads_ + Hopper::kMostBarriers);
    async_fences_.assign(threads_ + Hopper::kMostBarriers, {});
    syncs_.clear();
    accesses_.begin_block(threads_ + Hopper::kMostBarriers);
    shadow_.begin_block(shared, bytes, accesses_.next());
  }
  void resumes(const Progress* thread) override;
  void passes_sync(uint32_t syncs, const Where& where) override {
    if (syncs > UINT16_MAX) throw std::logic_error("races: more barriers than Access can count");
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
    require_inputs(thread, from, bytes, false, nullptr);
    const auto is_known = [](const Word& word, Number oldest) { return word.whole.write < oldest; };
    if (shadow_.all_whole(from, bytes, is_known)) return;
    shadow_.for_bytes(from, bytes, [&](uintptr_t at, const Place& here) {
      if (here.byte.write >= shadow_.oldest(at)) {
        complain(at, accesses_[here.byte.write], thread, "takes from load()", "wrote", nullptr);
      }
    });
  }
  void adds(const Progress& thread, void* to, size_t bytes) override {
    touch(thread, to, bytes, true, nullptr, true);
  }
  void begins_copy(const Progress& thread, void* to, size_t bytes) override {
    use_banks(thread, to, bytes, &kCopies);
    touch(thread, to, bytes, true, nullptr);
    shadow_.await_copy(to, bytes, true);
  }
  void skips_copy(const Progress& thread) override {
    if (banks_) banks_->skip(&kCopies, thread.thread);
  }
  void ends_copy(const Progress& thread, void* to, size_t bytes) override {
    shadow_.await_copy(to, bytes, false);
    touch(thread, to, bytes, true, nullptr);
  }
  void begins_bulk(const Progress& thread, void* to, size_t bytes) override {
    require_fenced(thread, to, bytes, "copies over");
    touch(thread, to, bytes, true, nullptr);
    shadow_.await_copy(to, bytes, true);
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

  // A place is at no multiple of its type's alignment.
  void refuse_place(const Progress& thread, size_t alignment, void* caller) {
    if (!complaint_.empty()) return;
    complaint_ = "thread " + std::to_string(thread.thread) + " takes what is no multiple of " +
                 std::to_string(alignment) + " for an address (" + place_of(caller) + ")";
  }
  // Of global memory: that nothing was written there that the thread has yet to wait for.
  void require_inputs(const Progress& thread, const void* place, size_t bytes, bool writes,
                      void* caller) {
    if (!thread.is_early || shadow_.is_shared(reinterpret_cast<uintptr_t>(place))) return;
    if (!writes && !shadow_.is_written(place, bytes, first_of_series_)) return;
    if (!complaint_.empty()) return;
    complaint_ = "thread " + std::to_string(thread.thread) +
                 (writes ? " writes" : " reads what a kernel before wrote") +
                 " and has yet to wait for its inputs";
    if (caller != nullptr) complaint_ += " (" + place_of(caller) + ")";
  }
  void touch(const Progress& thread, const void* place, size_t bytes, bool writes, void* caller,
             bool adds = false);
  // The same of whole words, where there is no race: most accesses are such. Else false, and some
  // are noted, which may be noted again.
  template <bool kWrites>
  bool touch_whole(const Progress& thread, const void* place, size_t bytes);
  bool counts_banks() const { return banks_.has_value(); }
  // An access by an instruction of that address.
  void use_banks(const Progress& thread, const void* place, size_t bytes, const void* instruction) {
    if (!banks_ || !shadow_.is_shared(reinterpret_cast<uintptr_t>(place))) return;
    banks_->add(instruction, thread.thread, shadow_.in_shared(place), bytes);
  }

 private:
  using Number = Accesses::Number;

  Access access_of(const Progress& thread) const {
    const auto index = static_cast<size_t>(thread.thread);
    if (thread.clock == nullptr) {
      return {run_, thread.warp_syncs, thread.syncs, index, {thread.fences, 0}};
    }
    return {run_, thread.epoch, thread.syncs, index, {thread.fences, async_fences_[index].size()}};
  }
  // That who wrote has fenced since, and that the thread knows of it.
  void require_fenced(const Progress& thread, const void* from, size_t bytes, const char* does) {
    shadow_.for_bytes(from, bytes, [&](uintptr_t at, const Place& here) {
      if (here.byte.write < shadow_.oldest(at)) return;
      const Access& write = accesses_[here.byte.write];
      if (write.run() != run_ || write.thread() >= threads_) return;
      const std::vector<uint32_t>& fences = async_fences_[write.thread()];
      const size_t first = write.async_fences();
      const bool is_fenced =
          first < fences.size() && (write.thread() == static_cast<uint32_t>(thread.thread) ||
                                    fences[first] <= thread.clock[write.thread()]);
      if (!is_fenced) complain(at, write, thread, does, "wrote without a fence_async", nullptr);
    });
  }
  bool ordered(const Access& before, const Access& now, const Progress& thread) const {
    if (before.run() != now.run()) return ordered_by_blocks(before, now, thread);
    if (before.thread() == now.thread()) return true;
    if (thread.clock != nullptr) return before.step() <= thread.clock[before.thread()];
    return before.syncs() < now.syncs() ||
           (before.thread() / kWarp == now.thread() / kWarp && before.step() < now.step());
  }
  bool ordered_by_blocks(const Access& before, const Access& now, const Progress& thread) const;
  // An access that has just been given its number.
  struct Now {
    Access access;
    Number number;
    const Progress& thread;
  };
  bool ordered(Number before, Number oldest, const Now& now) const {
    return before < oldest || ordered(accesses_[before], now.access, now.thread);
  }
  // False: it is to be remembered beside the two.
  bool remember_read(Byte& byte, Number oldest, const Now& now) const;
  void remember_more(Reads& reads, const Now& now) const;
  // `now` of the thread that does, behind what another one did before.
  void complain(uintptr_t at, const Access& before, const Progress& now, const char* does,
                const char* did, void* caller);
  std::string since(const Access& access, bool has_clock) const;

  uint64_t series_ = 0;
  Number first_of_series_ = 1;
  uint32_t run_ = 0;
  uint32_t first_run_ = 1;
  size_t threads_ = 0;
  std::vector<Fences> fences_;                       // of the launch's blocks
  std::vector<Where> syncs_;                         // of the block
  std::vector<std::vector<uint32_t>> async_fences_;  // of each thread, in which epochs
  Accesses accesses_;
  Shadow shadow_;
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

bool Detector::ordered_by_blocks(const Access& before, const Access& now,
                                 const Progress& thread) const {
  if (!thread.has_acquired && fences_.back().acquired_syncs >= now.syncs()) return false;
  const Fences& theirs = fences_[before.run() - first_run_];
  return before.syncs() < theirs.released_syncs ||
         before.fences() < theirs.of_thread[before.thread()];
}

[[gnu::always_inline]] inline bool Detector::remember_read(Byte& byte, Number oldest,
                                                           const Now& now) const {
  for (Number& read : byte.reads) {
    if (ordered(read, oldest, now)) {
      read = now.number;
      return true;
    }
  }
  if (now.thread.clock != nullptr) return false;
  const auto same_warp = [](const Access& a, const Access& b) {
    return a.run() == b.run() && a.thread() / kWarp == b.thread() / kWarp;
  };
  const Access& first = accesses_[byte.reads[0]];
  if (same_warp(first, accesses_[byte.reads[1]]) && !same_warp(first, now.access)) {
    byte.reads[1] = now.number;
  }
  return true;
}

void Detector::remember_more(Reads& reads, const Now& now) const {
  const uint32_t lane = WarpReads::lane_of(now.access);
  WarpReads* free = nullptr;
  const bool is_there = reads.any_of_few([&](WarpReads& some) {
    if (some.is_of(now.access)) {
      if (some.is_as_far_as(now.access)) {
        some.lanes |= lane;
        return true;
      }
      some.lanes &= ~lane;
    }
    if (some.lanes == 0) free = &some;
    return false;
  });
  if (is_there) return;
  if (free != nullptr) {
    *free = {now.access, lane};
    return;
  }
  reads.add({now.access, lane}, [&](const WarpReads& some) {
    return some.all_of([&](const Access& read) { return ordered(read, now.access, now.thread); });
  });
}

template <bool kWrites>
[[gnu::always_inline]] inline bool Detector::touch_whole(const Progress& thread, const void* place,
                                                         size_t bytes) {
  const Access access = access_of(thread);
  const Now now{access, accesses_.number(access), thread};
  return shadow_.all_whole(place, bytes, [&](Word& word, Number oldest) {
    Byte& byte = word.whole;
    if (!kWrites && byte.reads[0] == now.number) return true;
    if (!ordered(byte.write, oldest, now)) return false;
    if (!kWrites) {
      if (!remember_read(byte, oldest, now)) {
        remember_more(shadow_.reads_of(word, oldest), now);
      }
      return true;
    }
    for (const Number read : byte.reads) {
      if (!ordered(read, oldest, now)) return false;
    }
    if (shadow_.more_reads(word, oldest) != nullptr) return false;
    byte = {now.number, {}};
    return true;
  });
}

void Detector::touch(const Progress& thread, const void* place, size_t bytes, bool writes,
                     void* caller, bool adds) {
  require_inputs(thread, place, bytes, writes, caller);
  if (!adds && (writes ? touch_whole<true>(thread, place, bytes)
                       : touch_whole<false>(thread, place, bytes))) {
    return;
  }
  const Access access = adds ? access_of(thread).added() : access_of(thread);
  const Now now{access, accesses_.number(access), thread};
  const char* const does = writes ? "writes" : "reads";
  shadow_.for_bytes(place, bytes, [&](uintptr_t at, const Place& here) {
    const Number oldest = shadow_.oldest(at);
    Byte& byte = here.byte;
    if (here.is_awaited()) {
      complain(at, accesses_[byte.write], thread, "touches", "has yet to wait for", caller);
    }
    if (!writes && byte.reads[0] == now.number) return;
    if (!ordered(byte.write, oldest, now) && !(adds && accesses_[byte.write].is_added())) {
      complain(at, accesses_[byte.write], thread, does, "wrote", caller);
    }
    if (!writes) {
      if (remember_read(byte, oldest, now)) return;
      return remember_more(here.reads ? *here.reads : shadow_.reads_of(here.word, oldest), now);
    }
    for (const Number read : byte.reads) {
      if (!ordered(read, oldest, now)) {
        complain(at, accesses_[read], thread, does, "read", caller);
      }
    }
    if (here.reads != nullptr && !here.reads->empty()) {
      here.reads->for_each([&](const WarpReads& some) {
        some.all_of([&](const Access& read) {
          if (!ordered(read, access, thread)) complain(at, read, thread, does, "read", caller);
          return true;
        });
      });
      here.reads->clear();
    }
    byte = {now.number, {}};
  });
}

std::string Detector::since(const Access& access, bool has_clock) const {
  if (access.run() != run_) return " of another block";
  if (access.thread() >= threads_) return " as a copy";
  if (has_clock) return "";
  if (access.syncs() == 0) return " since the start";
  const Where& where = syncs_[access.syncs() - 1];
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

void Detector::complain(uintptr_t at, const Access& before, const Progress& now, const char* does,
                        const char* did, void* caller) {
  if (!complaint_.empty()) return;
  const auto* place = reinterpret_cast<const void*>(at);
  complaint_ = "race: thread " + std::to_string(now.thread) + " " + does + " " +
               (shadow_.is_shared(at)
                    ? "byte " + std::to_string(shadow_.in_shared(place)) + " of shared memory"
                    : std::string("global memory")) +
               " that thread " + std::to_string(before.thread()) + " " + did +
               since(before, now.clock != nullptr);
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

template <bool kWrites>
[[gnu::noinline]] void tell_watched(const void* place, size_t bytes, void* caller) {
  Detector& detector = *running.detector;
  const bool is_plain = !detector.counts_banks() && !running.thread->is_early;
  if (is_plain && detector.touch_whole<kWrites>(*running.thread, place, bytes)) {
    return;
  }
  const Running mine = std::exchange(running, {});
  mine.detector->use_banks(*mine.thread, place, bytes, caller);
  mine.detector->touch(*mine.thread, place, bytes, kWrites, caller);
  running = mine;
}

// Where the stack of the code that runs is in use: from here on. A frame's address would have to be
// made.
[[gnu::always_inline]] inline uintptr_t top_of_stack() {
#if defined(__x86_64__)
  uintptr_t top;
  asm("mov %%rsp, %0" : "=r"(top));
  return top;
#else
  return reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
#endif
}

// An access of the code that runs. Nine of ten are to its own stack, which is nobody's business,
// and most launches of whole models are not watched: nothing but a comparison is done for those.
template <bool kWrites>
[[gnu::always_inline]] inline void tell(const void* place, size_t bytes, void* caller,
                                        size_t alignment = 1) {
  const auto at = reinterpret_cast<uintptr_t>(place);
  if (at - top_of_stack() < Fiber::kStackBytes) return;
  if (running.detector == nullptr) return;
  if ((at & (alignment - 1)) != 0) {
    running.detector->refuse_place(*running.thread, alignment, caller);
  }
  tell_watched<kWrites>(place, bytes, caller);
}

}  // namespace
}  // namespace effinfer::cuda::host

// What code that is built with -fsanitize=thread calls, of types that are aligned to as many bytes,
// at most 8, and of others.
#define EFFINFER_TELL(bytes, writes, alignment) \
  effinfer::cuda::host::tell<writes>(place, bytes, __builtin_return_address(0), alignment);
#define EFFINFER_ACCESS(name, bytes, writes)            \
  void __tsan_##name(void* place) {                     \
    EFFINFER_TELL(bytes, writes, bytes < 8 ? bytes : 8) \
  }                                                     \
  void __tsan_unaligned_##name(void* place) {           \
    EFFINFER_TELL(bytes, writes, 1)                     \
  }

extern "C" {
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
void __tsan_read_range(void* place, unsigned long bytes) {
  EFFINFER_TELL(bytes, false, 1)
}
void __tsan_write_range(void* place, unsigned long bytes) {
  EFFINFER_TELL(bytes, true, 1)
}
}
