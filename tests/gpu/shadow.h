// What the detector of races (races.cpp) notes of each byte of memory.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <vector>

namespace effinfer::cuda::host {

// Who touched a byte, and when. Runs of blocks are numbered from 1 on, through all launches. Two
// words: what was stored field by field could not be read as one for some cycles.
class Access {
 public:
  // Both not above 16 bits.
  struct Fences {
    size_t of_memory = 0;
    size_t async = 0;
  };

  Access() = default;
  // `step` is `warp_syncs` of the thread or, where clocks are kept, the epoch.
  Access(uint32_t run, uint32_t step, uint32_t syncs, size_t thread, Fences fences)
      : when_(run | uint64_t{step} << 32),
        who_((syncs & 0xffff) | thread << 16 | (fences.of_memory & 0xffff) << 32 |
             fences.async << 48) {}

  uint32_t run() const { return static_cast<uint32_t>(when_); }
  uint32_t step() const { return static_cast<uint32_t>(when_ >> 32); }
  uint32_t syncs() const { return who_ & 0xffff; }
  uint32_t thread() const { return who_ >> 16 & 0x7fff; }
  // Written so that others may do so at once.
  bool is_added() const { return (who_ & kAdded) != 0; }
  uint32_t fences() const { return who_ >> 32 & 0xffff; }
  uint32_t async_fences() const { return static_cast<uint32_t>(who_ >> 48); }
  bool operator==(const Access&) const = default;

  Access added() const { return {when_, who_ | kAdded}; }
  Access of_thread(uint32_t thread) const {
    return {when_, (who_ & ~(uint64_t{0x7fff} << 16)) | uint64_t{thread & 0x7fff} << 16};
  }

 private:
  static constexpr uint64_t kAdded = uint64_t{1} << 31;

  Access(uint64_t when, uint64_t who) : when_(when), who_(who) {}

  uint64_t when_ = 0;
  uint64_t who_ = 0;
};

// Accesses of a launch by numbers, of which memory has many and which are a quarter as large. They
// grow through all launches: 0 is none, and those below that of a launch's first one are of
// launches before.
class Accesses {
 public:
  using Number = uint32_t;

  void begin_launch() {
    first_ = next();
    all_.clear();
  }
  // For as many threads and others that do something.
  void begin_block(size_t agents) { last_.resize(std::max(last_.size(), 2 * agents)); }
  bool are_used_up() const { return first_ >= kMost / 2; }
  void forget() { *this = {}; }
  Number next() const { return first_ + static_cast<Number>(all_.size()); }

  // The same for one that is the last of its thread already.
  [[gnu::always_inline]] Number number(Access now) {
    if (now == recent_access_) return recent_;
    return number_of_other(now);
  }
  const Access& operator[](Number number) const { return all_[number - first_]; }

 private:
  [[gnu::noinline]] Number number_of_other(Access now) {
    Number& last = last_[size_t{2} * now.thread() + now.is_added()];
    if (last < first_ || all_[last - first_] != now) {
      if (next() == kMost) throw std::length_error("races: a launch with more accesses than that");
      last = next();
      all_.push_back(now);
    }
    recent_access_ = now;
    recent_ = last;
    return last;
  }

  static constexpr Number kMost = UINT32_MAX;
  Number first_ = 1;
  std::vector<Access> all_;
  std::vector<Number> last_;  // of each agent: all but what adds, and that
  Access recent_access_;
  Number recent_ = 0;
};

// The last write of a byte, and two reads since then that stand for all: while neither is ordered
// before another read, they are of two threads, of two warps or blocks where there were such.
struct Byte {
  Accesses::Number write = 0;
  std::array<Accesses::Number, 2> reads{};
};

// Reads by some lanes of a warp that are equally far: of all a bit, of one the rest.
struct WarpReads {
  Access of_one;
  uint32_t lanes = 0;

