// Checked rows of a batch, and the lists of tokens that problems over them (ops/token_lists.h)
// make.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "effinfer/ops/token_index.h"
#include "ops/registry.h"
#include "ops/token_lists.h"
#include "ops/validate.h"

namespace effinfer::ops {

class IndexBuilder {
 public:
  IndexBuilder(const Validator& check, const IndexRows& rows);

  int64_t num_sequences() const { return static_cast<int64_t>(kv_len_.size()); }
  int32_t num_kv_heads() const { return rows_.num_kv_heads; }
  int32_t kv_len(int64_t s) const { return kv_len_[static_cast<size_t>(s)]; }
  // [S + 1]: where each sequence's keys start.
  const std::vector<int64_t>& kv_starts() const { return kv_starts_; }

  // The lists of a problem that lacks nothing but its rows.
  template <class Problem>
  BlockLists build(Problem problem, ThreadPool& pool) const {
    std::vector<ListSpans> parts(static_cast<size_t>(num_sequences() * num_kv_heads()));
    problem.in = inputs(parts.data());
    run_alone(problem, pool);
    return join(problem.in, parts);
  }

 private:
  TokenListInputs inputs(ListSpans* out) const;
  BlockLists join(const TokenListInputs& in, const std::vector<ListSpans>& parts) const;

  const Validator& check_;
  IndexRows rows_;
  std::vector<int32_t> qo_indptr_;
  std::vector<int32_t> kv_len_;
  std::vector<int64_t> kv_starts_;
};

void check_top(const Validator& check, std::string_view argument, const TopScores& top);

}  // namespace effinfer::ops
