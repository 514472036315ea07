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

// Who touched a byte, and when. Runs of blocks are numbered from 1 on, through all launches.
struct Access {
  uint32_t run = 0;
  uint32_t step = 0;  // `warp_syncs` of its thread or, where clocks are kept, the epoch
  uint16_t syncs = 0;
  uint16_t thread : 15 = 0;
  uint16_t is_added : 1 = false;  // written so that others may do so at once
  uint16_t fences = 0;
  uint16_t async_fences = 0;

  // As it is made and compared, in registers: what is stored field by field cannot be read as one
  // for some cycles.
  using Bits = std::array<uint64_t, 2>;
  Bits bits() const { return std::bit_cast<Bits>(*this); }
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
  [[gnu::always_inline]] Number number(const Access::Bits& now) {
    if (now[0] == recent_bits_[0] && now[1] == recent_bits_[1]) return recent_;
    return number_of_other(now);
  }
  const Access& operator[](Number number) const { return all_[number - first_]; }

 private:
  [[gnu::noinline]] Number number_of_other(const Access::Bits& bits) {
    const auto now = std::bit_cast<Access>(bits);
    Number& last = last_[size_t{2} * now.thread + now.is_added];
    if (last < first_ || all_[last - first_].bits() != bits) {
      if (next() == kMost) throw std::length_error("races: a launch with more accesses than that");
      last = next();
      all_.push_back(now);
    }
    recent_bits_ = bits;
    recent_ = last;
    return last;
  }

  static constexpr Number kMost = UINT32_MAX;
  Number first_ = 1;
  std::vector<Access> all_;
  std::vector<Number> last_;  // of each agent: all but what adds, and that
  Access::Bits recent_bits_{};
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
  Accesses::Number oldest = 0;  // what it knows came from there on
};

// Of four bytes, which are told apart once something has touched less than all.
struct Word {
  Byte whole;
  uint32_t details : 30 = 0;  // 0: none
  uint32_t is_divided : 1 = false;
  uint32_t awaits_copy : 1 = false;

  bool is_plain() const { return (is_divided | awaits_copy) == 0; }
};
static_assert(sizeof(Word) == 16);

// One of a word's bytes, or all four.
struct Place {
  Byte& byte;
  Word& word;
  int part;          // or -1: all
  Details* details;  // or null: there are none yet

  bool awaits_copy() const {
    return part < 0 ? word.awaits_copy != 0 : details->part_awaits_copy[static_cast<size_t>(part)];
  }
  void await_copy(bool awaits) const {
    if (part < 0) {
      word.awaits_copy = awaits;
    } else {
      details->part_awaits_copy[static_cast<size_t>(part)] = awaits;
    }
  }
  Reads* reads() const {
    if (details == nullptr) return nullptr;
    return part < 0 ? &details->reads : &details->reads_of_parts[static_cast<size_t>(part)];
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
    details_.clear();
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
    const Details& details = details_[word.details - 1];
    return details.oldest == oldest && !details.reads.empty() ? &details.reads : nullptr;
  }
  // Those of a word, and of parts if it is divided, into which others can be put.
  Details& details(Word& word, Accesses::Number oldest) {
    if (word.details == 0) {
      details_.emplace_back();
      word.details = static_cast<uint32_t>(details_.size()) & 0x3fffffff;
    }
    Details& mine = details_[word.details - 1];
    if (mine.oldest != oldest) {
      mine.oldest = oldest;
      mine.reads.clear();
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
    for (const Byte& part : details_[word.details - 1].parts) last = std::max(last, part.write);
    return last;
  }
  // What does not count any more neither divides a word nor is it waited for.
  void renew(Word& word, Accesses::Number oldest) {
    if (word.is_divided != 0) {
      if (details_[word.details - 1].oldest == oldest) return;
      word.whole.write = last_write(word);
      word.is_divided = word.awaits_copy = false;
    } else if (word.whole.write < oldest) {
      word.awaits_copy = false;
    }
  }
  void divide(Word& word, Accesses::Number oldest) {
    Details& mine = details(word, oldest);
    mine.parts.fill(word.whole);
    mine.reads_of_parts.fill(mine.reads);
    mine.part_awaits_copy.fill(word.awaits_copy != 0);
    word.is_divided = true;
  }
  template <class F>
  uintptr_t for_word(Word& word, Accesses::Number oldest, uintptr_t at, uintptr_t stop, F&& each) {
    if (!word.is_plain()) renew(word, oldest);
    if (stop - at == kWord && word.is_divided == 0) {
      each(at, Place{word.whole, word, -1, word.details == 0 ? nullptr : &details(word, oldest)});
      return stop;
    }
    if (word.is_divided == 0) divide(word, oldest);
    Details& mine = details_[word.details - 1];
    for (; at < stop; ++at) {
      const size_t part = at % kWord;
      each(at, Place{mine.parts[part], word, static_cast<int>(part), &mine});
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
  std::array<RecentPage, 256> recent_;  // of those, by their numbers
  std::deque<Details> details_;
};

}  // namespace effinfer::cuda::host
