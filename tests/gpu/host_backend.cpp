// As fiber.cpp, never built with -fsanitize=thread: its copies are the device's own.
#include "gpu/host_backend.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "core/copy_rate.h"
#include "cuda/register.h"
#include "effinfer/error.h"
#include "gpu/fiber.h"
#include "gpu/host_unit.h"

namespace effinfer::cuda::host {
namespace {

std::atomic<size_t> memory_bytes{MemoryFacts().bytes};
std::atomic<double> memory_rate{MemoryFacts().copy_rate};
std::atomic<uint64_t> next_seed{1};

const auto kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

// One of the device's allocations: `bytes` from `offset` on of a mapping. What lies around them is
// filled with `fill` and belongs to nobody.
struct Allocation {
  size_t mapped = 0;
  size_t offset = 0;
  size_t bytes = 0;
  unsigned char fill = 0;
};

// All of them, and who may touch them.
class Mappings {
 public:
  void add(void* base, const Allocation& allocation) {
    const std::lock_guard lock(mutex_);
    allocations_[base] = allocation;
    used_ += allocation.mapped;
    guard(base, allocation, poison);
    if (open_ > 0) mprotect(base, allocation.mapped, PROT_READ | PROT_WRITE);
  }
  void remove(void* base) {
    const std::lock_guard lock(mutex_);
    const auto found = allocations_.find(base);
    used_ -= found->second.mapped;
    guard(base, found->second, unpoison);
    munmap(base, found->second.mapped);
    allocations_.erase(found);
  }
  size_t used() {
    const std::lock_guard lock(mutex_);
    return used_;
  }
  void open() {
    const std::lock_guard lock(mutex_);
    if (open_++ == 0) protect(PROT_READ | PROT_WRITE);
  }
  void close() {
    const std::lock_guard lock(mutex_);
    if (--open_ == 0) protect(PROT_NONE);
  }
  // Does what touches nothing of the device's but these bytes, if they are.
  template <class F>
  void touch(std::initializer_list<std::span<const std::byte>> all, F&& work) {
    const std::lock_guard lock(mutex_);
    for (const auto& bytes : all) protect(bytes, PROT_READ | PROT_WRITE);
    work();
    for (const auto& bytes : all) protect(bytes, PROT_NONE);
  }
  // Whether all of these bytes are one's.
  bool contains(const void* first, size_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto after = allocations_.upper_bound(first);
    if (after == allocations_.begin()) return false;
    const auto& [base, allocation] = *std::prev(after);
    const auto at = static_cast<size_t>(static_cast<const std::byte*>(first) -
                                        static_cast<const std::byte*>(base));
    return at >= allocation.offset && at + bytes <= allocation.offset + allocation.bytes;
  }
  // While they are open: throws std::logic_error if somebody wrote around one.
  void check() {
    const std::lock_guard lock(mutex_);
    for (const auto& [base, allocation] : allocations_) {
      bool intact = true;
      guard(base, allocation, [&](const void* from, size_t bytes) {
        unpoison(from, bytes);
        const auto* first = static_cast<const unsigned char*>(from);
        intact = intact && std::all_of(first, first + bytes,
                                       [&](unsigned char byte) { return byte == allocation.fill; });
        poison(from, bytes);
      });
      if (!intact) {
        throw std::logic_error("device memory: written to beyond the ends of an allocation of " +
                               std::to_string(allocation.bytes) + " bytes");
      }
    }
  }

 private:
  template <class F>
  static void guard(const void* base, const Allocation& allocation, F&& each) {
    const size_t end = allocation.offset + allocation.bytes;
    each(base, allocation.offset);
    each(static_cast<const std::byte*>(base) + end, allocation.mapped - end);
  }
  void protect(int access) {
    for (const auto& [base, allocation] : allocations_) {
      mprotect(const_cast<void*>(base), allocation.mapped, access);
    }
  }
  // Their pages, while others stay as they are.
  void protect(std::span<const std::byte> bytes, int access) {
    const auto after = allocations_.upper_bound(bytes.data());
    if (open_ > 0 || after == allocations_.begin()) return;
    const auto& [base, allocation] = *std::prev(after);
    const auto* const first = static_cast<const std::byte*>(base);
    const auto begin = static_cast<size_t>(bytes.data() - first) / kPage * kPage;
    const size_t end =
        std::min(static_cast<size_t>(bytes.data() - first) + bytes.size(), allocation.mapped);
    if (begin < end) mprotect(const_cast<std::byte*>(first) + begin, end - begin, access);
  }
  std::mutex mutex_;
  std::map<const void*, Allocation> allocations_;
  size_t used_ = 0;
  int open_ = 0;
};

// Lives until the last of the memory has gone, which may be after main().
Mappings& mappings() {
  static auto* all = new Mappings;
  return *all;
}

// While it lives the host may touch the device's memory.
class Access {
 public:
  Access() { mappings().open(); }
  ~Access() { mappings().close(); }
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;
};

constexpr Device kDevice{DeviceKind::cuda, 0};

std::span<const std::byte> span_of(const void* first, size_t bytes) {
  return {static_cast<const std::byte*>(first), bytes};
}

class HostMemory : public Memory {
 public:
  Device device() const override { return kDevice; }
  size_t capacity() const override {
    return memory_bytes - std::min<size_t>(memory_bytes, mappings().used());
  }

