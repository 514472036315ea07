#include "runtime/speculative/ngram_index.h"

#include <algorithm>
#include <bit>

namespace effinfer::runtime {

NgramIndex::NgramIndex(int64_t capacity)
    : capacity_(static_cast<int64_t>(
          std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(capacity, 64))))),
      mask_(static_cast<size_t>(capacity_) - 1),
      tokens_(static_cast<size_t>(capacity_)) {
  for (Chains& chains : chains_) {
    chains.heads.resize(static_cast<size_t>(capacity_));
    chains.distance.resize(static_cast<size_t>(capacity_));
  }
}

uint32_t NgramIndex::hash(const int32_t* last, int32_t order) {
  uint32_t value = 0;
  for (int32_t i = 0; i < order; ++i) {
    value = (value + static_cast<uint32_t>(last[-i]) + 1) * 0x9E3779B1u;
    value ^= value >> 15;
  }
  return value;
}

void NgramIndex::append(std::span<const int32_t> tokens) {
  for (const int32_t token : tokens) {
    tokens_[ring(size_)] = token;
    ++size_;
    if (token == kSeparator) {
      document_ = size_;
    } else {
      link(size_);
    }
  }
}

// The n-grams that end before `end` get known.
void NgramIndex::link(int64_t end) {
  std::array<int32_t, kOrders.front()> last;
  const int64_t count = std::min<int64_t>(end - document_, kOrders.front());
  for (int64_t i = 0; i < count; ++i) {
    last[static_cast<size_t>(kOrders.front() - 1 - i)] = tokens_[ring(end - 1 - i)];
  }
  for (size_t o = 0; o < kOrders.size(); ++o) {
    if (count < kOrders[o]) continue;
    Chains& chains = chains_[o];
    int64_t& head = chains.heads[hash(&last.back(), kOrders[o]) & mask_];
    const int64_t distance = head == 0 ? 0 : end - (head - 1);
    chains.distance[ring(end)] = distance < capacity_ ? static_cast<uint32_t>(distance) : 0;
    head = end + 1;
  }
}

// How many tokens before `next` are the last ones of the text.
int32_t NgramIndex::agree(std::span<const int32_t> text, int64_t next) const {
  const int64_t most =
      std::min<int64_t>({kLongestMatch, next - first(), static_cast<int64_t>(text.size())});
  int32_t length = 0;
  while (length < most &&
         tokens_[ring(next - 1 - length)] == text[text.size() - 1 - static_cast<size_t>(length)]) {
    ++length;
  }
  return length;
}

size_t NgramIndex::find(std::span<const int32_t> text, int32_t shortest,
                        std::span<Match> matches) const {
  size_t found = 0;
  for (size_t o = 0; o < kOrders.size(); ++o) {
    const int32_t order = kOrders[o];
    if (static_cast<int64_t>(text.size()) < order) continue;
    const Chains& chains = chains_[o];
    int64_t place = chains.heads[hash(&text.back(), order) & mask_] - 1;
    for (int i = 0; i < kCandidates && place > first(); ++i) {
      const bool follows = place < size_ && tokens_[ring(place)] != kSeparator;
      const auto known = matches.first(found);
      const bool is_new =
          std::none_of(known.begin(), known.end(), [&](const Match& m) { return m.next == place; });
      if (follows && is_new) {
        const int32_t length = agree(text, place);
        if (length >= std::max(shortest, order) && found < matches.size()) {
          matches[found++] = {place, length};
        }
      }
      const uint32_t distance = chains.distance[ring(place)];
      if (distance == 0) break;
      place -= distance;
    }
  }
  return found;
}

}  // namespace effinfer::runtime
