// The driver of history_index: an item is a sequence's generated rows of a step and a KV head, one
// after the other, as each leaves what the next one chooses by.
#include "ops/history_index.h"

#include <algorithm>

#include "cpu/choose_tokens.h"
#include "cpu/history_index.h"
#include "cpu/level.h"
#include "cpu/page_index.h"
#include "cpu/register.h"
#include "ops/registry.h"

namespace effinfer::cpu {
namespace {

using ops::HistoryIndexProblem;
using ops::IndexedHead;
using ops::kHistoryFilter;
using ops::kHistoryRows;
using ops::kPageSize;
using ops::PageCandidates;
using ops::VisitBlock;

constexpr uint64_t kWhole = ~uint64_t{0};

// A member's memory, of as many pages as any step has.
struct HistoryScratch {
  PageKeys* keys;    // [pages], of those that a row visits
  uint64_t* chosen;  // a bit for each page
  float* network;    // HistoryTile's
  float* scores;     // [pages], padded
  float* tile;
  float* logits;  // [group][64 * pages]

  HistoryScratch(const HistoryIndexProblem& p, void* memory) {
    const int64_t pages = pages_of(p);
    keys = static_cast<PageKeys*>(memory);
    chosen = reinterpret_cast<uint64_t*>(keys + pages);
    network = reinterpret_cast<float*>(chosen + TokenSet::words_of(pages));
    scores = network + ops::kHistoryWeights;
    tile = scores + pages;
    logits = tile + score_scratch_floats(p.pages.group(), p.pages.kv.head_dim);
  }
  static int64_t pages_of(const HistoryIndexProblem& p) {
    return padded_scores((p.pages.max_kv_len + kPageSize - 1) / kPageSize);
  }
  static size_t bytes(const HistoryIndexProblem& p) {
    const int64_t pages = pages_of(p);
    const int64_t group = p.pages.group();
    const int64_t floats = ops::kHistoryWeights + pages + group * pages * kPageSize +
                           score_scratch_floats(group, p.pages.kv.head_dim);
    return static_cast<size_t>(pages) * sizeof(PageKeys) +
           static_cast<size_t>(TokenSet::words_of(pages)) * sizeof(uint64_t) +
           static_cast<size_t>(floats) * sizeof(float);
  }
};

struct Kernels {
  const PageIndexKernels& pages;
  const HistoryKernels& history;
};

class HistoryMember {
 public:
  HistoryMember(const Kernels& kernels, const HistoryIndexProblem& p, void* memory)
      : kernels_(kernels), all_(p), p_(p.pages), scratch_(p, memory) {}

  void run_item(int64_t sequence, int64_t kv_head) const {
    const ops::BatchLayout& batch = p_.batch;
    const bool has_lists = p_.visits.first_block[sequence] >= 0;
    if (!has_lists || !has_row_lists(batch, sequence)) return;
    if (p_.heads[kv_head] == IndexedHead::other) return;
    float* const history = batch.is_tree(sequence) ? nullptr : p_.planes.of(sequence, kv_head);
    const int32_t rows = batch.qo_indptr[sequence + 1] - batch.qo_indptr[sequence];
    for (int32_t i = 0; i < rows; ++i) {
      const int64_t block = p_.visits.first_block[sequence] + i;
      const VisitBlock& row = p_.visits.blocks[block];
      // A tree's tokens lie behind each other, whatever their positions are.
      const int64_t slot = batch.step_begin(sequence) + i;
      const TokenSet list(p_.visits.list(block, kv_head), slot / kPageSize + 1);
      const bool chooses = p_.heads[kv_head] == IndexedHead::chosen && !visits_all(p_, row);
      if (history == nullptr || !chooses) {
        list.add_all();
        continue;
      }
      run_row(row, kv_head, history, list, p_.visits.list(block, kv_head));
    }
  }

 private:
  void run_row(const VisitBlock& row, int64_t kv_head, float* history, const TokenSet& list,
               uint64_t* words) const {
    const auto place = static_cast<float>(row.position);
    const bool follows = history[ops::kHistoryNext] == place;
    if (follows) clear_new_pages(row, history);
    const bool sees_all = !follows || place - history[ops::kHistoryAll] >= float(all_.every);
    if (sees_all) {
      list.add_all();
      history[ops::kHistoryAll] = place;
    } else {
      list.clear();
      add_chosen(row, history, words);
      add_always({p_.sink_tokens, p_.local_tokens}, row, list);
      list.add((row.position / kPageSize - 1) * kPageSize, row.position + 1);
    }
    add_to_history(row, kv_head, words, follows, history);
  }

  // Pages that are whole since the row before: of rows before that they have nothing, though their
  // numbers may be those of pages that were taken back.
  static void clear_new_pages(const VisitBlock& row, float* history) {
    const int64_t whole = row.position / kPageSize;
    for (auto page = static_cast<int64_t>(history[ops::kHistoryWhole]); page < whole; ++page) {
      std::fill_n(history + page * kPageSize, kHistoryRows, 0.0f);
    }
  }

