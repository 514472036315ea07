#include "ops/index_builder.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace effinfer::ops {

IndexBuilder::IndexBuilder(const Validator& check, const IndexRows& rows)
    : check_(check), rows_(rows), kv_starts_{0} {
  const auto copy = [&](std::string_view argument, const TensorView& view) {
    const std::span<const int32_t> values = check.ints(argument, view);
    return std::vector<int32_t>(values.begin(), values.end());
  };
  kv_len_ = copy("kv_len", rows.kv_len);
  qo_indptr_ = copy("qo_indptr", rows.qo_indptr);
  check.indptr("qo_indptr", rows.qo_indptr, num_sequences());
  check.positive("num_kv_heads", rows.num_kv_heads);
  check.positive("block_size", rows.block_size);
  check.at_least("sink_tokens", rows.sink_tokens, 0);
  check.at_least("local_tokens", rows.local_tokens, 0);
  for (size_t s = 0; s < kv_len_.size(); ++s) {
    const int64_t count = int64_t{qo_indptr_[s + 1]} - qo_indptr_[s];
    check.expect(kv_len_[s] >= count, indexed("kv_len", static_cast<int64_t>(s)),
                 "at least its " + std::to_string(count) + " query rows",
                 std::to_string(kv_len_[s]));
    kv_starts_.push_back(kv_starts_.back() + kv_len_[s]);
  }
}

TokenListInputs IndexBuilder::inputs(ListSpans* out) const {
  TokenListInputs in;
  in.num_sequences = num_sequences();
  in.num_kv_heads = rows_.num_kv_heads;
  in.qo_indptr = qo_indptr_.data();
  in.kv_len = kv_len_.data();
  for (const int32_t length : kv_len_) in.max_kv_len = std::max(in.max_kv_len, length);
  in.block_size = rows_.block_size;
  in.causal = rows_.causal;
  in.sink_tokens = rows_.sink_tokens;
  in.local_tokens = rows_.local_tokens;
  in.out = out;
  return in;
}

BlockLists IndexBuilder::join(const TokenListInputs& in,
                              const std::vector<ListSpans>& parts) const {
  BlockLists out;
  int64_t spans = 0;
  out.list_indptr.push_back(0);
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto head = static_cast<int32_t>(i) % num_kv_heads();
    const int32_t* count = parts[i].counts.data();
    for_row_blocks(in, static_cast<int32_t>(i) / num_kv_heads(), [&](const VisitBlock& block) {
      out.lists.insert(out.lists.end(), {block.sequence, head, block.first_row, block.num_rows});
      spans += *count++;
      check_.expect(spans <= std::numeric_limits<int32_t>::max(), "block_size",
                    "blocks with fewer than 2^31 spans", std::to_string(spans));
      out.list_indptr.push_back(static_cast<int32_t>(spans));
    });
    out.spans.insert(out.spans.end(), parts[i].spans.begin(), parts[i].spans.end());
  }
  return out;
}

void check_top(const Validator& check, std::string_view argument, const TopScores& top) {
  check.at_least(argument, top.count, 0);
  check.expect(std::isfinite(top.mass) && top.mass >= 0.0f && top.mass <= 1.0f, argument,
               "a share of at most 1", std::to_string(top.mass));
}

}  // namespace effinfer::ops
