// Cuts attention into balanced items.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <span>
#include <tuple>
#include <utility>

#include "effinfer/ops/attention.h"
#include "ops/attention.h"

namespace effinfer::ops {
namespace {

int32_t ceil_div(int64_t a, int64_t b) {
  return static_cast<int32_t>((a + b - 1) / b);
}

int32_t tile_heads(const AttentionShape& shape) {
  if (shape.most_rows > 0) return std::min(shape.group(), shape.most_rows);
  return tile_heads(shape.source, shape.group());
}

int32_t most_tile_rows(const AttentionShape& shape) {
  if (shape.most_rows > 0) return shape.most_rows;
  return most_tile_rows(shape.source, shape.group(), shape.visits);
}

// A list of visits has whole tiles.
int32_t tokens_of(const AttentionShape& shape, int32_t rows, int32_t heads) {
  const int32_t most = std::max(1, rows / heads);
  if (!shape.visits) return most;
  return std::min(kVisitBlockRows,
                  static_cast<int32_t>(std::bit_floor(static_cast<uint32_t>(most))));
}

// Rows of a tile; one token's heads may be more.
int32_t tile_tokens(const AttentionShape& shape) {
  const int32_t rows =
      shape.most_rows > 0 ? shape.most_rows : tile_rows(shape.source, shape.visits);
  return tokens_of(shape, rows, tile_heads(shape));
}

struct TileSize {
  int32_t tokens;
  int32_t heads;
};

// Of a sequence with `count` rows. Two tiles of few rows read their keys twice, which costs less
// than a kernel most of whose warps have no rows.
TileSize tile_size(const AttentionShape& shape, const BatchLayout& batch, int32_t sequence,
                   int64_t count) {
  if (shape.row_visits && has_row_lists(batch, sequence) && !batch.is_dense(sequence)) {
    return {1, tile_heads(shape)};
  }
  const bool is_tree = batch.is_tree(sequence);
  const bool many = shape.only_long || count * shape.group() > 2 * shape.most_rows;
  if (many && shape.long_rows > 0 && !is_tree) {
    const int32_t heads = std::min(shape.group(), shape.long_rows);
    return {tokens_of(shape, shape.long_rows, heads), heads};
  }
  return {tile_tokens(shape), tile_heads(shape)};
}

// Of lists, whose sizes only the device knows: as if a quarter of the pages were visited.
constexpr int64_t kListedPart = 4;

// Of `units` each.
int32_t num_chunks(const AttentionTile& tile, int32_t units = kChunkUnits) {
  if (tile.first_unit == tile.end_unit) return 0;
  return ceil_div(tile.sink_units, units) + ceil_div(tile.end_unit, units) -
         tile.first_unit / units;
}

class Planner {
 public:
  Planner(const AttentionShape& shape, const BatchLayout& batch, AttentionWork& work)
      : shape_(shape), batch_(batch), work_(work) {
    work.clear();
    work.tile_rows = most_tile_rows(shape);
    work.long_rows = shape.long_rows;
    work.only_long = shape.only_long;
  }

  void add_dense() {
    for (int32_t s = 0; s < batch_.num_sequences; ++s) {
      const int32_t first = batch_.qo_indptr[s];
      const int32_t count = batch_.qo_indptr[s + 1] - first;
      work_.one_tile &= count <= tile_tokens(shape_);
      // A head's tiles follow each other, for its keys to stay in cache.
      for (int32_t head = 0; head < shape_.num_kv_heads; ++head) {
        const size_t first_tile = work_.tiles.size();
        add_block(s, head, first, count, [&](AttentionTile& tile) { see_all(tile); });
        arrange(std::span(work_.tiles).subspan(first_tile));
      }
    }
    finish();
  }