  // Ends where a page ends that nobody may touch. Fresh memory is NaN where it need not be zeros.
  std::shared_ptr<void> allocate(size_t bytes, Pages pages) const override {
    if (bytes > capacity()) return nullptr;
    const size_t rounded = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
    const size_t inside = (rounded + kPage - 1) / kPage * kPage;
    void* base = mmap(nullptr, inside + kPage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    const unsigned char fill = pages == Pages::heap ? 0xff : 0;
    if (fill != 0) std::memset(base, fill, inside);
    mprotect(base, inside + kPage, PROT_NONE);
    // One that differs from the memory before it: else they are one mapping as long as nobody may
    // touch either, which the kernel makes two of and joins again each time.
    madvise(static_cast<std::byte*>(base) + inside, kPage, MADV_DONTDUMP);
    const size_t start = pages == Pages::lazy ? 0 : inside - rounded;
    mappings().add(base, {inside, start, bytes, fill});
    const auto unmap = [base, inside](void*) {
      mappings().remove(base);
      munmap(static_cast<std::byte*>(base) + inside, kPage);
    };
    return {static_cast<std::byte*>(base) + start, unmap};
  }
  void zero(void* to, size_t bytes) const override {
    mappings().touch({span_of(to, bytes)}, [=] { std::memset(to, 0, bytes); });
  }
  void copy(void* to, const void* from, size_t bytes) const override {
    mappings().touch({span_of(to, bytes), span_of(from, bytes)},
                     [=] { std::memcpy(to, from, bytes); });
  }

 private:
  static constexpr size_t kAlignment = 256;
};

// Of a stream. What is no kernel says itself what it touches.
struct Task {
  std::function<void()> run;
  bool is_kernel = false;
};
using Work = std::vector<Task>;

std::atomic<int64_t> replays{0};

struct HostRecording final : Recording {
  explicit HostRecording(Work recorded) : work(std::move(recorded)) {}
  const Work work;
};

// The pinned memory of the program, by its first byte.
class Pinned {
 public:
  void add(const std::byte* first, size_t bytes) {
    const std::lock_guard lock(mutex_);
    blocks_[first] = bytes;
  }
  void remove(const std::byte* first) {
    const std::lock_guard lock(mutex_);
    blocks_.erase(first);
  }
  bool contains(const void* pointer) {
    const std::lock_guard lock(mutex_);
    const auto after = blocks_.upper_bound(static_cast<const std::byte*>(pointer));
    return after != blocks_.begin() && pointer < std::prev(after)->first + std::prev(after)->second;
  }

 private:
  std::mutex mutex_;
  std::map<const std::byte*, size_t> blocks_;
};

Pinned& pinned_memory() {
  static auto* all = new Pinned;
  return *all;
}

// What was put into a stream, and runs when somebody waits for it.
class Stream {
 public:
  void add(Task task) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(task));
  }
  void add(const Work& work) {
    const std::lock_guard lock(mutex_);
    work_.insert(work_.end(), work.begin(), work.end());
  }
  Work exchange(Work other) {
    const std::lock_guard lock(mutex_);
    return std::exchange(work_, std::move(other));
  }
  bool is_idle() {
    const std::lock_guard lock(mutex_);
    return work_.empty();
  }
  void run() {
    const std::lock_guard running(running_);
    const Work work = exchange({});
    std::optional<Access> access;
    for (const Task& task : work) {
      if (task.is_kernel && !access) access.emplace();
      if (!task.is_kernel) end_of_grids();
      task.run();
    }
    end_of_grids();
    if (access) mappings().check();
  }

 private:
  std::mutex mutex_;
  std::recursive_mutex running_;
  Work work_;
};

// Callers' streams by their handles. What they hold may outlive everything else.
class Streams {
 public:
  std::shared_ptr<Stream> find(void* handle) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Stream>& stream = streams_[handle == nullptr ? kLegacy : handle];
    if (stream == nullptr) stream = std::make_shared<Stream>();
    return stream;
  }
  // A task for each stream that has something to do.
  void add_to_busy(const Task& task) {
    const std::lock_guard lock(mutex_);
    for (const auto& [handle, stream] : streams_) {
      if (!stream->is_idle()) stream->add(task);
    }
  }

 private:
  // CUDA has two names for the legacy default stream.
  static inline void* const kLegacy = reinterpret_cast<void*>(uintptr_t{1});
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<Stream>> streams_;
};
Streams& streams() {
  static auto* all = new Streams;
  return *all;
}

// Is given back as by cudaFree, which returns when the device is idle: when callers' streams have
// done what they have to do.
class PlainMemory final : public HostMemory {
 public:
  std::shared_ptr<void> allocate(size_t bytes, Pages pages) const override {
    std::shared_ptr<void> memory = HostMemory::allocate(bytes, pages);
    if (memory == nullptr) return nullptr;
    void* const pointer = memory.get();
    return {pointer, [memory = std::move(memory)](void*) { streams().add_to_busy({[memory] {}}); }};
  }
};

