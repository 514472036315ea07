#include "ops/token_lists.h"

#include "ops/describe.h"

namespace effinfer::ops {
namespace {

std::string describe(const TokenListInputs& in) {
  return field("sequences", in.num_sequences) + field("kv_heads", in.num_kv_heads) +
         field("block_size", in.block_size) + (in.causal ? " causal" : "") +
         field("sink_tokens", in.sink_tokens) + field("local_tokens", in.local_tokens);
}

// `sets` sets of the longest sequence's tokens, and `numbers` numbers of 4 bytes for each of them.
size_t scratch(const TokenListInputs& in, int64_t sets, int64_t numbers) {
  const int64_t words = (int64_t{in.max_kv_len} + 63) / 64;
  return static_cast<size_t>(words * (sets * 8 + numbers * 4 * 64));
}

}  // namespace

std::string describe(const ColumnListsProblem& problem) {
  return "[column_lists]" + describe(problem.in);
}
std::string describe(const BlockListsProblem& problem) {
  return "[block_lists]" + describe(problem.in);
}
std::string describe(const PageListsProblem& problem) {
  return "[page_lists]" + field("page_size", problem.page_size) + describe(problem.in);
}

size_t scratch_bytes(const ColumnListsProblem& problem) {
  return scratch(problem.in, 3, 1);  // the list's, keys, distances; an order
}
size_t scratch_bytes(const BlockListsProblem& problem) {
  return scratch(problem.in, 1, 1);  // the list's; an order
}
size_t scratch_bytes(const PageListsProblem& problem) {
  return scratch(problem.in, 1, 2);  // the list's; an order and the heads' highest scores
}

}  // namespace effinfer::ops
