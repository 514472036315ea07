// Where the last tokens of a text occurred before: hash chains over n-grams of a few lengths.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace effinfer::runtime {

// Remembers the last `capacity` tokens that it was given, rounded up to a power of two; takes 40
// bytes for each of them.
class NgramIndex {
 public:
  // Lengths of the n-grams, the longest first: a long one finds the right places among many, the
  // shortest finds a place soon after something new.
  static constexpr std::array<int32_t, 3> kOrders = {8, 4, 2};
  static constexpr int32_t kLongestMatch = 32;
  static constexpr int32_t kSeparator = -1;  // between documents; matches nothing

  struct Match {
    int64_t next = 0;    // the token behind the match
    int32_t length = 0;  // tokens that agree, up to kLongestMatch
  };

  explicit NgramIndex(int64_t capacity);

  void append(std::span<const int32_t> tokens);
  int64_t size() const { return size_; }  // tokens that were appended
  int64_t first() const { return size_ > capacity_ ? size_ - capacity_ : 0; }
  int64_t capacity() const { return capacity_; }
  int32_t operator[](int64_t place) const { return tokens_[ring(place)]; }

  // Places whose tokens agree with the last ones of `text`, at least `shortest`, each once: the
  // longest and the latest are among them when there are more than `matches` holds. Places where
  // nothing follows are left out. Returns how many.
  size_t find(std::span<const int32_t> text, int32_t shortest, std::span<Match> matches) const;

 private:
  static constexpr int kCandidates = 16;  // of an order

  size_t ring(int64_t place) const { return static_cast<size_t>(place) & mask_; }
  static uint32_t hash(const int32_t* last, int32_t order);
  int32_t agree(std::span<const int32_t> text, int64_t next) const;
  void link(int64_t end);

  struct Chains {
    std::vector<int64_t> heads;      // by hash: the place behind the last n-gram of it, plus 1
    std::vector<uint32_t> distance;  // by place: to the one before of the same hash; 0: none
  };

  int64_t capacity_;
  size_t mask_;
  int64_t size_ = 0;
  int64_t document_ = 0;  // where the last document begins
  std::vector<int32_t> tokens_;
  std::array<Chains, kOrders.size()> chains_;
};

}  // namespace effinfer::runtime
