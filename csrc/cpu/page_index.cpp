// The driver of page_index and key_index: an item is the list of one generated row and KV head; or
// those of a sequence's rows, where they visit what rows before them have chosen.
#include "ops/page_index.h"

#include <algorithm>
#include <limits>

#include "cpu/choose_tokens.h"
#include "cpu/kept_choice.h"
#include "cpu/level.h"
#include "cpu/page_index.h"
#include "cpu/page_summaries.h"
#include "cpu/register.h"
#include "ops/registry.h"

namespace effinfer::cpu {
namespace {

using ops::IndexedHead;
using ops::kPageSize;
using ops::PageCandidates;
using ops::PageIndexProblem;
using ops::VisitBlock;

// A member's memory, of as many pages as any step has.
struct RowScratch {
  const uint16_t** bounds;  // [units], or
  PageKeys* keys;           // [pages] of unit 1
  float* scores;            // [group][units]
  float* tile;
  uint64_t* chosen;  // a bit for each unit
  uint16_t* own;     // bounds or means that are not in the cache, as it would have them

  RowScratch(const PageIndexProblem& p, void* memory) {
    const int64_t units = units_of(p);
    bounds = static_cast<const uint16_t**>(memory);
    keys = static_cast<PageKeys*>(memory);
    chosen = reinterpret_cast<uint64_t*>(static_cast<std::byte*>(memory) + pointer_bytes(p));
    scores = reinterpret_cast<float*>(chosen + TokenSet::words_of(units));
    tile = scores + p.group() * units;
    own = reinterpret_cast<uint16_t*>(tile + score_scratch_floats(p.group(), p.kv.head_dim));
  }
  static int64_t pages_of(const PageIndexProblem& p) {
    return (p.max_kv_len + kPageSize - 1) / kPageSize;
  }
  static int64_t units_of(const PageIndexProblem& p) {
    return padded_scores(pages_of(p) * (kPageSize / p.summary_unit()));
  }
  static size_t pointer_bytes(const PageIndexProblem& p) {
    return p.has_bounds() ? static_cast<size_t>(units_of(p)) * sizeof(uint16_t*)
                          : static_cast<size_t>(pages_of(p)) * sizeof(PageKeys);
  }
  static size_t bytes(const PageIndexProblem& p) {
    const auto units = static_cast<size_t>(units_of(p));
    const auto dim = static_cast<size_t>(p.kv.head_dim);
    const auto group = static_cast<size_t>(p.group());
    const auto tile = static_cast<size_t>(score_scratch_floats(p.group(), p.kv.head_dim));
    return pointer_bytes(p) +
           static_cast<size_t>(TokenSet::words_of(units_of(p))) * sizeof(uint64_t) +
           (group * units + tile) * sizeof(float) +
           (p.has_bounds()
                ? units * static_cast<size_t>(p.summary_vectors()) * dim * sizeof(uint16_t)
                : 0);
  }
};

class RowMember {
 public:
  RowMember(const PageIndexKernels& level, const PageIndexProblem& p, void* scratch)
      : level_(level), p_(p), scratch_(p, scratch) {}

  // The rows of a sequence, one after the other, where they visit what those before have chosen.
  void run_sequence(int64_t sequence, int64_t kv_head) const {
    const int32_t first = p_.visits.first_block[sequence];
    if (first < 0 || !has_row_lists(p_.batch, sequence)) return;
    float* const plane = p_.batch.is_tree(sequence) ? nullptr : p_.planes.of(sequence, kv_head);
    const int32_t rows = p_.batch.qo_indptr[sequence + 1] - p_.batch.qo_indptr[sequence];
    for (int32_t i = 0; i < rows; ++i) run_row(first + i, kv_head, plane);
  }

