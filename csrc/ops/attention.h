// Attention: softmax(q k^T) v of query rows over the keys that they see. Decoding, verification and
// prefill are one kernel shape, over the engine's pages as they lie or over rows of any layout.
//
// A tile is some query rows of one sequence times query heads of one KV head. What it visits goes
// by in units of 64 tokens: a page as it lies, or tokens gathered into the order of the products
// (ops/kv_layout.h). What a row sees of a unit is one 64-bit word: the visited tokens less those
// that causality, the window, the tree and the mask hide.
//
// Four units are a chunk. Within a chunk a row keeps an online softmax (running maximum, sum,
// unscaled output); chunks are folded from left to right. Units and chunks begin at multiples of 64
// and 256 tokens of the sequence, those of a list of spans at multiples of the list. Keys that a
// row does not see contribute exact zeros, and a fold with nothing changes nothing: a row's result
// is the same bits for any batch, tile, team, and division into work items.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "effinfer/slot_plane.h"
#include "ops/cost.h"
#include "ops/kv_layout.h"
#include "ops/operand.h"
#include "ops/rope_append.h"
#include "ops/visits.h"

namespace effinfer::ops {

inline constexpr int32_t kUnitTokens = 64;
inline constexpr int32_t kChunkUnits = 4;
inline constexpr int32_t kChunkTokens = kChunkUnits * kUnitTokens;
// What attention keeps of rows, whose bytes cpu/vectors/kept_weights.h knows. Weights of keys lie
// with the member that made them, and nobody writes a line of another's.
struct KeptWeights {
  float* numbers = nullptr;  // [rows, KV heads, row_numbers()]; null: nothing is kept
  int64_t pages = 0;         // rounded(), of each row's sequence at least
  float* weights = nullptr;  // [members, room]
  int64_t room = 0;          // page_weights() of all rows, KV heads and pages

  static constexpr int64_t rounded(int64_t pages) { return (pages + 15) / 16 * 16; }
  // Of a KV head's group of query heads: the weights of a page's keys and one number.
  static constexpr int64_t page_weights(int64_t group) { return group * kPageSize + padded(group); }
  // Two numbers, and of each chunk as many, who has it, and where.
  static constexpr int64_t chunk_numbers(int64_t group) { return 2 * padded(group) + 16; }
  static constexpr int64_t row_numbers(int64_t group, int64_t pages) {
    return 2 * padded(group) + pages / kChunkUnits * chunk_numbers(group);
  }
  static constexpr int64_t padded(int64_t group) { return (group + 15) / 16 * 16; }
  constexpr bool is_kept() const { return numbers != nullptr; }
};

// Where the keys lie, which decides how many rows share them.
enum class KeySource : uint8_t {
  pages,  // the engine's: a multiple of the 6 rows of the AVX-512 register tile shares a line in
          // registers and cache
  rows    // a caller's: gathering 64 tokens costs about as much as 3 to 5 rows' products with them;
          // what a unit touches of 240 rows of 128 dimensions (queries, scores and output, 300 KB)
          // still lies in a second cache of 512 KB
};
// Rows with a list of visits share the tokens that are gathered for it, so more of them pay; beyond
// 128 rows what they touch of scores and output leaves the first cache, and whole pages cost more.
inline constexpr int32_t tile_rows(KeySource source, bool visits) {
  if (visits) return 128;
  return source == KeySource::pages ? 48 : 240;
}
// Heads of one token in a tile: over pages all of a group, as an item may append what all of them
// read; of gathered rows at most 32, as latent attention has 128 heads over one row of keys.
inline constexpr int32_t tile_heads(KeySource source, int32_t group) {
  return source == KeySource::pages || group < 32 ? group : 32;
}
// Rows times heads of a tile at most: one token's may be more than there is room for.
inline constexpr int32_t most_tile_rows(KeySource source, int32_t group, bool visits) {
  return tile_heads(source, group) > tile_rows(source, visits) ? tile_heads(source, group)
                                                               : tile_rows(source, visits);
}

// Of GPUs: the rows of a product of matrices, and items for each of some hundred multiprocessors.
inline constexpr int32_t kGpuTileRows = 16;
// Rows of a tile of prompts: as many as a block's warps multiply, 16 each, for as few reads of each
// page from the second cache; the fewer where a block has not the shared memory.
inline constexpr int32_t kGpuLongTileRows = 128;
inline constexpr int32_t kGpuLeastLongTileRows = 64;
inline constexpr int32_t kGpuShares = 512;
// What tiles of a shape that is `only_long` fold in place of chunks: they may be divided there.
// With lists these are units of the list, and an item has those that begin in its units.
inline constexpr int32_t kSegmentUnits = 32;
// 64 MB with heads of 128: 8 sequences of 64k tokens with 64 heads.
inline constexpr int64_t kGpuPartials = 131072;

// What pages take at most that prompts on Hopper have re-arranged (ArrangedPage): 64k tokens with 8
// heads of 128 dims.
inline constexpr int64_t kGpuArrangedBytes = int64_t{256} << 20;

// The shape part of a problem: what planning needs.
struct AttentionShape {
  KeySource source = KeySource::pages;
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;  // of values
  bool causal = true;
  int32_t window_left = -1;
  int32_t sink_tokens = 0;
  bool visits = false;      // whether rows may have lists of what they visit (ops/visits.h),
  bool row_visits = false;  // and generated rows each their own
  int32_t chunk = 0;        // as in AttentionProblem: no tile has rows of two
  // Rows times heads of a tile at most; 0: what suits the CPU, above.
  int32_t most_rows = 0;
  // Of sequences with many rows, but no tree of drafts: rows times heads of a tile at most. Such
  // tiles have kernels of their own, and their items stand first. 0: all tiles are alike.
  int32_t long_rows = 0;
  // All rows but those of trees are in such tiles, however few they are: of prompts, whose kernel
  // has bits of its own.
  bool only_long = false;
  // A tile with more than this share of all chunks is split into items of about that share, so that
  // whoever computes them stays busy with one sequence: teams of tens of members.
  int32_t shares = 64;
  // Splitting stops when this many partial results are in use: 8 MB with heads of 256.
  int64_t most_partials = 8192;
  // Pages of single KV heads that a call has memory to re-arrange for long tiles; 0: it does not.
  int64_t most_arranged = 0;
  // Which those of a sequence are when tiles read each so often, on an average. On an H100 64 KB to
  // read and to write are 26 ns of the whole GPU; a page of heads of 128 dims takes a tile of 128
  // rows 19 ns as it lies, at 224 TFLOP/s, and 9 at the goal: three reads, and there is a launch.
  int64_t arranged_reads = 4;