  void add_chosen(const VisitBlock& row, const float* history, uint64_t* words) const {
    const PageCandidates pages = candidates_of(p_, row);
    const int64_t kept = chosen_units(p_, pages.count());
    if (kept == 0) return;
    turn_network(row.position);
    HistoryTile tile = {};
    tile.network = scratch_.network;
    tile.history = history;
    tile.num_pages = row.position / kPageSize;
    tile.first = pages.first;
    tile.end = pages.end;
    tile.scores = scratch_.scores;
    kernels_.history.predict(tile);
    const TokenSet chosen(scratch_.chosen, TokenSet::words_of(pages.count()));
    chosen.clear();
    kernels_.pages.choose(scratch_.scores, pages.count(), kept, scratch_.chosen);
    chosen.for_tokens([&](int64_t page) { words[pages.first + page] = kWhole; });
  }

  // What the network has of a row so many before this one goes to where pages have that row.
  void turn_network(int64_t position) const {
    constexpr int64_t kRow = ops::kHistoryChannels;
    constexpr int64_t kDirect = kHistoryFilter + 2 * kRow;
    float* const to = scratch_.network;
    std::copy(all_.network + kHistoryFilter, all_.network + kDirect, to + kHistoryFilter);
    for (int64_t age = 0; age < kHistoryRows; ++age) {
      const int64_t number = (position - 1 - age) % kHistoryRows;
      for (int64_t first = 0; first < kHistoryFilter; first += kHistoryRows * kRow) {
        std::copy_n(all_.network + first + age * kRow, kRow, to + first + number * kRow);
      }
      to[kDirect + number] = all_.network[kDirect + age];
    }
  }

  void add_to_history(const VisitBlock& row, int64_t kv_head, const uint64_t* words, bool follows,
                      float* history) const {
    const int64_t whole = row.position / kPageSize;
    score_visited(row, kv_head, words, whole);
    const int64_t now = row.position % kHistoryRows;
    const int64_t before = (row.position - 1) % kHistoryRows;
    for (int64_t page = 0, i = 0; page < whole; ++page) {
      float* const own = history + page * kPageSize;
      const float score = words[page] == kWhole ? scratch_.scores[i++] : own[before];
      own[now] = score;
      if (!follows) std::fill_n(own, kHistoryRows, score);
    }
    history[ops::kHistoryNext] = static_cast<float>(row.position + 1);
    history[ops::kHistoryWhole] = static_cast<float>(whole);
  }

  // The scores of the whole pages that a row visits: one at least, that before its own.
  void score_visited(const VisitBlock& row, int64_t kv_head, const uint64_t* words,
                     int64_t whole) const {
    const int32_t* ids = p_.batch.kv_indices + p_.batch.kv_indptr[row.sequence];
    int64_t visited = 0;
    for (int64_t page = 0; page < whole; ++page) {
      if (words[page] == kWhole) scratch_.keys[visited++] = keys_of(p_.kv, ids[page], kv_head);
    }
    KeyScoreTile tile = {};
    const float* q = p_.q + row.first_row * p_.q_stride + kv_head * p_.group() * p_.kv.head_dim;
    tile.queries = {q, p_.group(), p_.kv.head_dim, p_.sm_scale};
    tile.num_pages = visited;
    tile.dtype = p_.kv.dtype;
    tile.pages = scratch_.keys;
    tile.scores = scratch_.logits;
    tile.scratch = scratch_.tile;
    kernels_.pages.score_keys(tile);
    kernels_.history.score_pages(scratch_.logits, visited, p_.group(), scratch_.scores);
  }

  const Kernels& kernels_;
  const HistoryIndexProblem& all_;
  const ops::PageIndexProblem& p_;
  const HistoryScratch scratch_;
};

template <Level kLevel>
void run_history(const HistoryIndexProblem& p, Team& team) {
  const Kernels level = {kernels<kLevel, PageIndexKernels>(), kernels<kLevel, HistoryKernels>()};
  const HistoryMember member(level, p, team.scratch());
  const int64_t heads = p.pages.kv.num_kv_heads;
  team.for_chunks(p.pages.batch.num_sequences * heads,
                  [&](int64_t i) { member.run_item(i / heads, i % heads); });
}

const char* rejects(const HistoryIndexProblem& p) {
  return rejects_keys(p.pages.kv);
}

}  // namespace

void register_history_index() {
  auto& table = ops::mutable_table<HistoryIndexProblem>();
  for_levels<Level::portable, Level::avx2, Level::avx512>([&]<Level kLevel>() {
    table.add({"history_index." + std::string(name(kLevel)), isa_of(kLevel), rejects,
               run_history<kLevel>, HistoryScratch::bytes});
  });
}

}  // namespace effinfer::cpu