  void run_row(int64_t block, int64_t kv_head, float* plane = nullptr) const {
    if (p_.heads[kv_head] == IndexedHead::other) return;
    const VisitBlock& row = p_.visits.blocks[block];
    const int64_t own_page = row.position / kPageSize;
    // A tree's tokens lie behind each other, whatever their positions are.
    const int64_t slot =
        p_.batch.step_begin(row.sequence) + row.first_row - p_.batch.qo_indptr[row.sequence];
    const TokenSet list(p_.visits.list(block, kv_head), slot / kPageSize + 1);
    if (p_.heads[kv_head] == IndexedHead::dense || visits_all(p_, row)) return list.add_all();
    list.clear();
    const PageCandidates pages = candidates_of(p_, row);
    uint64_t* const words = p_.visits.list(block, kv_head) + pages.first;
    const RowQueries own = queries_of(row, kv_head);
    const KeptChoice kept(plane, own.q, int64_t{own.group} * own.head_dim, row.position);
    if (kept.holds(p_.reuse)) {
      kept.copy_to(words, pages.first, pages.count());
    } else {
      add_chosen(row, kv_head, pages, words);
      kept.keep(words, pages.first, pages.count());
    }
    add_always({p_.sink_tokens, p_.local_tokens}, row, list);
    list.add(ops::first_shown(p_.window_left, row), pages.first * kPageSize);
    list.add((own_page - 1) * kPageSize, slot + 1);
  }

 private:
  void add_chosen(const VisitBlock& row, int64_t kv_head, const PageCandidates& pages,
                  uint64_t* words) const {
    const int64_t units = pages.count() * (kPageSize / p_.unit);
    const int64_t kept = chosen_units(p_, units);
    if (kept == 0) return;
    p_.has_bounds() ? score_units(row, kv_head, pages) : score_keys(row, kv_head, pages);
    const int64_t scores = pages.count() * (kPageSize / p_.summary_unit());
    level_.vote(scratch_.scores, scores, p_.group(), p_.vote == ops::HeadVote::sum);
    if (p_.has_windows()) take_windows(pages.count());
    const TokenSet chosen(scratch_.chosen, TokenSet::words_of(units));
    chosen.clear();
    level_.choose(scratch_.scores, units, kept, scratch_.chosen);
    const TokenSet to(words, pages.count());
    if (p_.unit == 1) return to.add(chosen);
    chosen.for_tokens([&](int64_t unit) { to.add(unit * p_.unit, (unit + 1) * p_.unit); });
  }

  // Of each page the highest score of the windows that it shares keys with: in place, as they begin
  // behind it.
  void take_windows(int64_t pages) const {
    constexpr int64_t kOfPage = kPageSize / ops::kMeanUnit;
    const int64_t windows = pages * kOfPage - 1;
    for (int64_t page = 0; page < pages; ++page) {
      const int64_t first = std::max<int64_t>(0, page * kOfPage - 1);
      const int64_t end = std::min(windows, (page + 1) * kOfPage);
      scratch_.scores[page] = *std::max_element(scratch_.scores + first, scratch_.scores + end);
    }
    std::fill(scratch_.scores + pages, scratch_.scores + padded_scores(pages),
              std::numeric_limits<float>::lowest());
  }

  RowQueries queries_of(const VisitBlock& row, int64_t kv_head) const {
    const float* q = p_.q + row.first_row * p_.q_stride + kv_head * p_.group() * p_.kv.head_dim;
    return {q, p_.group(), p_.kv.head_dim, p_.sm_scale};
  }
  const int32_t* ids_of(const VisitBlock& row, const PageCandidates& pages) const {
    return p_.batch.kv_indices + p_.batch.kv_indptr[row.sequence] + pages.first;
  }

