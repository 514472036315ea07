#include "ops/list_attention.h"

#include <algorithm>
#include <utility>

namespace effinfer::ops {
namespace {

// A tile with more than this share of all chunks is split into items of about that share, so that
// teams of tens of members stay busy with one sequence.
constexpr int64_t kShares = 128;
constexpr int64_t kMaxPartials = 8192;

class Planner {
 public:
  Planner(const ListShape& shape, const SequenceRows& rows)
      : shape_(shape), rows_(rows), group_(shape.num_qo_heads / shape.num_kv_heads) {}

  // Tiles of query rows [first, first + count) of a block for one KV head; `list` gives a tile its
  // spans.
  template <class List>
  void add_block(int32_t sequence, int32_t kv_head, int32_t first, int32_t count, List&& list) {
    const int32_t heads = std::min(group_, kListTileHeads);
    const int32_t step = std::max(1, kListTileRows / heads);
    // The last rows see the most keys and go first, so that small items are left for the end.
    for (int32_t begin = (count - 1) / step * step; begin >= 0; begin -= step) {
      ListTile tile = {};
      tile.sequence = sequence;
      tile.kv_head = kv_head;
      tile.first_row = first + begin;
      tile.num_rows = std::min(step, count - begin);
      tile.list_row = begin;
      list(tile);
      for (int32_t head = 0; head < group_; head += heads) {
        tile.first_head = kv_head * group_ + head;
        tile.num_heads = std::min(heads, group_ - head);
        plan_.tiles.push_back(tile);
      }
    }
  }

  void add_dense() {
    for (int32_t s = 0; s < rows_.num_sequences; ++s) {
      const int32_t count = rows_.qo_indptr[s + 1] - rows_.qo_indptr[s];
      for (int32_t head = 0; head < shape_.num_kv_heads; ++head) {
        add_block(s, head, rows_.qo_indptr[s], count, [&](ListTile& tile) { dense_span(tile); });
      }
    }
  }

  void add_lists(const TokenLists& given) {
    for (const auto& span : spans_of(given)) plan_.spans.push_back(span);
    for (int64_t l = 0; l < given.num_lists; ++l) {
      const int32_t* list = given.lists + 4 * l;
      add_block(list[0], list[1], list[2], list[3], [&](ListTile& tile) {
        tile.first_span = given.indptr[l];
        tile.num_spans = given.indptr[l + 1] - given.indptr[l];
        if (tile.num_spans == 0) return;
        const TokenSpan& last = plan_.spans[static_cast<size_t>(given.indptr[l + 1] - 1)];
        tile.num_tokens = last.first + last.end - last.begin;
      });
    }
  }

  ListPlan finish() {
    int64_t chunks = 0;
    for (const ListTile& tile : plan_.tiles) chunks += tile.num_chunks();
    const int64_t share = chunks / kShares;
    for (size_t i = 0; i < plan_.tiles.size(); ++i) {
      add_items(static_cast<int32_t>(i), plan_.tiles[i], share);
    }
    // The heads of the same tokens follow each other: where one token's heads lie side by side,
    // they share memory pages and what the hardware fetches beyond what it is asked for.
    const auto place = [&](const ListItem& item) {
      return std::pair(plan_.tiles[static_cast<size_t>(item.tile)].sequence, item.first_unit);
    };
    std::stable_sort(plan_.items.begin(), plan_.items.end(),
                     [&](const ListItem& a, const ListItem& b) { return place(a) < place(b); });
    return std::move(plan_);
  }

 private:
  // What the tile's rows see together, from a multiple of 64 tokens on.
  void dense_span(ListTile& tile) {
    const int32_t s = tile.sequence;
    const int32_t length = rows_.kv_len[s];
    const int32_t position =
        length - (rows_.qo_indptr[s + 1] - rows_.qo_indptr[s]) + tile.list_row;  // of the first row
    int32_t begin = 0;
    int32_t end = length;
    if (shape_.causal) end = std::clamp(position + tile.num_rows, 0, length);
    if (shape_.window_left >= 0) begin = std::clamp(position - shape_.window_left, 0, end);
    begin = begin / kUnitTokens * kUnitTokens;
    const int64_t start = rows_.mask_starts != nullptr ? rows_.mask_starts[s] : 0;
    tile.first_span = static_cast<int32_t>(plan_.spans.size());
    tile.num_spans = end > begin ? 1 : 0;
    tile.num_tokens = end - begin;
    tile.phase = begin / kUnitTokens % kChunkUnits;
    if (end > begin) plan_.spans.push_back({begin, end, 0, start + begin});
  }

  static std::vector<TokenSpan> spans_of(const TokenLists& given) {
    std::vector<TokenSpan> spans(static_cast<size_t>(given.indptr[given.num_lists]));
    for (int64_t l = 0; l < given.num_lists; ++l) {
      int32_t visited = 0;
      for (int32_t i = given.indptr[l]; i < given.indptr[l + 1]; ++i) {
        const int32_t begin = given.spans[2 * i];
        const int32_t end = given.spans[2 * i + 1];
        spans[static_cast<size_t>(i)] = {begin, end, visited,
                                         given.mask_bits != nullptr ? given.mask_bits[i] : 0};
        visited += end - begin;
      }
    }
    return spans;
  }

  void add_items(int32_t index, const ListTile& tile, int64_t share) {
    const int32_t chunks = tile.num_chunks();
    const int64_t stride = int64_t{tile.num_rows} * tile.num_heads;
    if (chunks <= 1 || chunks <= share || plan_.num_partials + chunks * stride > kMaxPartials) {
      plan_.items.push_back({index, 0, tile.num_units(), -1, -1});
      return;
    }
    const auto merge = static_cast<int32_t>(plan_.merges.size());
    const auto first = static_cast<int32_t>(plan_.num_partials);
    const auto step = static_cast<int32_t>(std::max(share, int64_t{1}));
    plan_.merges.push_back({index, first, chunks, (chunks + step - 1) / step});
    for (int32_t chunk = 0; chunk < chunks; chunk += step) {
      const int32_t begin = std::max(0, chunk * kChunkUnits - tile.phase);
      const int32_t end = std::min((chunk + step) * kChunkUnits - tile.phase, tile.num_units());
      plan_.items.push_back(
          {index, begin, end, first + static_cast<int32_t>(chunk * stride), merge});
    }
    plan_.num_partials += chunks * stride;
  }

  const ListShape& shape_;
  const SequenceRows& rows_;
  const int32_t group_;
  ListPlan plan_;
};

}  // namespace

ListPlan plan_dense(const ListShape& shape, const SequenceRows& rows) {
  Planner planner(shape, rows);
  planner.add_dense();
  return planner.finish();
}

ListPlan plan_lists(const ListShape& shape, const SequenceRows& rows, const TokenLists& lists) {
  Planner planner(shape, rows);
  planner.add_lists(lists);
  return planner.finish();
}

std::string describe(const ListAttentionProblem& p) {
  return "[attention] heads=" + std::to_string(p.num_qo_heads) +
         " kv_heads=" + std::to_string(p.num_kv_heads) +
         " head_dim_qk=" + std::to_string(p.k.dims + p.k_rope.dims) +
         " head_dim_vo=" + std::to_string(p.v.dims) + " dtype=" + std::string(name(p.q.dtype)) +
         " kv_dtype=" + std::string(name(p.k.dtype));
}

}  // namespace effinfer::ops