  void add_lists(const AttentionLists& given) {
    const auto* list = static_cast<const int32_t*>(given.lists.data);
    const auto* indptr = static_cast<const int32_t*>(given.indptr.data);
    const auto* spans = static_cast<const int32_t*>(given.spans.data);
    const auto* mask_bits = static_cast<const int64_t*>(given.span_masks.data);
    for (int64_t l = 0; l < given.lists.dims[0]; ++l, ++indptr, list += 4) {
      int32_t visited = 0;
      for (int32_t i = indptr[0]; i < indptr[1]; ++i) {
        const int32_t* span = spans + 2 * int64_t{i};
        work_.spans.push_back({span[0], span[1], visited, mask_bits != nullptr ? mask_bits[i] : 0});
        visited += span[1] - span[0];
      }
      add_block(list[0], list[1], list[2], list[3], [&](AttentionTile& tile) {
        tile.first_span = indptr[0];
        tile.num_spans = indptr[1] - indptr[0];
        tile.num_tokens = visited;
        tile.end_unit = ceil_div(visited, kUnitTokens);
      });
    }
    finish();
  }

 private:
  // Tiles of query rows [first, first + count) for one KV head; see(tile) sets what a tile visits.
  template <class See>
  void add_block(int32_t sequence, int32_t kv_head, int32_t first, int32_t count, See&& see) {
    const auto [step, heads] = tile_size(shape_, batch_, sequence, count);
    // The last rows see the most keys and go first, so that small items are left for the end.
    for (int32_t begin = (count - 1) / step * step; count > 0 && begin >= 0; begin -= step) {
      AttentionTile tile = {};
      tile.sequence = sequence;
      tile.kv_head = kv_head;
      tile.first_span = -1;
      const auto add_rows = [&](int32_t from, int32_t end) {
        tile.first_row = first + from;
        tile.num_rows = end - from;
        tile.list_row = from;
        see(tile);
        for (int32_t head = 0; head < shape_.group(); head += heads) {
          tile.first_head = kv_head * shape_.group() + head;
          tile.num_heads = std::min(heads, shape_.group() - head);
          work_.tiles.push_back(tile);
        }
      };
      const int32_t end = std::min(begin + step, count);
      const int32_t cut = last_chunk(sequence, begin, end);
      add_rows(cut, end);
      if (cut == begin) continue;
      add_rows(begin, cut);
      work_.one_tile = false;
    }
  }

  // Of rows [begin, end) of a sequence, fewer than a chunk has: the first that is in the last
  // one's.
  int32_t last_chunk(int32_t sequence, int32_t begin, int32_t end) const {
    if (shape_.chunk == 0) return begin;
    const int32_t start = batch_.step_begin(sequence);
    return std::max(begin, (start + end - 1) / shape_.chunk * shape_.chunk - start);
  }

  // What the tile's rows see together.
  void see_all(AttentionTile& tile) const {
    const int32_t s = tile.sequence;
    const int32_t length = batch_.kv_len[s];
    const int32_t position = batch_.step_begin(s) + tile.list_row;  // of the first row
    tile.num_tokens = shape_.causal ? std::clamp(position + tile.num_rows, 0, length) : length;
    tile.end_unit = ceil_div(tile.num_tokens, kUnitTokens);
    if (shape_.window_left < 0) return;
    // A row of a tree may be its first token's sibling, whatever precedes it.
    const int32_t least = batch_.is_tree(s) ? batch_.tree_begin(s) : position;
    const int32_t begin = std::clamp(least - shape_.window_left, 0, tile.num_tokens);
    tile.first_unit = std::min(begin / kUnitTokens, tile.end_unit);
    tile.sink_units = std::min(ceil_div(shape_.sink_tokens, kUnitTokens), tile.first_unit);
    if (ceil_div(tile.sink_units, kChunkUnits) > tile.first_unit / kChunkUnits) {
      tile.first_unit = tile.sink_units = 0;  // nothing lies between
    }
  }

  // Has the pages of a KV head of a sequence, whose tiles these are, re-arranged where that pays
  // and there is room.
  void arrange(std::span<AttentionTile> tiles) {
    if (shape_.most_arranged == 0 || tiles.empty() || !is_long(tiles[0])) return;
    int32_t first = INT32_MAX;
    int32_t end = 0;
    int64_t reads = 0;
    for (const AttentionTile& tile : tiles) {
      first = std::min(first, tile.sink_units > 0 ? 0 : tile.first_unit);
      end = std::max(end, tile.end_unit);
      reads += tile.sink_units + tile.end_unit - tile.first_unit;
    }
    const int32_t sequence = tiles[0].sequence;
    const bool has_lists = shape_.visits && !batch_.is_dense(sequence);
    const int64_t pages = end - first;
    const int64_t least = pages * shape_.arranged_reads * (has_lists ? kListedPart : 1);
    const auto begin = static_cast<int64_t>(work_.arranged.size());
    if (pages <= 0 || reads < least || begin + pages > shape_.most_arranged) return;
    for (AttentionTile& tile : tiles) tile.arranged = static_cast<int32_t>(begin - first);
    for (int32_t unit = first; unit < end; ++unit) {
      work_.arranged.push_back({sequence, tiles[0].kv_head, unit});
    }
  }