  int32_t group() const { return num_qo_heads / num_kv_heads; }
  bool operator==(const AttentionShape&) const = default;
};

// Tokens [begin, end) of a sequence, the visits `first` on of its list.
struct TokenSpan {
  int32_t begin;
  int32_t end;
  int32_t first;
  int64_t mask_bit;  // of the list's first row and the span's first token
};

// A page of a KV head that a call re-arranges once, before the tiles that read it.
struct ArrangedPage {
  int32_t sequence;
  int32_t kv_head;
  int32_t unit;  // of the sequence
};
// Keys and values of 16 bits.
constexpr size_t arranged_page_bytes(int64_t head_dim) {
  return static_cast<size_t>(2 * kUnitTokens * head_dim * 2);
}
inline constexpr int32_t kNotArranged = INT32_MIN;

struct AttentionTile {
  int32_t sequence;
  int32_t kv_head;
  int32_t first_row;  // flat query rows [first_row, first_row + num_rows)
  int32_t num_rows;
  int32_t first_head;  // query heads
  int32_t num_heads;
  int32_t first_unit;  // units [first_unit, end_unit) of the sequence, or of the list
  int32_t end_unit;
  int32_t
      sink_units;  // before first_unit: units [0, sink_units) too, when whole chunks lie between
  int32_t first_span;  // of a list; -1: all tokens
  int32_t num_spans;
  int32_t num_tokens;  // of the list, or up to the last one that a row sees
  int32_t list_row;    // first_row, counted within the list's block of rows
  // Plus a visited unit: its place among the arranged pages. Or kNotArranged: pages as they lie.
  int32_t arranged = kNotArranged;
};

// Units [first_unit, end_unit) of a tile: all, or those of a few chunks, with a partial result of
// each chunk for each row and head.
struct AttentionItem {
  int32_t tile;  // -1: none, nothing is to be done
  int32_t first_unit;
  int32_t end_unit;
  int32_t partial;  // index of the first chunk's result of (first row, first head), then row-major,
                    // then chunk by chunk; -1: none
  int32_t merge;    // of the work's merges; -1: none
};

struct AttentionMerge {
  int32_t tile;
  int32_t first_partial;
  int32_t num_partials;  // chunks, num_rows * num_heads partials apart
  int32_t num_items;
};

// What a team shares: made on the host for the sequences of a step, for any number of calls.
struct AttentionWork {
  std::vector<TokenSpan> spans;
  std::vector<AttentionTile> tiles;
  std::vector<AttentionItem> items;
  std::vector<AttentionMerge> merges;
  std::vector<ArrangedPage> arranged;
  int64_t num_partials = 0;
  int64_t num_long_items = 0;  // the first ones: of tiles of more than tile_rows rows
  int32_t tile_rows = 0;       // rows times heads of a tile at most, but of those
  int32_t long_rows = 0;       // of those
  bool only_long = false;
  bool one_tile = true;  // every sequence's rows are one tile of each KV head

