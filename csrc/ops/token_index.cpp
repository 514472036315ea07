// Lists chosen by scores of keys, of distances and of pages.
#include "effinfer/ops/token_index.h"

#include <algorithm>
#include <string>

#include "ops/index_builder.h"

namespace effinfer::ops {
namespace {

// The heads of a group of scores [heads, columns].
struct HeadScores {
  const float* data;
  int64_t columns;
  int64_t group;  // heads for one KV head

  const float* row(int64_t kv_head, int64_t i) const {
    return data + (kv_head * group + i) * columns;
  }
};

HeadScores head_scores(const Validator& check, std::string_view argument, const TensorView& view,
                       int32_t num_kv_heads, int64_t columns) {
  check.dtype(argument, view, DType::f32);
  check.rank(argument, view, 2);
  const int64_t heads = view.dims[0];
  check.shape(argument, view, {heads, columns});
  check.expect(heads > 0 && heads % num_kv_heads == 0, argument,
               "a multiple of " + std::to_string(num_kv_heads) + " heads", std::to_string(heads));
  return {static_cast<const float*>(view.data), columns, heads / num_kv_heads};
}

// What the heads of a group chose of scores [first, first + count).
std::vector<int32_t> chosen(const HeadScores& scores, int64_t kv_head, int64_t first, int64_t count,
                            const TopScores& top) {
  std::vector<int32_t> all;
  for (int64_t i = 0; i < scores.group; ++i) {
    const std::vector<int32_t> more = choose_top(scores.row(kv_head, i) + first, count, top);
    all.insert(all.end(), more.begin(), more.end());
  }
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

}  // namespace

BlockLists a_shape_lists(const IndexRows& rows, ThreadPool& pool) {
  const Validator check(rows.op);
  const IndexBuilder builder(check, rows);
  return builder.build(pool, [](int64_t, int32_t) { return [](const RowBlock&, TokenSet&) {}; });
}

BlockLists column_lists(const IndexRows& rows, const ColumnScores& given, ThreadPool& pool) {
  const Validator check(rows.op);
  const IndexBuilder builder(check, rows);
  check_top(check, "top_columns", given.top_columns);
  check_top(check, "top_slashes", given.top_slashes);
  const HeadScores columns =
      head_scores(check, "columns", given.columns, rows.num_kv_heads, builder.total_kv());
  const bool has_slashes = given.slashes.dims.rank() > 0;
  HeadScores slashes = {};
  if (has_slashes) {
    slashes = head_scores(check, "slashes", given.slashes, rows.num_kv_heads, builder.total_kv());
  }
  return builder.build(pool, [&](int64_t s, int32_t head) {
    const int64_t first = builder.kv_start(s), count = builder.kv_len(s);
    TokenSet vertical(count);
    for (const int32_t key : chosen(columns, head, first, count, given.top_columns)) {
      vertical.add(key, key + 1);
    }
    std::vector<int32_t> distances;
    if (has_slashes) distances = chosen(slashes, head, first, count, given.top_slashes);
    return [vertical = std::move(vertical), distances = std::move(distances)](const RowBlock& block,
                                                                              TokenSet& set) {
      set.add(vertical);
      for (const int32_t distance : distances) {
        const int64_t begin = int64_t{block.position} - distance;
        set.add(begin, begin + block.num_rows);
      }
    };
  });
}

BlockLists page_lists(const IndexRows& rows, const TensorView& scores, int32_t page_size,
                      const TopScores& top, ThreadPool& pool) {
  const Validator check(rows.op);
  IndexRows whole = rows;
  whole.block_size = 1 << 30;  // one block a sequence
  const IndexBuilder builder(check, whole);
  check_top(check, "num_pages", top);
  check.expect(page_size > 0, "page_size", "a positive number", std::to_string(page_size));
  std::vector<int64_t> starts = {0};
  for (int64_t s = 0; s < builder.num_sequences(); ++s) {
    starts.push_back(starts.back() + (int64_t{builder.kv_len(s)} + page_size - 1) / page_size);
  }
  const HeadScores heads = head_scores(check, "scores", scores, rows.num_kv_heads, starts.back());
  return builder.build(pool, [&](int64_t s, int32_t head) {
    const int64_t first = starts[static_cast<size_t>(s)];
    const int64_t count = starts[static_cast<size_t>(s + 1)] - first;
    // A page counts as much as it does to the head that wants it most.
    std::vector<float> best(heads.row(head, 0) + first, heads.row(head, 0) + first + count);
    for (int64_t i = 1; i < heads.group; ++i) {
      const float* more = heads.row(head, i) + first;
      for (size_t page = 0; page < best.size(); ++page) {
        best[page] = std::max(best[page], more[page]);
      }
    }
    return
        [page_size, pages = choose_top(best.data(), count, top)](const RowBlock&, TokenSet& set) {
          for (const int32_t page : pages) {
            set.add(int64_t{page} * page_size, (int64_t{page} + 1) * page_size);
          }
        };
  });
}

}  // namespace effinfer::ops
