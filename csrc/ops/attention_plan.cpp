#include <algorithm>

#include "ops/attention.h"

namespace effinfer::ops {
namespace {

// A tile with more than this share of all work is split into its chunks, so that teams of tens of
// members stay busy with one sequence.
constexpr int64_t kShares = 64;
// Splitting stops when this many partial results are in use (8 MB with heads of 256).
constexpr int64_t kMaxPartials = 8192;
constexpr int64_t kChunkPages = kKvChunk / kPageSize;

int64_t group_size(const AttentionShape& shape) {
  return shape.num_qo_heads / shape.num_kv_heads;
}

int64_t tile_tokens(int64_t group) {
  return std::max<int64_t>(1, kAttentionTileRows / group);
}

int64_t tile_tokens(const AttentionShape& shape) {
  return tile_tokens(group_size(shape));
}

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

struct Pages {
  int64_t begin, end;
};

// Some rows of one sequence and the pages that hold the keys they see: [0, sink_pages), if that
// leaves out whole chunks before first_page, and [first_page, end_page).
struct Tile {
  int64_t first_row, num_rows;
  int64_t sink_pages;
  int64_t first_page, end_page;

  int64_t sink_chunks() const { return ceil_div(sink_pages, kChunkPages); }
  int64_t first_chunk() const { return first_page / kChunkPages; }
  int64_t num_chunks() const {
    return sink_chunks() + ceil_div(end_page, kChunkPages) - first_chunk();
  }
  // The pages of a chunk that is not left out.
  Pages chunk(int64_t i) const {
    const bool sink = i < sink_chunks();
    const int64_t begin = (sink ? i : first_chunk() + i - sink_chunks()) * kChunkPages;
    return {std::max(begin, sink ? 0 : first_page),
            std::min(begin + kChunkPages, sink ? sink_pages : end_page)};
  }
  Pages all() const { return {sink_pages > 0 ? 0 : first_page, end_page}; }
};

class Planner {
 public:
  Planner(const AttentionShape& shape, const BatchLayout& batch,
          const AttentionPlanBuffers& buffers)
      : shape_(shape), batch_(batch), buffers_(buffers), group_(group_size(shape)) {}

  StepPlan plan() {
    int64_t chunks = 0;
    for (int64_t s = 0; s < batch_.num_sequences; ++s) {
      for (int64_t t = 0; t < num_tiles(s); ++t) chunks += tile(s, t).num_chunks();
    }
    const int64_t share = chunks * shape_.num_kv_heads / kShares;
    for (int64_t s = 0; s < batch_.num_sequences; ++s) {
      // A head's tiles follow each other, for its keys to stay in cache; the last rows see the most
      // keys and go first, so that small items are left for the end.
      for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
        for (int64_t t = num_tiles(s) - 1; t >= 0; --t) add(s, head, tile(s, t), share);
      }
    }
    StepPlan plan;
    plan.items = buffers_.items;
    plan.num_items = num_items_;
    plan.merges = buffers_.merges;
    plan.num_merges = num_merges_;
    plan.partial_out = buffers_.partial_out;
    plan.partial_ms = buffers_.partial_ms;
    plan.done = buffers_.done;
    for (int64_t s = 0; s < batch_.num_sequences; ++s) plan.one_tile &= num_tiles(s) <= 1;
    return plan;
  }

 private:
  int64_t rows(int64_t s) const { return batch_.qo_indptr[s + 1] - batch_.qo_indptr[s]; }
  int64_t num_tiles(int64_t s) const { return ceil_div(rows(s), tile_tokens(shape_)); }

  Tile tile(int64_t s, int64_t index) const {
    const int64_t begin = index * tile_tokens(shape_);
    const int64_t count = std::min(tile_tokens(shape_), rows(s) - begin);
    const int64_t start = batch_.kv_len[s] - rows(s);
    Tile tile = {batch_.qo_indptr[s] + begin, count, 0, 0,
                 (start + begin + count - 1) / kPageSize + 1};
    if (shape_.window_left >= 0) {
      // A token of a tree may follow the step's first one, whatever its row.
      const int64_t position = start + (batch_.ancestors != nullptr ? 0 : begin);
      tile.first_page = std::max<int64_t>(0, position - shape_.window_left) / kPageSize;
      tile.sink_pages = std::min(ceil_div(shape_.sinks, kPageSize), tile.first_page);
      if (tile.sink_chunks() > tile.first_chunk()) {
        tile.first_page = 0;
        tile.sink_pages = 0;
      }
    }
    return tile;
  }

  void add(int64_t s, int64_t head, const Tile& tile, int64_t share) {
    const int64_t chunks = tile.num_chunks();
    const int64_t stride = tile.num_rows * group_;  // partials of a chunk
    if (chunks == 1 || chunks <= share || num_partials_ + chunks * stride > kMaxPartials) {
      add_item(s, head, tile, tile.all(), -1);
      return;
    }
    for (int64_t i = 0; i < chunks; ++i) {
      add_item(s, head, tile, tile.chunk(i), num_partials_ + i * stride);
    }
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      buffers_.merges[num_merges_++] = {static_cast<int32_t>(tile.first_row + row),
                                        static_cast<int32_t>(head),
                                        static_cast<int32_t>(num_partials_ + row * group_),
                                        static_cast<int32_t>(stride), static_cast<int32_t>(chunks)};
    }
    num_partials_ += chunks * stride;
  }

  void add_item(int64_t s, int64_t head, const Tile& tile, Pages pages, int64_t partial) {
    buffers_.items[num_items_++] = {static_cast<int32_t>(s),
                                    static_cast<int32_t>(head),
                                    static_cast<int32_t>(tile.first_row),
                                    static_cast<int32_t>(tile.num_rows),
                                    static_cast<int32_t>(pages.begin),
                                    static_cast<int32_t>(pages.end - pages.begin),
                                    static_cast<int32_t>(partial),
                                    static_cast<int32_t>(num_merges_)};
  }

  const AttentionShape& shape_;
  const BatchLayout& batch_;
  const AttentionPlanBuffers& buffers_;
  const int64_t group_;
  int64_t num_items_ = 0;
  int64_t num_merges_ = 0;
  int64_t num_partials_ = 0;
};

}  // namespace

AttentionPlanSize attention_plan_size(const AttentionShape& shape, int64_t max_tokens,
                                      int64_t max_sequences, int64_t max_kv_len) {
  const int64_t group = group_size(shape);
  // Each sequence may end in a tile that is not full, and no tile is empty.
  const int64_t tiles =
      shape.num_kv_heads *
      std::min(max_tokens, ceil_div(max_tokens, tile_tokens(shape)) + max_sequences);
  const int64_t chunks = ceil_div(max_kv_len, kKvChunk);
  if (chunks <= 1) return {tiles, 0, 0};
  const int64_t partials = std::min(max_tokens * shape.num_qo_heads * chunks, kMaxPartials);
  // A split item has at least a group's partials, and a merge at least two groups'.
  return {tiles + std::min(tiles * chunks, partials / group),
          std::min(max_tokens * shape.num_kv_heads, partials / (2 * group)), partials};
}

int32_t visit_block_rows(int32_t num_qo_heads, int32_t num_kv_heads) {
  const int64_t tokens = tile_tokens(num_qo_heads / num_kv_heads);
  return static_cast<int32_t>(kVisitBlockRows / tokens * tokens);
}

StepPlan plan_attention(const AttentionShape& shape, const BatchLayout& batch,
                        const AttentionPlanBuffers& buffers) {
  return Planner(shape, batch, buffers).plan();
}

}  // namespace effinfer::ops
