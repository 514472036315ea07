// What the detector of races (races.cpp) notes of each byte of memory.
#pragma once

#include <algorithm>
#include <array>
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

  bool operator==(const Access&) const = default;
};

// The last write of a byte, and two reads since then that stand for all: while neither is ordered
// before another read, they are of two threads, of two warps or blocks where there were such.
struct Byte {
  Access write;
  std::array<Access, 2> reads;

  void forget_reads() { reads[0].run = reads[1].run = 0; }
  bool is_read() const { return (reads[0].run | reads[1].run) != 0; }
};

// Reads of a byte in kernels that order some threads only (clocks.h): all that are not ordered
// before others, and some that are, as they go when there are twice as many as were left the time
// before.
struct Reads {
  static constexpr size_t kFew = 16;
  std::vector<Access> all;
  size_t most = kFew;
};

constexpr uintptr_t kWord = 4;

// What few words need.
struct Details {
  Reads reads;  // of the whole word
  bool divided = false;
  std::array<Byte, kWord> parts;
  std::array<Reads, kWord> reads_of_parts;
  std::array<bool, kWord> part_awaits_copy{};
};

// Of four bytes, which are told apart once something has touched less than all. A line of a cache.
struct alignas(64) Word {
  Byte whole;
  uint32_t since = 0;  // the launch, or the run of a block for which shared memory is new
  bool awaits_copy = false;
  std::unique_ptr<Details> details;

  // What launches before have left is of no meaning any more, but for its memory.
  void begin(uint32_t now) {
    since = now;
    whole.write.run = 0;
    whole.forget_reads();
    awaits_copy = false;
    if (!details) return;
    details->divided = false;
    details->reads.all.clear();
  }
  Details& more() {
    if (!details) details = std::make_unique<Details>();
    return *details;
  }
  void divide() {
    Details& mine = more();
    mine.divided = true;
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
    const bool divided = word.details && word.details->divided;
    if (stop - at == kWord && !divided) {
      each(at, Place{word.whole, word.awaits_copy, word, -1});
      return stop;
    }
    if (!divided) word.divide();
    for (; at < stop; ++at) {
      const size_t part = at % kWord;
      each(at, Place{word.details->parts[part], word.details->part_awaits_copy[part], word,
                     static_cast<int>(part)});
    }
    return stop;
  }
  // Words that lie behind each other, from that of `at` on; `end`: behind the last of them.
  Word* words(uintptr_t at, uintptr_t& end) {
    if (is_shared(at)) {
      end = shared_ + shared_size_;
      return &shared_words_[(at - shared_) / kWord];
    }
    const uintptr_t number = at / kPage;
    end = (number + 1) * kPage;
    RecentPage& recent = recent_[number % recent_.size()];
    if (recent.page == nullptr || recent.number != number) {
      std::unique_ptr<Page>& page = pages_[number];
      if (!page) page = std::make_unique<Page>();
      recent = {number, page.get()};
    }
    return &(*recent.page)[at % kPage / kWord];
  }

  uintptr_t shared_ = 0;
  size_t shared_size_ = 0;
  std::vector<Word> shared_words_;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
  std::array<RecentPage, 64> recent_;  // of those, by their numbers
};

}  // namespace effinfer::cuda::host