  bool is_long(const AttentionTile& tile) const {
    if (shape_.long_rows == 0) return false;
    if (shape_.only_long) return !batch_.is_tree(tile.sequence);
    return tile.num_rows * tile.num_heads > shape_.most_rows;
  }

  // In chunks. A GPU holds half of the shares at once: where it holds all tiles, their items are no
  // more than that, for a second round would begin behind the slowest of the first and end with
  // most multiprocessors idle.
  int32_t share_of(int64_t chunks) const {
    const auto share = static_cast<int32_t>(chunks / shape_.shares);
    const int64_t most = shape_.shares / 2;
    const auto items = [&](int32_t of) {
      int64_t count = 0;
      for (const AttentionTile& tile : work_.tiles) {
        count += is_long(tile) ? 0 : ceil_div(num_chunks(tile), of);
      }
      return count;
    };
    const bool fits = most > 0 && items(std::numeric_limits<int32_t>::max()) <= most;
    if (shape_.most_rows == 0 || !fits) return share;
    int32_t least = std::max(ceil_div(chunks, most), 1);
    while (items(least) > most) ++least;
    return least;
  }

  void finish() {
    int64_t chunks = 0;
    int64_t long_chunks = 0;
    for (const AttentionTile& tile : work_.tiles) {
      (is_long(tile) ? long_chunks : chunks) += num_chunks(tile);
    }
    const int32_t share = share_of(chunks);
    // A multiprocessor holds one or two blocks of such tiles, and their partial results cost more.
    const auto long_share = static_cast<int32_t>(long_chunks / std::max(1, shape_.shares / 4));
    for (size_t i = 0; i < work_.tiles.size(); ++i) {
      const AttentionTile& tile = work_.tiles[i];
      add_items(static_cast<int32_t>(i), tile, is_long(tile) ? long_share : share);
    }
    if (shape_.long_rows > 0) put_long_items_first();
    if (shape_.source == KeySource::pages) return;
    // The heads of the same tokens follow each other: where one token's heads lie side by side,
    // they share memory pages and what the hardware fetches beyond what it is asked for.
    const auto place = [&](const AttentionItem& item) {
      return std::pair(work_.tiles[static_cast<size_t>(item.tile)].sequence, item.first_unit);
    };
    std::stable_sort(
        work_.items.begin(), work_.items.end(),
        [&](const AttentionItem& a, const AttentionItem& b) { return place(a) < place(b); });
  }

  // Long ones of most keys first, so that the last to be begun are small. They walk their keys
  // side by side, so that one's pages are still in the second cache for others of its head. No two
  // items are equal, so the order is one whatever sorts; nothing is allocated.
  void put_long_items_first() {
    const auto tile = [&](const AttentionItem& item) -> const AttentionTile& {
      return work_.tiles[static_cast<size_t>(item.tile)];
    };
    const auto place = [&](const AttentionItem& item) {
      const bool few = !is_long(tile(item));
      const int32_t units = few ? 0 : item.end_unit - item.first_unit;
      return std::tuple(few, -units, item.tile, item.first_unit);
    };
    std::sort(work_.items.begin(), work_.items.end(),
              [&](const AttentionItem& a, const AttentionItem& b) { return place(a) < place(b); });
    work_.num_long_items =
        std::count_if(work_.items.begin(), work_.items.end(),
                      [&](const AttentionItem& item) { return is_long(tile(item)); });
  }

  // What the tile's kernel folds, and has partial results of.
  int32_t chunk_units(const AttentionTile& tile) const {
    return shape_.only_long && is_long(tile) ? kSegmentUnits : kChunkUnits;
  }

