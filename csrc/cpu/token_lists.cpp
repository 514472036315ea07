// From scores to spans: the methods of cpu/choose_tokens.h over a caller's batch.
#include "ops/token_lists.h"

#include <algorithm>

#include "cpu/choose_tokens.h"
#include "cpu/level.h"

namespace effinfer::cpu {
namespace {

using ops::ListSpans;
using ops::TokenListInputs;
using ops::VisitBlock;

// A member's memory for one sequence: sets of its tokens, then an order of its scores.
class ListScratch {
 public:
  ListScratch(const TokenListInputs& in, int64_t s, void* memory)
      : num_words_(TokenSet::words_of(in.kv_len[s])), next_(static_cast<uint64_t*>(memory)) {}

  TokenSet set() {
    const TokenSet set(next_, num_words_);
    next_ += num_words_;
    set.clear();
    return set;
  }
  // One for each token.
  template <class Number>
  Number* numbers() {
    static_assert(sizeof(Number) == 4);
    auto* numbers = reinterpret_cast<Number*>(next_);
    next_ += num_words_ * 64 * 4 / 8;
    return numbers;
  }

 private:
  const int64_t num_words_;
  uint64_t* next_;
};

// choose(s, kv_head) for each, by the team; what it returns is called with each block of the
// sequence's rows and the set that it adds tokens to.
template <class Choose>
void write_lists(const TokenListInputs& in, Team& team, Choose&& choose) {
  team.for_chunks(in.num_sequences * in.num_kv_heads, [&](int64_t i) {
    const int64_t s = i / in.num_kv_heads;
    ListScratch scratch(in, s, team.scratch());
    const TokenSet set = scratch.set();
    const auto add = choose(s, i % in.num_kv_heads, scratch);
    ListSpans& out = in.out[i];
    ops::for_row_blocks(in, s, [&](const VisitBlock& block) {
      set.clear();
      add(block, set);
      add_always({in.sink_tokens, in.local_tokens}, block, set);
      out.counts.push_back(set.append_spans(in.limit(block), out.spans));
    });
  });
}

}  // namespace

template <>
void run<Level::portable>(const ops::ColumnListsProblem& p, Team& team) {
  write_lists(p.in, team, [&](int64_t s, int64_t kv_head, ListScratch& scratch) {
    const ChosenColumns chosen = {scratch.set(), scratch.set()};
    auto* order = scratch.numbers<int32_t>();
    for (int64_t i = 0; i < p.columns.group; ++i) {
      choose_keys(p.columns.of(s, kv_head, i), p.columns.count(s), p.top_columns, order,
                  chosen.keys);
    }
    for (int64_t i = 0; i < p.slashes.group; ++i) {
      choose_distances(p.slashes.of(s, kv_head, i), p.slashes.count(s),
                       DistanceOrder::nearest_first, p.top_slashes, order, chosen.distances);
    }
    return [chosen](const VisitBlock& block, TokenSet set) { add_columns(chosen, block, set); };
  });
}

template <>
void run<Level::portable>(const ops::BlockListsProblem& p, Team& team) {
  const int64_t size = p.in.block_size;
  write_lists(p.in, team, [&](int64_t s, int64_t kv_head, ListScratch& scratch) {
    const ops::ScoreRows& at = p.rows[s];
    const float* first = p.scores + at.first + kv_head * p.group * at.head_stride;
    const int64_t origin = p.in.position(s) / size;
    auto* order = scratch.numbers<int32_t>();
    return [=, &p](const VisitBlock& block, TokenSet set) {
      const int64_t seen = (p.in.limit(block) + size - 1) / size;
      const float* row = first + (block.position / size - origin) * at.block_stride;
      for (int64_t i = 0; i < p.group; ++i) {
        add_blocks(row + i * at.head_stride, seen, p.top, size, order, set);
      }
    };
  });
}

template <>
void run<Level::portable>(const ops::PageListsProblem& p, Team& team) {
  write_lists(p.in, team, [&](int64_t s, int64_t kv_head, ListScratch& scratch) {
    const int64_t count = p.scores.count(s);
    // A page counts as much as it does to the head that wants it most.
    auto* best = scratch.numbers<float>();
    std::copy_n(p.scores.of(s, kv_head, 0), count, best);
    for (int64_t i = 1; i < p.scores.group; ++i) {
      const float* more = p.scores.of(s, kv_head, i);
      for (int64_t page = 0; page < count; ++page) best[page] = std::max(best[page], more[page]);
    }
    auto* order = scratch.numbers<int32_t>();
    return [=, &p](const VisitBlock&, TokenSet set) {
      add_blocks(best, count, p.top, p.page_size, order, set);
    };
  });
}

}  // namespace effinfer::cpu
