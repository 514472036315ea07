// What the detector of races (races.cpp) notes of each byte of memory.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace effinfer::cuda::host {

// Who touched a byte, and when. Runs of blocks are numbered from 1 on, through all launches; run 0
// came before all.
struct Access {
  uint32_t run = 0;
  uint32_t step = 0;  // `warp_syncs` of its thread or, where clocks are kept, the epoch
  uint16_t syncs = 0;
  uint16_t thread : 15 = 0;
  uint16_t is_added : 1 = false;  // written so that others may do so at once
  uint16_t fences = 0;
  uint16_t async_fences = 0;

  bool operator==(const Access& other) const {
    using Bits = std::array<uint64_t, 2>;
    return std::bit_cast<Bits>(*this) == std::bit_cast<Bits>(other);
  }
};

// The last write of a byte, and two reads since then that stand for all: while neither is ordered
// before another read, they are of two threads, of two warps or blocks where there were such.
struct Byte {
  Access write;
  std::array<Access, 2> reads;

  void forget_reads() { reads[0].run = reads[1].run = 0; }
  bool is_read() const { return (reads[0].run | reads[1].run) != 0; }
};

// Reads by some lanes of a warp that are equally far: of all a bit, of one the rest.
struct WarpReads {
  Access of_one;
  uint32_t lanes = 0;

  bool is_of(const Access& read) const {
    return of_one.run == read.run && of_one.thread / kLanes == read.thread / kLanes;
  }
  bool is_as_far_as(const Access& read) const {
    return of_one.step == read.step && of_one.syncs == read.syncs && of_one.fences == read.fences;
  }
  static uint32_t lane_of(const Access& read) { return uint32_t{1} << read.thread % kLanes; }
  // each(Access) of its lanes, as long as that says true.
  template <class F>
  bool all_of(F&& each) const {
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
      Access read = of_one;
      read.thread = (of_one.thread / kLanes * kLanes + unsigned(std::countr_zero(left))) & 0x7fff;
      if (!each(read)) return false;
    }
    return true;
  }

 private:
  static constexpr unsigned kLanes = 32;
};

// More reads of a byte, in kernels that order some threads only (clocks.h): all that are not
// ordered before others, and some that are, as they go when there are twice as many as were left
// the time before. The first few are in a line of a cache with what leads to the rest.
struct alignas(64) Reads {
  std::array<WarpReads, 2> first;
  std::vector<WarpReads> rest;

  bool empty() const { return (first[0].lanes | first[1].lanes) == 0 && rest.empty(); }
  void clear() {
    first[0].lanes = first[1].lanes = 0;
    rest.clear();
  }
  // Those that a read is looked for in: mostly those of warps that read a tile again and again.
  template <class F>
  bool any_of_few(F&& is) {
    constexpr size_t kFew = 16;
    for (WarpReads& some : first) {
      if (is(some)) return true;
    }
    for (size_t i = 0; i < std::min(rest.size(), kFew); ++i) {
      if (is(rest[i])) return true;
    }
    return false;
  }
  // Before it would grow those go of which is(WarpReads) says so.
  template <class F>
  void add(const WarpReads& reads, F&& is) {
    constexpr size_t kLeast = 8;
    if (rest.size() == rest.capacity()) {
      std::erase_if(rest, is);
      if (2 * rest.size() >= rest.capacity()) rest.reserve(std::max(kLeast, 2 * rest.capacity()));
    }
    rest.push_back(reads);
  }
};

constexpr uintptr_t kWord = 4;

// What few words need.
struct Details {
  Reads reads;  // of the whole word
  std::array<Byte, kWord> parts;
  std::array<Reads, kWord> reads_of_parts;
  std::array<bool, kWord> part_awaits_copy{};
};

// Of four bytes, which are told apart once something has touched less than all. A line of a cache.
struct alignas(64) Word {
  Byte whole;
  uint32_t since = 0;  // the launch, or the run of a block for which shared memory is new
  bool awaits_copy = false;
  bool divided = false;
  uint16_t written = 0;  // in which series of launches, that begin before others have ended
  std::unique_ptr<Details> details;

  // What launches before have left is of no meaning any more, but for its memory.
  void begin(uint32_t now) {
    since = now;
    whole.write.run = 0;
    whole.forget_reads();
    awaits_copy = false;
    divided = false;
    if (details) details->reads.clear();
  }
  Details& more() {
    if (!details) details = std::make_unique<Details>();
    return *details;
  }
  void divide() {
    Details& mine = more();
    divided = true;
    mine.parts.fill(whole);
    mine.reads_of_parts.fill(mine.reads);
    mine.part_awaits_copy.fill(awaits_copy);
  }
};
static_assert(sizeof(Word) == 64);