  // `share` is in chunks of kChunkUnits.
  void add_items(int32_t index, const AttentionTile& tile, int32_t share) {
    const int32_t units = chunk_units(tile);
    const int32_t chunks = num_chunks(tile, units);
    const int64_t stride = int64_t{tile.num_rows} * tile.num_heads;
    share = ceil_div(int64_t{share} * kChunkUnits, units);
    // One chunk cannot be in two items.
    const bool overlap = ceil_div(tile.sink_units, units) > tile.first_unit / units;
    if (chunks <= 1 || chunks <= share || overlap ||
        work_.num_partials + chunks * stride > shape_.most_partials) {
      const int32_t first = tile.sink_units > 0 ? 0 : tile.first_unit;
      work_.items.push_back({index, first, tile.end_unit, -1, -1});
      return;
    }
    const size_t first_item = work_.items.size();
    const int64_t first_partial = work_.num_partials;
    const int32_t step = std::max(share, 1) * units;
    const auto merge = static_cast<int32_t>(work_.merges.size());
    const auto add = [&](int32_t begin, int32_t end) {
      for (int32_t unit = begin; unit < end;) {
        const int32_t next = std::min(unit / units * units + step, end);
        work_.items.push_back({index, unit, next, static_cast<int32_t>(work_.num_partials), merge});
        const int32_t parts = ceil_div(next, units) - unit / units;
        work_.num_partials += parts * stride;
        unit = next;
      }
    };
    add(0, tile.sink_units);
    add(tile.first_unit, tile.end_unit);
    work_.merges.push_back({index, static_cast<int32_t>(first_partial), chunks,
                            static_cast<int32_t>(work_.items.size() - first_item)});
  }

  const AttentionShape& shape_;
  const BatchLayout& batch_;
  AttentionWork& work_;
};

}  // namespace

void AttentionWork::clear() {
  spans.clear();
  tiles.clear();
  items.clear();
  merges.clear();
  arranged.clear();
  num_partials = 0;
  num_long_items = 0;
  one_tile = true;
}

int64_t AttentionWork::reserve(const AttentionShape& shape, int64_t max_tokens,
                               int64_t max_sequences, int64_t max_kv_len) {
  const int64_t group = shape.group();
  const int64_t head_groups = ceil_div(group, tile_heads(shape));
  // Each sequence may end in a tile that is not full, chunks of keys cut one in two, and no tile is
  // empty.
  const int64_t least_tokens = shape.row_visits ? 1 : tile_tokens(shape);
  const int64_t cuts = shape.chunk > 0 ? max_tokens / shape.chunk + max_sequences : 0;
  const int64_t max_tiles =
      shape.num_kv_heads * head_groups *
      std::min<int64_t>(max_tokens, ceil_div(max_tokens, least_tokens) + max_sequences + cuts);
  const int64_t chunks = ceil_div(max_kv_len, kUnitTokens * kChunkUnits);
  const int64_t partials =
      chunks <= 1 ? 0 : std::min(max_tokens * shape.num_qo_heads * chunks, shape.most_partials);
  // A chunk of a split tile has at least a token's heads of partials, and a merge two of them.
  const int64_t least = std::max<int64_t>(1, group / head_groups);
  tiles.reserve(static_cast<size_t>(max_tiles));
  items.reserve(static_cast<size_t>(max_tiles + std::min(max_tiles * chunks, partials / least)));
  merges.reserve(static_cast<size_t>(std::min(max_tiles, partials / (2 * least))));
  const int64_t pages = shape.num_kv_heads * max_sequences * ceil_div(max_kv_len, kUnitTokens);
  arranged.reserve(static_cast<size_t>(std::min(pages, shape.most_arranged)));
  return partials;
}

void plan_attention(const AttentionShape& shape, const BatchLayout& batch, AttentionWork& work) {
  Planner(shape, batch, work).add_dense();
}

void plan_attention(const AttentionShape& shape, const BatchLayout& batch,
                    const AttentionLists& lists, AttentionWork& work) {
  Planner(shape, batch, work).add_lists(lists);
}

}  // namespace effinfer::ops
