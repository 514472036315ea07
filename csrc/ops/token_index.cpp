// Lists chosen by scores of keys, of distances and of pages.
#include "effinfer/ops/token_index.h"

#include <string>
#include <vector>

#include "ops/index_builder.h"

namespace effinfer::ops {
namespace {

// float32 [heads, starts[S]], heads a multiple of num_kv_heads.
HeadScores head_scores(const Validator& check, std::string_view argument, const TensorView& view,
                       int32_t num_kv_heads, const std::vector<int64_t>& starts) {
  check.dtype(argument, view, DType::f32);
  check.rank(argument, view, 2);
  const int64_t heads = view.dims[0];
  check.shape(argument, view, {heads, starts.back()});
  check.expect(heads > 0 && heads % num_kv_heads == 0, argument,
               "a multiple of " + std::to_string(num_kv_heads) + " heads", std::to_string(heads));
  return {static_cast<const float*>(view.data), starts.data(), starts.back(),
          static_cast<int32_t>(heads / num_kv_heads)};
}

}  // namespace

BlockLists a_shape_lists(const IndexRows& rows, ThreadPool& pool) {
  const Validator check(rows.op);
  const IndexBuilder builder(check, rows);
  return builder.build(ColumnListsProblem(), pool);
}

BlockLists column_lists(const IndexRows& rows, const ColumnScores& given, ThreadPool& pool) {
  const Validator check(rows.op);
  const IndexBuilder builder(check, rows);
  check_top(check, "top_columns", given.top_columns);
  check_top(check, "top_slashes", given.top_slashes);
  ColumnListsProblem problem;
  problem.top_columns = given.top_columns;
  problem.top_slashes = given.top_slashes;
  problem.columns =
      head_scores(check, "columns", given.columns, rows.num_kv_heads, builder.kv_starts());
  if (given.slashes.dims.rank() > 0) {
    problem.slashes =
        head_scores(check, "slashes", given.slashes, rows.num_kv_heads, builder.kv_starts());
  }
  return builder.build(problem, pool);
}

BlockLists page_lists(const IndexRows& rows, const TensorView& scores, int32_t page_size,
                      const TopScores& top, ThreadPool& pool) {
  const Validator check(rows.op);
  IndexRows whole = rows;
  whole.block_size = 1 << 30;  // one block a sequence
  const IndexBuilder builder(check, whole);
  check_top(check, "num_pages", top);
  check.positive("page_size", page_size);
  std::vector<int64_t> starts = {0};
  for (int64_t s = 0; s < builder.num_sequences(); ++s) {
    starts.push_back(starts.back() + (int64_t{builder.kv_len(s)} + page_size - 1) / page_size);
  }
  PageListsProblem problem;
  problem.scores = head_scores(check, "scores", scores, rows.num_kv_heads, starts);
  problem.page_size = page_size;
  problem.top = top;
  return builder.build(problem, pool);
}

}  // namespace effinfer::ops