  bool is_of(const Access& read) const {
    return of_one.run() == read.run() && of_one.thread() / kLanes == read.thread() / kLanes;
  }
  bool is_as_far_as(const Access& read) const {
    return of_one.step() == read.step() && of_one.syncs() == read.syncs() &&
           of_one.fences() == read.fences();
  }
  static uint32_t lane_of(const Access& read) { return uint32_t{1} << read.thread() % kLanes; }
  // each(Access) of its lanes, as long as that says true.
  template <class F>
  bool all_of(F&& each) const {
    const uint32_t first = of_one.thread() / kLanes * kLanes;
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
      if (!each(of_one.of_thread(first + uint32_t(std::countr_zero(left))))) return false;
    }
    return true;
  }

 private:
  static constexpr uint32_t kLanes = 32;
};

// More reads of a byte, in kernels that order some threads only (clocks.h): all that are not
// ordered before others, and some that are, as they go when there are twice as many as were left
// the time before. The first two are in a line of a cache with what leads to the rest.
class alignas(64) Reads {
 public:
  Accesses::Number oldest = 0;  // all came from there on

  Reads() = default;
  Reads(const Reads& other) { *this = other; }
  Reads& operator=(const Reads& other) {
    if (this == &other) return *this;
    oldest = other.oldest;
    first_ = other.first_;
    size_ = 0;
    if (other.size_ > 0) reserve(other.size_);
    size_ = other.size_;
    std::copy_n(other.rest_.get(), size_, rest_.get());
    return *this;
  }

  bool empty() const { return (first_[0].lanes | first_[1].lanes) == 0 && size_ == 0; }
  void clear() {
    first_[0].lanes = first_[1].lanes = 0;
    size_ = 0;
  }
  // Those that a read is looked for in: mostly those of warps that read a tile again and again.
  template <class F>
  bool any_of_few(F&& is) {
    constexpr uint32_t kFew = 16;
    for (WarpReads& some : first_) {
      if (is(some)) return true;
    }
    return std::any_of(rest_.get(), rest_.get() + std::min<uint32_t>(size_, kFew), is);
  }
  template <class F>
  void for_each(F&& each) const {
    std::ranges::for_each(first_, each);
    std::for_each_n(rest_.get(), size_, each);
  }
  // Before it would grow those go of which is(WarpReads) says so.
  template <class F>
  void add(const WarpReads& reads, F&& is) {
    if (size_ == capacity()) {
      WarpReads* const begin = rest_.get();
      size_ = static_cast<uint32_t>(std::remove_if(begin, begin + size_, is) - begin) & kMost;
      if (2 * size_ >= capacity()) reserve(2 * capacity());
    }
    if (size_ == kMost) throw std::length_error("races: a byte with more reads than that");
    rest_[size_] = reads;
    ++size_;
  }

 private:
  static constexpr uint32_t kMost = (1U << 26) - 1;

  uint32_t capacity() const { return rest_ ? 1U << log_capacity_ : 0; }
  // Room for as many, and for at least 8.
  void reserve(uint32_t count) {
    constexpr uint32_t kLeast = 8;
    if (rest_ && count <= capacity()) return;
    const int log = std::countr_zero(std::bit_ceil(std::max(count, kLeast)));
    auto grown = std::make_unique_for_overwrite<WarpReads[]>(size_t{1} << log);
    std::copy_n(rest_.get(), size_, grown.get());
    rest_ = std::move(grown);
    log_capacity_ = static_cast<uint32_t>(log) & 0x3f;
  }

  uint32_t size_ : 26 = 0;  // of the rest
  uint32_t log_capacity_ : 6 = 0;
  std::array<WarpReads, 2> first_;
  std::unique_ptr<WarpReads[]> rest_;
};
static_assert(sizeof(Reads) == 64);

constexpr uintptr_t kWord = 4;

// What the bytes of few words need, which are told apart.
struct Parts {
  std::array<Byte, kWord> bytes;
  std::array<Reads, kWord> reads;
  std::array<bool, kWord> awaits_copy{};
};

// Of four bytes, which are told apart once something has touched less than all.
struct Word {
  Byte whole;
  uint32_t details : 30 = 0;  // of more reads, and of its parts; 0: none
  uint32_t is_divided : 1 = false;
  uint32_t awaits_copy : 1 = false;

  bool is_plain() const { return (is_divided | awaits_copy) == 0; }
};
static_assert(sizeof(Word) == 16);

// One of a word's bytes, or all four.
struct Place {
  Byte& byte;
  Word& word;
  Reads* reads;       // or null: there are none yet
  bool* awaits_copy;  // of a byte, or null: of the word

