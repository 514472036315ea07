#include "cpu/token_set.h"

namespace effinfer::cpu {

void TokenSet::add(int64_t begin, int64_t end) const {
  begin = std::max<int64_t>(begin, 0);
  end = std::min(end, num_words_ * 64);
  while (begin < end) {
    const int64_t count = std::min(end - begin, 64 - begin % 64);
    words_[begin / 64] |= ~uint64_t{0} >> (64 - count) << begin % 64;
    begin += count;
  }
}

int32_t TokenSet::append_spans(int64_t limit, std::vector<int32_t>& spans) const {
  int32_t count = 0;
  int64_t open = -1;  // where a span begins whose end is not known
  const auto close = [&](int64_t end) {
    spans.push_back(static_cast<int32_t>(open));
    spans.push_back(static_cast<int32_t>(end));
    open = -1;
    ++count;
  };
  for (int64_t at = 0; at < limit;) {
    const uint64_t word = words_[at / 64] >> at % 64;
    const int64_t left = 64 - at % 64;
    if (open < 0) {
      const int64_t zeros = std::min<int64_t>(std::countr_zero(word), left);
      at += zeros;
      if (zeros < left && at < limit) open = at;
    } else {
      const int64_t ones = std::min<int64_t>(std::countr_one(word), left);
      at += ones;
      if (ones < left && at < limit) close(at);
    }
  }
  if (open >= 0) close(limit);
  return count;
}

}  // namespace effinfer::cpu
