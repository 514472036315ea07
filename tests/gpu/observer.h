// Who watches what the threads of kernels do: races.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <string>

namespace effinfer::cuda::host {

struct Grid;

// A call in a kernel's source.
using Where = std::source_location;

// How far a thread is.
struct Progress {
  int thread = 0;
  uint32_t syncs = 0;       // barriers of the block that it has left behind
  uint32_t warp_syncs = 0;  // of the warp
  uint32_t fences = 0;
  uint32_t fence_syncs = 0;   // `syncs` at its last fence
  bool has_fenced = false;    // and no atomic_add of the block has followed yet
  bool has_added = false;     // atomically
  bool has_acquired = false;  // by a fence after an atomic_add
  bool is_early = false;      // has yet to wait for what kernels before write
  // Of Hopper's kernels (clocks.h), else null: of each thread, up to which epoch it is over.
  const uint32_t* clock = nullptr;
  uint32_t epoch = 0;
};

// Cycles that shared memory was busy, and how many would have been enough for any layout of what
// was accessed.
struct Banks {
  uint64_t cycles = 0;
  uint64_t least = 0;
  std::string worst;  // the instruction that most of the others are for
};

// Of the host's thread that runs a launch.
class Observer {
 public:
  virtual ~Observer() = default;
  // Launches with the same `series`, which is above 0, may begin before those before have ended.
  virtual void launch_begins(const Grid& grid, uint64_t series) = 0;
  virtual void block_begins(const void* shared, size_t bytes) = 0;
  // Whose loads and stores follow; null: nobody's.
  virtual void resumes(const Progress* thread) = 0;
  virtual void passes_sync(uint32_t syncs, const Where& where) = 0;
  // Others that acquire see what came before the thread's last fence; it sees what they released.
  virtual void releases(const Progress& thread) = 0;
  virtual void acquires(const Progress& thread) = 0;
  virtual void reads(const Progress& thread, const void* from, size_t bytes) = 0;
  // As add_shared() and add_global() do, which need no order among themselves.
  virtual void adds(const Progress& thread, void* to, size_t bytes) = 0;
  // As load() does: through a cache that does not see what this launch writes.
  virtual void loads(const Progress& thread, const void* from, size_t bytes) = 0;
  virtual void begins_copy(const Progress& thread, void* to, size_t bytes) = 0;
  // The lane takes no part in a copy of its warp.
  virtual void skips_copy(const Progress& thread) = 0;
  virtual void ends_copy(const Progress& thread, void* to, size_t bytes) = 0;
  // What copies and wgmma of Hopper do: they see what a thread wrote before its last fences_async.
  virtual void begins_bulk(const Progress& thread, void* to, size_t bytes) = 0;
  virtual void reads_async(const Progress& thread, const void* from, size_t bytes) = 0;
  virtual void fences_async(const Progress& thread) = 0;
  virtual void block_ends() = 0;
  // Whether something was wrong since the launch began, and what.
  virtual bool has_complaint() const = 0;
  virtual std::string complaint() const = 0;
  // Of what follows, until taken.
  virtual void count_banks() = 0;
  virtual Banks take_banks() = 0;
};

// Each thread of the host has its own. Without any nobody watches.
void set_observer(Observer& (*of_this_thread)());
// Which are seen in kernels of this program: in this way, or by ThreadSanitizer, for which blocks
// are ordered.
enum class Races : uint8_t { none, of_block, all };
Races detected_races();

// Of the launches in `body`. Zeros where not all races are detected.
Banks count_banks(const std::function<void()>& body);

}  // namespace effinfer::cuda::host