  void score_units(const VisitBlock& row, int64_t kv_head, const PageCandidates& pages) const {
    const int32_t* ids = ids_of(row, pages);
    const int64_t of_page = kPageSize / p_.summary_unit();
    const int64_t numbers = p_.summary_vectors() * p_.kv.head_dim;
    for (int64_t i = 0; i < pages.count(); ++i) {
      const uint16_t* bounds = bounds_of(ids[i], kv_head, scratch_.own + i * of_page * numbers);
      for (int64_t unit = 0; unit < of_page; ++unit) {
        scratch_.bounds[i * of_page + unit] = bounds + unit * numbers;
      }
    }
    UnitScoreTile tile = {};
    tile.queries = queries_of(row, kv_head);
    tile.num_units = pages.count() * of_page;
    tile.bounds = scratch_.bounds;
    tile.scores = scratch_.scores;
    tile.scratch = scratch_.tile;
    const auto score = p_.has_windows() ? level_.score_windows : level_.score_means;
    p_.means ? score(tile) : level_.score_units(tile);
  }

  void score_keys(const VisitBlock& row, int64_t kv_head, const PageCandidates& pages) const {
    const int32_t* ids = ids_of(row, pages);
    for (int64_t i = 0; i < pages.count(); ++i) {
      scratch_.keys[i] = keys_of(p_.kv, ids[i], kv_head);
    }
    KeyScoreTile tile = {};
    tile.queries = queries_of(row, kv_head);
    tile.num_pages = pages.count();
    tile.dtype = p_.kv.dtype;
    tile.pages = scratch_.keys;
    tile.channels = p_.channels + kv_head * p_.num_channels;
    tile.num_channels = p_.num_channels;
    tile.scores = scratch_.scores;
    tile.scratch = scratch_.tile;
    level_.score_keys(tile);
  }

  // `own` is memory for them.
  const uint16_t* bounds_of(int64_t page, int64_t head, uint16_t* own) const {
    return page_summary(p_.kv, page, head, own, [&](uint16_t* to) {
      const KeyShape shape = {p_.kv.dtype, p_.kv.head_dim};
      const PageKeys keys = keys_of(p_.kv, page, head);
      p_.means ? level_.average(shape, keys, to) : level_.bound(shape, keys, p_.unit, to);
    });
  }

  const PageIndexKernels& level_;
  const PageIndexProblem& p_;
  const RowScratch scratch_;
};

template <Level kLevel>
void run_rows(const PageIndexProblem& p, Team& team) {
  const RowMember member(kernels<kLevel, PageIndexKernels>(), p, team.scratch());
  const int64_t heads = p.kv.num_kv_heads;
  if (p.reuse > 0.0f) {
    return team.for_chunks(p.batch.num_sequences * heads,
                           [&](int64_t i) { member.run_sequence(i / heads, i % heads); });
  }
  team.for_chunks(p.visits.num_rows * heads,
                  [&](int64_t i) { member.run_row(p.visits.num_blocks + i / heads, i % heads); });
}

const char* rejects(const PageIndexProblem& p) {
  return rejects_keys(p.kv);
}

}  // namespace

PageKeys keys_of(const ops::KvLayer& kv, int64_t page, int64_t head) {
  PageKeys keys = {kv.k_head(page, head), nullptr};
  if (kv.k_scale != nullptr) {
    keys.k_scale = kv.k_scale + (page * kv.num_kv_heads + head) * kPageSize;
  }
  return keys;
}

const char* rejects_keys(const ops::KvLayer& kv) {
  const DType dtype = kv.dtype;
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::i8) {
    return "kv_dtype is not f32, f16, bf16 or i8";
  }
  if (kv.head_dim <= 0 || kv.head_dim % 16 != 0) return "head_dim is not a multiple of 16";
  return nullptr;
}

void register_page_index() {
  auto& table = ops::mutable_table<PageIndexProblem>();
  for_levels<Level::portable, Level::avx2, Level::avx512>([&]<Level kLevel>() {
    table.add({"page_index." + std::string(name(kLevel)), isa_of(kLevel), rejects, run_rows<kLevel>,
               RowScratch::bytes});
  });
}

}  // namespace effinfer::cpu
