// Scores of what generated rows choose from, between the kernels of a GPU (ops/page_index.h): of
// some rows at a time, for each KV head, and for each of its query heads and all together, a number
// for each unit.
#pragma once

#include <algorithm>
#include <cstdint>

namespace effinfer::ops {

// Floats between the scores of heads, of sequences up to `list_words` pages.
constexpr int64_t row_score_stride(int64_t list_words, int64_t of_page) {
  return (list_words * of_page + 3) / 4 * 4;
}

// Of how many heads.
constexpr int64_t row_score_heads(int64_t query_heads, int64_t kv_heads) {
  return query_heads + kv_heads;
}

// Rows for which there is memory at once: all of them, or as many as 64 MB are enough for.
constexpr int64_t scored_rows(int64_t list_words, int64_t of_page, int64_t heads, int64_t most) {
  const int64_t each = row_score_stride(list_words, of_page) * heads * int64_t{sizeof(float)};
  const int64_t fitting = each > 0 ? (int64_t{64} << 20) / each : most;
  return std::clamp<int64_t>(fitting, 1, std::max<int64_t>(most, 1));
}

}  // namespace effinfer::ops
