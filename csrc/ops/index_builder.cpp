#include "ops/index_builder.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "ops/choose_top.h"

namespace effinfer::ops {

void TokenSet::add(int64_t begin, int64_t end) {
  begin = std::max<int64_t>(begin, 0);
  end = std::min(end, static_cast<int64_t>(words_.size()) * 64);
  while (begin < end) {
    const int64_t count = std::min(end - begin, 64 - begin % 64);
    words_[static_cast<size_t>(begin / 64)] |= ~uint64_t{0} >> (64 - count) << begin % 64;
    begin += count;
  }
}

void TokenSet::add(const TokenSet& other) {
  for (size_t i = 0; i < words_.size(); ++i) words_[i] |= other.words_[i];
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
    const uint64_t word = words_[static_cast<size_t>(at / 64)] >> at % 64;
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

IndexBuilder::IndexBuilder(const Validator& check, const IndexRows& rows)
    : check_(check), rows_(rows), kv_starts_{0} {
  const auto copy = [&](std::string_view argument, const TensorView& view) {
    check.dtype(argument, view, DType::i32);
    check.rank(argument, view, 1);
    const auto* values = static_cast<const int32_t*>(view.data);
    return std::vector<int32_t>(values, values + view.dims[0]);
  };
  const auto positive = [&](std::string_view argument, int32_t value) {
    check.expect(value > 0, argument, "a positive number", std::to_string(value));
  };
  kv_len_ = copy("kv_len", rows.kv_len);
  qo_indptr_ = copy("qo_indptr", rows.qo_indptr);
  check.indptr("qo_indptr", rows.qo_indptr, num_sequences());
  positive("num_kv_heads", rows.num_kv_heads);
  positive("block_size", rows.block_size);
  check.expect(rows.sink_tokens >= 0, "sink_tokens", "0 or more", std::to_string(rows.sink_tokens));
  check.expect(rows.local_tokens >= 0, "local_tokens", "0 or more",
               std::to_string(rows.local_tokens));
  for (size_t s = 0; s < kv_len_.size(); ++s) {
    const int64_t count = int64_t{qo_indptr_[s + 1]} - qo_indptr_[s];
    const std::string name = "kv_len[" + std::to_string(s) + "]";
    check.expect(kv_len_[s] >= count, name, "at least its " + std::to_string(count) + " query rows",
                 std::to_string(kv_len_[s]));
    kv_starts_.push_back(kv_starts_.back() + kv_len_[s]);
  }
}

std::vector<RowBlock> IndexBuilder::blocks(int64_t s) const {
  std::vector<RowBlock> blocks;
  const int32_t begin = qo_indptr_[static_cast<size_t>(s)];
  const int32_t end = qo_indptr_[static_cast<size_t>(s + 1)];
  const int32_t shift = kv_len(s) - end;  // from a row to its position
  for (int32_t row = begin; row < end;) {
    const int32_t index = (row + shift) / rows_.block_size;
    const int64_t next = (int64_t{index} + 1) * rows_.block_size - shift;
    const auto count = static_cast<int32_t>(std::min<int64_t>(next, end)) - row;
    blocks.push_back({row, count, row + shift, index});
    row += count;
  }
  return blocks;
}

int64_t IndexBuilder::limit(int64_t s, const RowBlock& block) const {
  return rows_.causal ? block.position + block.num_rows : kv_len(s);
}

void IndexBuilder::finish(int64_t s, const RowBlock& block, TokenSet& set, Part& part) const {
  const int64_t first = block.position;
  set.add(0, rows_.sink_tokens);
  set.add(rows_.local_tokens > 0 ? first - rows_.local_tokens + 1 : first, first + block.num_rows);
  part.counts.push_back(set.append_spans(limit(s, block), part.spans));
}

BlockLists IndexBuilder::join(const std::vector<Part>& parts) const {
  BlockLists out;
  int64_t spans = 0;
  out.list_indptr.push_back(0);
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto s = static_cast<int32_t>(i) / num_kv_heads();
    const auto head = static_cast<int32_t>(i) % num_kv_heads();
    const std::vector<RowBlock> blocks = this->blocks(s);
    for (size_t b = 0; b < blocks.size(); ++b) {
      out.lists.insert(out.lists.end(), {s, head, blocks[b].first_row, blocks[b].num_rows});
      spans += parts[i].counts[b];
      check_.expect(spans <= std::numeric_limits<int32_t>::max(), "block_size",
                    "blocks with fewer than 2^31 spans", std::to_string(spans));
      out.list_indptr.push_back(static_cast<int32_t>(spans));
    }
    out.spans.insert(out.spans.end(), parts[i].spans.begin(), parts[i].spans.end());
  }
  return out;
}

void check_top(const Validator& check, std::string_view argument, const TopScores& top) {
  check.expect(top.count >= 0, argument, "0 or more", std::to_string(top.count));
  check.expect(std::isfinite(top.mass) && top.mass >= 0.0f && top.mass <= 1.0f, argument,
               "a share of at most 1", std::to_string(top.mass));
}

std::vector<int32_t> choose_top(const float* scores, int64_t count, const TopScores& top) {
  std::vector<int32_t> order(static_cast<size_t>(count));
  order.resize(static_cast<size_t>(choose_top(scores, count, top, order.data())));
  return order;
}

}  // namespace effinfer::ops