  void clear();
  // Makes room for `max_tokens` rows, `max_sequences` sequences of at most `max_kv_len` tokens, all
  // of whose keys are visited: planning such a step does not allocate. Returns the partial results
  // that it may need.
  int64_t reserve(const AttentionShape& shape, int64_t max_tokens, int64_t max_sequences,
                  int64_t max_kv_len);
};

// The same as kernels see it, in the memory of their device.
struct AttentionWorkView {
  const TokenSpan* spans = nullptr;
  const AttentionTile* tiles = nullptr;
  const AttentionItem* items = nullptr;
  const AttentionMerge* merges = nullptr;
  const ArrangedPage* arranged = nullptr;
  int64_t num_arranged = 0;
  int64_t num_items = 0;
  int64_t num_merges = 0;
  int64_t num_long_items = 0;
  int32_t tile_rows = 0;  // 0: there is no work yet
  int32_t long_rows = 0;  // of the shape: 0: all tiles are alike
  bool only_long = false;
  bool one_tile = true;

  AttentionWorkView() = default;
  AttentionWorkView(const AttentionWork& work)  // NOLINT: of the host's memory
      : spans(work.spans.data()),
        tiles(work.tiles.data()),
        items(work.items.data()),
        merges(work.merges.data()),
        arranged(work.arranged.data()),
        num_arranged(static_cast<int64_t>(work.arranged.size())),
        num_items(static_cast<int64_t>(work.items.size())),
        num_merges(static_cast<int64_t>(work.merges.size())),
        num_long_items(work.num_long_items),
        tile_rows(work.tile_rows),
        long_rows(work.long_rows),
        only_long(work.only_long),
        one_tile(work.one_tile) {}
};

void plan_attention(const AttentionShape& shape, const BatchLayout& batch, AttentionWork& work);
// Of a caller's lists (effinfer/ops/attention.h), which are checked.
struct AttentionLists;
void plan_attention(const AttentionShape& shape, const BatchLayout& batch,
                    const AttentionLists& lists, AttentionWork& work);

// Query rows; strides in elements.
struct QueryRows {
  const uint8_t* data = nullptr;
  DType dtype = DType::f32;  // f32, f16, bf16
  int32_t dims = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

// Of a sequence, by slot the logarithm of how often a key counts: what a plane has
// (effinfer/slot_plane.h), in the memory of the kernels' device.
struct SlotWeights {
  const float* values = nullptr;  // [heads][stride]; null: each counts once
  int64_t stride = 0;             // a multiple of kPageSize
};

// Keys or values of all heads; strides in bytes. Of the engine's pages, whose tokens lie in tiles,
// token_stride is not used.
struct KvRows {
  const uint8_t* data = nullptr;
  DType dtype = DType::f32;
  int32_t dims = 0;
  int64_t page_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  // Of the engine's pages on GPUs: those from `first_far` on lie so many bytes farther.
  int32_t first_far = std::numeric_limits<int32_t>::max();
  int64_t far = 0;
  // Per token and head: float32 with the same three strides in floats; null: none.
  const float* scales = nullptr;
  int64_t scale_page_stride = 0;
  int64_t scale_token_stride = 0;
  int64_t scale_head_stride = 0;

  // Pages from `first` on are those that `from` begins with.
  void set_far(int32_t first, const uint8_t* from) {
    first_far = first;
    far = reinterpret_cast<intptr_t>(from) - reinterpret_cast<intptr_t>(data) - first * page_stride;
  }
  constexpr const uint8_t* page(int32_t id) const {
    return data + id * page_stride + (id >= first_far ? far : 0);
  }
};

// Rows in the engine's pages: the keys of a layer, or its values.
inline KvRows page_rows(const KvLayer& kv, const uint8_t* data, const float* scales) {
  KvRows rows;
  rows.data = data;
  rows.dtype = kv.dtype;
  rows.dims = kv.head_dim;
  rows.head_stride = static_cast<int64_t>(kv.head_bytes());
  rows.page_stride = kv.num_kv_heads * rows.head_stride;
  if (kv.dtype != DType::i8) return rows;
  rows.scales = scales;
  rows.scale_page_stride = kv.num_kv_heads * kPageSize;
  rows.scale_token_stride = 1;
  rows.scale_head_stride = kPageSize;
  return rows;
}
inline KvRows keys_of(const KvLayer& kv) {
  return page_rows(kv, kv.k, kv.k_scale);
}
inline KvRows values_of(const KvLayer& kv) {
  return page_rows(kv, kv.v, kv.v_scale);
}

// Queries, keys, who sees whom, and how logits are made: the part of a problem that says what a
// row's probabilities are.
struct AttentionLogits {
  KeySource source = KeySource::pages;
  QueryRows q;  // rotated
  KvRows k;
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  // Without kv_indices token t of sequence s is row kv_indptr[s] + t.
  BatchLayout batch;
  int32_t page_size = kPageSize;
  // [T] of the rows in their sequences, with work that is planned without causality and window;
  // null: a sequence's last ones. Of attention on GPUs, and of scores.
  const int32_t* positions = nullptr;
  bool causal = true;
  int32_t window_left = -1;      // -1: none; a row at position p sees [p - window_left, p]
  float sm_scale = 1.0f;         // times the factor of k's numbers
  float logits_soft_cap = 0.0f;  // 0: none; else cap * tanh(score / cap)
  // Of the products of queries with keys and of probabilities with values, which are summed in
  // float32: f32, or bf16 (queries and probabilities rounded to it).
  Arithmetic arithmetic = Arithmetic::f32;