// One of a word's bytes, or all four.
struct Place {
  Byte& byte;
  bool& awaits_copy;
  Word& word;
  int part;  // or -1: all

  Reads* reads() const {
    if (!word.details) return nullptr;
    return part < 0 ? &word.details->reads
                    : &word.details->reads_of_parts[static_cast<size_t>(part)];
  }
  Reads& more_reads() const {
    word.more();
    return *reads();
  }
};

// Words of what the kernels of a thread of the host have touched.
class Shadow {
 public:
  void begin_launch() {
    if (pages_.size() <= kPagesKept) return;
    pages_.clear();
    recent_ = {};
  }
  void begin_block(const void* shared, size_t bytes) {
    shared_ = reinterpret_cast<uintptr_t>(shared);
    shared_size_ = bytes;
    if (shared_words_.size() < bytes / kWord + 1) shared_words_.resize(bytes / kWord + 1);
  }
  bool is_shared(uintptr_t at) const { return at - shared_ < shared_size_; }
  size_t in_shared(const void* place) const { return reinterpret_cast<uintptr_t>(place) - shared_; }

  // Whether each(Word&) says so of all of some bytes, which are whole words that nothing has
  // divided and that await no copy: what most accesses find.
  template <class F>
  [[gnu::always_inline]] bool all_whole(const void* place, size_t size, uint32_t launch,
                                        uint32_t run, F&& each) {
    const auto at = reinterpret_cast<uintptr_t>(place);
    if ((at | size) % kWord != 0) return false;
    const uint32_t since = is_shared(at) ? run : launch;
    uintptr_t stretch = 0;
    Word* word = words(at, stretch);
    if (stretch - at < size) return false;
    for (const Word* const end = word + size / kWord; word < end; ++word) {
      if (word->since != since) word->begin(since);
      if (word->divided || word->awaits_copy || !each(*word)) return false;
    }
    return true;
  }

  // Whether some of those bytes were written in that series, by whatever launch.
  bool is_written(const void* place, size_t size, uint16_t series) {
    auto at = reinterpret_cast<uintptr_t>(place) / kWord * kWord;
    for (const uintptr_t end = reinterpret_cast<uintptr_t>(place) + size; at < end;) {
      uintptr_t stretch = 0;
      const Word* word = words(at, stretch);
      for (stretch = std::min(stretch, end); at < stretch; ++word, at += kWord) {
        if (word->written == series) return true;
      }
    }
    return false;
  }

  // each(address, Place) for all of some bytes, or once for four that are still alike. What was
  // noted of global memory before that launch is forgotten, of shared memory before that run.
  template <class F>
  void for_bytes(const void* place, size_t size, uint32_t launch, uint32_t run, F&& each) {
    auto at = reinterpret_cast<uintptr_t>(place);
    for (const uintptr_t end = at + size; at < end;) {
      const uint32_t since = is_shared(at) ? run : launch;
      uintptr_t stretch = 0;
      Word* word = words(at, stretch);
      for (stretch = std::min(stretch, end); at < stretch; ++word) {
        if (word->since != since) word->begin(since);
        at = for_word(*word, at, std::min(end, (at / kWord + 1) * kWord), each);
      }
    }
  }

 private:
  static constexpr size_t kPage = 4096;
  // More than that is given back between launches.
  static constexpr size_t kPagesKept = 512;
  using Page = std::array<Word, kPage / kWord>;
  struct RecentPage {
    uintptr_t number = 0;
    Page* page = nullptr;
  };

  template <class F>
  static uintptr_t for_word(Word& word, uintptr_t at, uintptr_t stop, F&& each) {
    if (stop - at == kWord && !word.divided) {
      each(at, Place{word.whole, word.awaits_copy, word, -1});
      return stop;
    }
    if (!word.divided) word.divide();
    for (; at < stop; ++at) {
      const size_t part = at % kWord;
      each(at, Place{word.details->parts[part], word.details->part_awaits_copy[part], word,
                     static_cast<int>(part)});
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

  uintptr_t shared_ = 0;
  size_t shared_size_ = 0;
  std::vector<Word> shared_words_;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
  std::array<RecentPage, 256> recent_;  // of those, by their numbers
};

}  // namespace effinfer::cuda::host