// Runs nothing before somebody waits, and reads pinned memory as late.
class HostQueue final : public Queue {
 public:
  explicit HostQueue(std::shared_ptr<Stream> stream) : stream_(std::move(stream)) {}
  Device device() const override { return kDevice; }
  const void* stream() const override { return stream_.get(); }
  std::shared_ptr<void> allocate(size_t bytes) override {
    std::shared_ptr<void> memory = HostMemory().allocate(bytes, Pages::heap);
    if (memory == nullptr) throw OutOfMemory("emulated GPU: no memory");
    void* const pointer = memory.get();
    return {pointer,
            [memory = std::move(memory), stream = stream_](void*) { stream->add({[memory] {}}); }};
  }
  void follow(Queue& other) override {
    add([before = dynamic_cast<HostQueue&>(other).stream_] { before->run(); });
  }
  void upload(void* to, const void* from, size_t bytes) override {
    if (pinned_memory().contains(from)) return add([=] { HostMemory().copy(to, from, bytes); });
    std::vector<char> data(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    add([to, data = std::move(data)] { HostMemory().copy(to, data.data(), data.size()); });
  }
  void download(void* to, const void* from, size_t bytes) override {
    add([=] { HostMemory().copy(to, from, bytes); });
  }
  void zero(void* to, size_t bytes) override {
    add([=] { HostMemory().zero(to, bytes); });
  }
  std::unique_ptr<Recording> record(const std::function<void()>& put) override {
    Work before = stream_->exchange({});
    try {
      put();
    } catch (...) {
      stream_->exchange(std::move(before));
      throw;
    }
    return std::make_unique<HostRecording>(stream_->exchange(std::move(before)));
  }
  void replay(const Recording& recording) override {
    stream_->add(dynamic_cast<const HostRecording&>(recording).work);
    ++replays;
  }
  void wait() override { stream_->run(); }
  void add(std::function<void()> task, bool is_kernel = false) {
    stream_->add({std::move(task), is_kernel});
  }

 private:
  std::shared_ptr<Stream> stream_;
};

// By the host's clock.
class HostMarks final : public Marks {
 public:
  HostMarks(HostQueue& queue, size_t count)
      : queue_(queue), times_(std::make_shared<std::vector<int64_t>>(count, -1)) {}
  void put(size_t index) override {
    times_->at(index) = -1;
    queue_.add([times = times_, index] {
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      (*times)[index] = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    });
  }
  int64_t between(size_t first, size_t last) const override {
    if (times_->at(first) < 0 || times_->at(last) < 0) {
      throw std::logic_error("marks: the queue has not been waited for");
    }
    return (*times_)[last] - (*times_)[first];
  }

 private:
  HostQueue& queue_;
  std::shared_ptr<std::vector<int64_t>> times_;
};

class HostBackend final : public Backend {
 public:
  int num_devices() const override { return 1; }
  std::string status() const override { return "emulated on the host"; }
  std::string model_name(int) const override { return "emulated GPU"; }
  int arch(int) const override { return host::arch(); }
  int64_t shared_bytes(int) const override { return host::shared_bytes(); }
  int64_t l2_bytes(int) const override { return 50 << 20; }
  const Memory& memory(int) const override {
    static const PlainMemory memory;
    return memory;
  }
  std::unique_ptr<Queue> make_queue(int) const override {
    return std::make_unique<HostQueue>(std::make_shared<Stream>());
  }
  std::unique_ptr<Queue> wrap_stream(int, void* stream) const override {
    return std::make_unique<HostQueue>(streams().find(stream));
  }
  std::shared_ptr<std::byte> pinned(int, size_t bytes) const override {
    const std::shared_ptr<std::byte[]> memory(new std::byte[std::max<size_t>(bytes, 1)],
                                              [](std::byte* first) {
                                                pinned_memory().remove(first);
                                                delete[] first;
                                              });
    pinned_memory().add(memory.get(), bytes);
    return {memory, memory.get()};
  }
  std::unique_ptr<Marks> make_marks(Queue& queue, size_t count) const override {
    return std::make_unique<HostMarks>(dynamic_cast<HostQueue&>(queue), count);
  }
  void register_kernels() const override { register_cuda(); }
};

}  // namespace

void set_seed(uint64_t seed) {
  next_seed = seed;
}

void set_memory(const MemoryFacts& facts) {
  memory_bytes = facts.bytes;
  memory_rate = facts.copy_rate;
}

bool is_allocated(const void* first, size_t bytes) {
  return mappings().contains(first, bytes);
}

int64_t num_replays() {
  return replays;
}

void enqueue(Grid grid, Queue& queue) {
  auto& own = dynamic_cast<HostQueue&>(queue);
  own.add([grid = std::move(grid)] { run(grid, next_seed.fetch_add(1)); }, true);
}

}  // namespace effinfer::cuda::host

namespace effinfer {

const Backend* cuda_backend() {
  static const cuda::host::HostBackend backend;
  return &backend;
}

double cuda_copy_rate(int) {
  return cuda::host::memory_rate;
}

}  // namespace effinfer