  int32_t group() const { return num_qo_heads / num_kv_heads; }
};

struct AttentionProblem : AttentionLogits {
  QueryRows q_rope;  // more dimensions of the queries, with those of k_rope; dims 0: none
  KvRows k_rope;
  KvRows v;
  // Keys in chunks of so many tokens of their sequence, a multiple of kChunkTokens (dual chunk
  // attention, An et al., arXiv:2402.17463): a row multiplies those of its own chunk with q, those
  // of the one before it with q_before and older ones with q_far. 0: all with q, as are those of
  // sequences that are unchunked. Of the engine's pages.
  int32_t chunk = 0;
  QueryRows q_before;
  QueryRows q_far;
  CodedPages coded;  // of the engine's pages: those of k and v whose ids say so
  // On GPUs: those that are decoded first, and read as pages of k and v.
  DecodedPages decoded;
  AttentionWorkView work;

  int32_t sink_tokens = 0;        // with a window: keys [0, sink_tokens) are seen too
  const uint8_t* mask = nullptr;  // packed, little-endian
  int64_t mask_bytes = 0;
  const int64_t* mask_starts = nullptr;       // [S] bits, of sequences; null with lists
  const int64_t* mask_row_strides = nullptr;  // [S] bits between rows
  VisitPlan visits;  // lists that the step has written before; without lists of spans

  float v_scale = 1.0f;
  const float* alibi_slopes = nullptr;  // [num_qo_heads]
  const float* sink_logits = nullptr;   // [num_qo_heads] logits of keys without values
  // Added to logits of the sequences that have a plane of the problem's name
  // (effinfer/slot_plane.h): its numbers, and to those of the first key these. Of the engine's
  // pages.
  const float* first_logits = nullptr;  // [num_qo_heads]
  std::string_view weights;
  const SlotWeights* weighted = nullptr;  // [S]
  int32_t first_plane_head = 0;           // for KV head 0 of this layer
  // Of scored rows of this name, each the only one of its sequence, what they weigh keys by is
  // kept, for a call of attention_mass (ops/attention_mass.h).
  std::string_view mass;
  const ScoredRows* scored = nullptr;
  int64_t num_scored = 0;
  KeptWeights kept;
  // A few rows of each sequence: rows of keys are multiplied where they lie.
  bool decode = false;
  // Rows of prompts, in a phase of their own: sums need not be decoding's, bit for bit.
  bool own_sums = false;

  float* partial_out = nullptr;  // [num_partials, v.dims rounded up to 16]
  // [num_partials, 2]: maximum (logarithms natural on the CPU, binary on GPUs) and sum
  float* partial_ms = nullptr;
  // [merges], zeros between calls; with own_sums on GPUs one, by which blocks share items.
  int32_t* done = nullptr;
  // [work.num_arranged]: the keys and values of each, as the kernel reads them.
  uint8_t* arranged = nullptr;
  uint8_t* out = nullptr;  // [T, num_qo_heads, v.dims] of q's dtype
  int64_t out_stride = 0;  // elements between rows
  // When its data is set, the result goes there as an operand and not to `out`; the columns of a KV
  // head's group must be whole blocks.
  Operand out_operand;
  float* lse = nullptr;     // [T, num_qo_heads]; null: none
  float lse_factor = 1.0f;  // on natural logarithms
  // With `append.k` set, `q` is not read: an item first norms and rotates its rows and appends
  // those of their keys that its own pages hold, so that nothing else need precede it. Of pages,
  // with work.one_tile only.
  RopeAppendProblem append;

  constexpr bool weighs_keys() const { return !weights.empty(); }
  // Of a sequence's keys; null: each counts once.
  constexpr const float* plane_weights(int32_t sequence, int32_t kv_head) const {
    if (!weighs_keys() || weighted[sequence].values == nullptr) return nullptr;
    return weighted[sequence].values + (first_plane_head + kv_head) * weighted[sequence].stride;
  }
};

std::string describe(const AttentionProblem& problem);
Cost cost(const AttentionProblem& problem);

}  // namespace effinfer::ops
