// A set of a sequence's tokens, as bits: what every method of sparse attention makes. The engine
// walks the words as they are (ops/visits.h), operators make spans of them.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace effinfer::cpu {

// A view of words that someone else owns: bit t % 64 of word t / 64 is token t.
class TokenSet {
 public:
  TokenSet() = default;
  TokenSet(uint64_t* words, int64_t num_words) : words_(words), num_words_(num_words) {}
  static constexpr int64_t words_of(int64_t tokens) { return (tokens + 63) / 64; }

  void clear() const { std::fill_n(words_, num_words_, uint64_t{0}); }
  void add_all() const { std::fill_n(words_, num_words_, ~uint64_t{0}); }
  void add(int64_t token) const { words_[token / 64] |= uint64_t{1} << token % 64; }
  // What does not exist of [begin, end) is left out.
  void add(int64_t begin, int64_t end) const;
  // Of a set of at least as many words.
  void add(const TokenSet& other) const {
    for (int64_t i = 0; i < num_words_; ++i) words_[i] |= other.words_[i];
  }
  // The first so many words of the set.
  TokenSet first_words(int64_t count) const { return {words_, std::min(count, num_words_)}; }
  int64_t num_words() const { return num_words_; }

  // visit(token), ascending.
  template <class Visit>
  void for_tokens(Visit&& visit) const {
    for (int64_t i = 0; i < num_words_; ++i) {
      for (uint64_t bits = words_[i]; bits != 0; bits &= bits - 1) {
        visit(i * 64 + std::countr_zero(bits));
      }
    }
  }
  // Appends [begin, end) of what is before `limit`; returns how many spans.
  int32_t append_spans(int64_t limit, std::vector<int32_t>& spans) const;

 private:
  uint64_t* words_ = nullptr;
  int64_t num_words_ = 0;
};

}  // namespace effinfer::cpu
