// Makes lists of tokens from sets of tokens, block of rows by block of rows.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>
#include <vector>

#include "effinfer/ops/token_index.h"
#include "ops/validate.h"

namespace effinfer::ops {

// Tokens of a sequence.
class TokenSet {
 public:
  explicit TokenSet(int64_t size = 0) : words_(static_cast<size_t>((size + 63) / 64)) {}

  void clear() { words_.assign(words_.size(), 0); }
  // What lies outside of the set's size is left out.
  void add(int64_t begin, int64_t end);
  void add(const TokenSet& other);
  bool has(int64_t token) const {
    return (words_[static_cast<size_t>(token / 64)] >> token % 64 & 1) != 0;
  }
  // Appends [begin, end) of what is before `limit`; returns how many spans.
  int32_t append_spans(int64_t limit, std::vector<int32_t>& spans) const;

 private:
  std::vector<uint64_t> words_;
};

// A block of query rows.
struct RowBlock {
  int32_t first_row;  // flat
  int32_t num_rows;
  int32_t position;  // of the first row
  int32_t index;     // position / block_size
};

// Checked rows of a batch.
class IndexBuilder {
 public:
  IndexBuilder(const Validator& check, const IndexRows& rows);

  int64_t num_sequences() const { return static_cast<int64_t>(kv_len_.size()); }
  int32_t num_kv_heads() const { return rows_.num_kv_heads; }
  int32_t kv_len(int64_t s) const { return kv_len_[static_cast<size_t>(s)]; }
  int64_t total_kv() const { return kv_starts_.back(); }
  int64_t kv_start(int64_t s) const { return kv_starts_[static_cast<size_t>(s)]; }
  std::vector<RowBlock> blocks(int64_t s) const;
  // Tokens before it are all that a row of the block sees.
  int64_t limit(int64_t s, const RowBlock& block) const;

  // choose(s, kv_head) is called once for each, and returns what adds the tokens of a block to a
  // set: add(block, set). Teams share the heads.
  template <class Choose>
  BlockLists build(ThreadPool& pool, Choose&& choose) const {
    std::vector<Part> parts(static_cast<size_t>(num_sequences() * num_kv_heads()));
    pool.parallel([&](Team& team) {
      team.for_chunks(static_cast<int64_t>(parts.size()), [&](int64_t i) {
        const int64_t s = i / num_kv_heads();
        Part& part = parts[static_cast<size_t>(i)];
        auto add = choose(s, static_cast<int32_t>(i % num_kv_heads()));
        TokenSet set(kv_len(s));
        for (const RowBlock& block : blocks(s)) {
          set.clear();
          add(block, set);
          finish(s, block, set, part);
        }
      });
    });
    return join(parts);
  }

 private:
  struct Part {
    std::vector<int32_t> spans;
    std::vector<int32_t> counts;
  };
  void finish(int64_t s, const RowBlock& block, TokenSet& set, Part& part) const;
  BlockLists join(const std::vector<Part>& parts) const;

  const Validator& check_;
  IndexRows rows_;
  std::vector<int32_t> qo_indptr_;
  std::vector<int32_t> kv_len_;
  std::vector<int64_t> kv_starts_;
};

void check_top(const Validator& check, std::string_view argument, const TopScores& top);

// Indices of what is chosen of `count` scores, in no order.
std::vector<int32_t> choose_top(const float* scores, int64_t count, const TopScores& top);

}  // namespace effinfer::ops