  bool is_awaited() const { return awaits_copy != nullptr ? *awaits_copy : word.awaits_copy != 0; }
  void await_copy(bool awaits) const {
    if (awaits_copy != nullptr) {
      *awaits_copy = awaits;
    } else {
      word.awaits_copy = awaits;
    }
  }
};

// Words of what the kernels of a thread of the host have touched. What has numbers below the oldest
// that count is forgotten: of global memory those of launches before, of shared memory those of
// blocks before.
class Shadow {
 public:
  void begin_launch(Accesses::Number next) {
    launch_ = next;
    if (pages_.size() > kPagesKept) forget();
  }
  void begin_block(const void* shared, size_t bytes, Accesses::Number next) {
    shared_ = reinterpret_cast<uintptr_t>(shared);
    shared_size_ = bytes;
    block_ = next;
    if (shared_words_.size() < bytes / kWord + 1) shared_words_.resize(bytes / kWord + 1);
  }
  void forget() {
    pages_.clear();
    recent_ = {};
    std::ranges::fill(shared_words_, Word{});
    reads_.clear();
    parts_.clear();
  }
  bool is_shared(uintptr_t at) const { return at - shared_ < shared_size_; }
  size_t in_shared(const void* place) const { return reinterpret_cast<uintptr_t>(place) - shared_; }
  Accesses::Number oldest(uintptr_t at) const { return is_shared(at) ? block_ : launch_; }

  // Whether each(Word&, oldest number that counts) says so of all of some bytes, which are whole
  // words that nothing has divided and that await no copy: what most accesses find.
  template <class F>
  [[gnu::always_inline]] bool all_whole(const void* place, size_t size, F&& each) {
    return all_undivided(place, size, [&](Word& word, Accesses::Number oldest) {
      return word.awaits_copy == 0 && each(word, oldest);
    });
  }

  // From now on who touches those bytes must wait for a copy to them, or need not. The copy's own
  // writes have been noted.
  void await_copy(const void* place, size_t size, bool awaits) {
    const auto mark = [=](Word& word, Accesses::Number) {
      word.awaits_copy = awaits;
      return true;
    };
    if (all_undivided(place, size, mark)) return;
    for_bytes(place, size, [=](uintptr_t, const Place& here) { here.await_copy(awaits); });
  }

  // Whether some of those bytes were written from that number on.
  bool is_written(const void* place, size_t size, Accesses::Number since) {
    auto at = reinterpret_cast<uintptr_t>(place) / kWord * kWord;
    for (const uintptr_t end = reinterpret_cast<uintptr_t>(place) + size; at < end;) {
      uintptr_t stretch = 0;
      const Word* word = words(at, stretch);
      for (stretch = std::min(stretch, end); at < stretch; ++word, at += kWord) {
        if (last_write(*word) >= since) return true;
      }
    }
    return false;
  }

  // each(address, Place) for all of some bytes, or once for four that are still alike.
  template <class F>
  void for_bytes(const void* place, size_t size, F&& each) {
    auto at = reinterpret_cast<uintptr_t>(place);
    for (const uintptr_t end = at + size; at < end;) {
      const Accesses::Number first = oldest(at);
      uintptr_t stretch = 0;
      Word* word = words(at, stretch);
      for (stretch = std::min(stretch, end); at < stretch; ++word) {
        at = for_word(*word, first, at, std::min(end, (at / kWord + 1) * kWord), each);
      }
    }
  }

  // Those that are not among the two of the word, if there are some that count.
  const Reads* more_reads(const Word& word, Accesses::Number oldest) const {
    if (word.details == 0) return nullptr;
    const Reads& reads = reads_[word.details - 1];
    return reads.oldest == oldest && !reads.empty() ? &reads : nullptr;
  }
  // Those of a word, into which others can be put.
  Reads& reads_of(Word& word, Accesses::Number oldest) {
    if (word.details == 0) {
      reads_.emplace_back();
      parts_.emplace_back();
      word.details = static_cast<uint32_t>(reads_.size()) & 0x3fffffff;
    }
    Reads& mine = reads_[word.details - 1];
    if (mine.oldest != oldest) {
      mine.oldest = oldest;
      mine.clear();
    }
    return mine;
  }

 private:
  static constexpr size_t kPage = 4096;
  // With more than that all is given back between launches.
  static constexpr size_t kPagesKept = 2048;
  using Page = std::array<Word, kPage / kWord>;
  struct RecentPage {
    uintptr_t number = 0;
    Page* page = nullptr;
  };

  // As all_whole(), of words that may await one.
  template <class F>
  [[gnu::always_inline]] bool all_undivided(const void* place, size_t size, F&& each) {
    const auto at = reinterpret_cast<uintptr_t>(place);
    if ((at | size) % kWord != 0) return false;
    const Accesses::Number first = oldest(at);
    uintptr_t stretch = 0;
    Word* word = words(at, stretch);
    if (stretch - at < size) return false;
    for (const Word* const end = word + size / kWord; word < end; ++word) {
      if (word->is_divided != 0 || !each(*word, first)) return false;
    }
    return true;
  }
  Accesses::Number last_write(const Word& word) const {
    if (word.is_divided == 0) return word.whole.write;
    Accesses::Number last = 0;
    for (const Byte& part : parts_of(word).bytes) last = std::max(last, part.write);
    return last;
  }
  // What does not count any more neither divides a word nor is it waited for.
  void renew(Word& word, Accesses::Number oldest) {
    if (word.is_divided != 0) {
      if (reads_[word.details - 1].oldest == oldest) return;
      word.whole.write = last_write(word);
      word.is_divided = word.awaits_copy = false;
    } else if (word.whole.write < oldest) {
      word.awaits_copy = false;
    }
  }
  Parts& parts_of(const Word& word) const { return *parts_[word.details - 1]; }
  void divide(Word& word, Accesses::Number oldest) {
    const Reads& reads = reads_of(word, oldest);
    std::unique_ptr<Parts>& parts = parts_[word.details - 1];
    if (!parts) parts = std::make_unique<Parts>();
    parts->bytes.fill(word.whole);
    parts->reads.fill(reads);
    parts->awaits_copy.fill(word.awaits_copy != 0);
    word.is_divided = true;
  }
  template <class F>
  uintptr_t for_word(Word& word, Accesses::Number oldest, uintptr_t at, uintptr_t stop, F&& each) {
    if (!word.is_plain()) renew(word, oldest);
    if (stop - at == kWord && word.is_divided == 0) {
      Reads* const reads = word.details == 0 ? nullptr : &reads_of(word, oldest);
      each(at, Place{word.whole, word, reads, nullptr});
      return stop;
    }
    if (word.is_divided == 0) divide(word, oldest);
    Parts& mine = parts_of(word);
    for (; at < stop; ++at) {
      const size_t part = at % kWord;
      each(at, Place{mine.bytes[part], word, &mine.reads[part], &mine.awaits_copy[part]});
    }
    return stop;
  }
  // Words that lie behind each other, from that of `at` on; `end`: behind the last of them.
  [[gnu::always_inline]] Word* words(uintptr_t at, uintptr_t& end) {
    if (is_shared(at)) {
      end = shared_ + shared_size_;
      return &shared_words_[(at - shared_) / kWord];
    }
    const uintptr_t number = at / kPage;
    end = (number + 1) * kPage;
    RecentPage& recent = recent_[number % recent_.size()];
    if (recent.page == nullptr || recent.number != number) [[unlikely]]
      find(number, recent);
    return &(*recent.page)[at % kPage / kWord];
  }
  [[gnu::noinline]] void find(uintptr_t number, RecentPage& recent) {
    std::unique_ptr<Page>& page = pages_[number];
    if (!page) page = std::make_unique<Page>();
    recent = {number, page.get()};
  }

  Accesses::Number launch_ = 1;
  Accesses::Number block_ = 1;
  uintptr_t shared_ = 0;
  size_t shared_size_ = 0;
  std::vector<Word> shared_words_;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
  std::array<RecentPage, 256> recent_;         // of those, by their numbers
  std::deque<Reads> reads_;                    // of words that have details
  std::vector<std::unique_ptr<Parts>> parts_;  // as many, of those that are or were divided
};

}  // namespace effinfer::cuda::host
