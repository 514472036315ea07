// The driver of the page index: an item is the list of one generated row and KV head.
//
// Bounds that the cache does not know yet are made by whoever asks first, and written into the
// cache, where nobody else writes them at the same time; who comes second meanwhile makes them for
// itself, as it would take longer to wait.
#include "cpu/page_index.h"

#include <atomic>
#include <cstring>

#include "cpu/choose_tokens.h"
#include "cpu/level.h"
#include "cpu/register.h"
#include "ops/page_index.h"
#include "ops/registry.h"

namespace effinfer::cpu {
namespace {

using ops::IndexedHead;
using ops::kPageSize;
using ops::PageIndexProblem;
using ops::VisitBlock;

// Of ops::PageBounds::known.
enum Known : int32_t { kUnknown, kKnown, kBeingWritten };

// A member's memory, of as many pages as any step has.
struct PageScratch {
  const uint16_t** bounds;  // [pages]
  uint16_t* own;            // [pages][2][head_dim]: bounds that are not in the cache
  float* scores;            // [group][pages]
  int32_t* order;           // [pages]
  float* tile;

  PageScratch(const PageIndexProblem& p, void* memory) {
    const int64_t pages = pages_of(p);
    bounds = static_cast<const uint16_t**>(memory);
    scores = reinterpret_cast<float*>(bounds + pages);
    tile = scores + p.group() * pages;
    order = reinterpret_cast<int32_t*>(tile + page_scratch_floats(p.group(), p.kv.head_dim));
    own = reinterpret_cast<uint16_t*>(order + pages);
  }
  static int64_t pages_of(const PageIndexProblem& p) {
    return padded_pages((p.max_kv_len + kPageSize - 1) / kPageSize);
  }
  static size_t bytes(const PageIndexProblem& p) {
    const int64_t page = static_cast<int64_t>(sizeof(void*) + sizeof(int32_t)) +
                         p.group() * static_cast<int64_t>(sizeof(float)) +
                         2 * p.kv.head_dim * static_cast<int64_t>(sizeof(uint16_t));
    const int64_t queries = page_scratch_floats(p.group(), p.kv.head_dim);
    return static_cast<size_t>(pages_of(p) * page + queries * static_cast<int64_t>(sizeof(float)));
  }
};

class PageMember {
 public:
  PageMember(const PageIndexKernels& level, const PageIndexProblem& p, void* scratch)
      : level_(level), p_(p), scratch_(p, scratch) {}

  void run_item(int64_t index, int64_t kv_head) const {
    if (p_.heads[kv_head] == IndexedHead::other) return;
    const int64_t block = p_.visits.num_blocks + index;
    const VisitBlock& row = p_.visits.blocks[block];
    const int64_t own_page = row.position / kPageSize;
    // A tree's tokens lie behind each other, whatever their positions are.
    const int64_t slot =
        p_.batch.step_begin(row.sequence) + row.first_row - p_.batch.qo_indptr[row.sequence];
    const TokenSet list(p_.visits.list(block, kv_head), slot / kPageSize + 1);
    if (p_.heads[kv_head] == IndexedHead::dense || visits_all(p_, row)) return list.add_all();
    list.clear();
    const ops::PageCandidates pages = candidates_of(p_, row);
    score(row, kv_head, pages);
    const auto chosen = static_cast<int32_t>(chosen_pages(p_, pages.count()));
    const TokenSet behind(p_.visits.list(block, kv_head) + pages.first, pages.count());
    add_blocks(scratch_.scores, pages.count(), {chosen, 0.0f}, kPageSize, scratch_.order, behind);
    add_always({p_.sink_tokens, p_.local_tokens}, row, list);
    list.add((own_page - 1) * kPageSize, slot + 1);
  }

 private:
  void score(const VisitBlock& row, int64_t kv_head, const ops::PageCandidates& pages) const {
    const int32_t* ids = p_.batch.kv_indices + p_.batch.kv_indptr[row.sequence] + pages.first;
    for (int64_t i = 0; i < pages.count(); ++i) {
      scratch_.bounds[i] = bounds_of(ids[i], kv_head, scratch_.own + i * 2 * p_.kv.head_dim);
    }
    PageScoreTile tile = {};
    tile.q = p_.q + row.first_row * p_.q_stride + kv_head * p_.group() * p_.kv.head_dim;
    tile.group = p_.group();
    tile.head_dim = p_.kv.head_dim;
    tile.num_pages = static_cast<int32_t>(pages.count());
    tile.sm_scale = p_.sm_scale;
    tile.bounds = scratch_.bounds;
    tile.scores = scratch_.scores;
    tile.scratch = scratch_.tile;
    level_.score(tile);
  }

  // `own` is memory for them.
  const uint16_t* bounds_of(int64_t page, int64_t head, uint16_t* own) const {
    const ops::PageBounds& bounds = p_.kv.bounds;
    if (bounds.values == nullptr) return make_bounds(page, head, own);
    uint16_t* kept = bounds.of(page, head, p_.kv.num_kv_heads, p_.kv.head_dim);
    std::atomic_ref<int32_t> known(bounds.known[page * bounds.known_stride + head]);
    if (known.load(std::memory_order_acquire) == kKnown) return kept;
    int32_t expected = kUnknown;
    const bool writes =
        known.compare_exchange_strong(expected, kBeingWritten, std::memory_order_acquire);
    if (!writes) return expected == kKnown ? kept : make_bounds(page, head, own);
    make_bounds(page, head, kept);
    known.store(kKnown, std::memory_order_release);
    return kept;
  }

  const uint16_t* make_bounds(int64_t page, int64_t head, uint16_t* to) const {
    PageKeys keys = {};
    keys.dtype = p_.kv.dtype;
    keys.head_dim = p_.kv.head_dim;
    keys.k = p_.kv.k_head(page, head);
    if (p_.kv.k_scale != nullptr) {
      keys.k_scale = p_.kv.k_scale + (page * p_.kv.num_kv_heads + head) * kPageSize;
    }
    level_.bound(keys, to);
    return to;
  }

  const PageIndexKernels& level_;
  const PageIndexProblem& p_;
  const PageScratch scratch_;
};

template <Level kLevel>
void run_pages(const PageIndexProblem& p, Team& team) {
  const PageMember member(kernels<kLevel, PageIndexKernels>(), p, team.scratch());
  const int64_t heads = p.kv.num_kv_heads;
  team.for_chunks(p.visits.num_rows * heads,
                  [&](int64_t i) { member.run_item(i / heads, i % heads); });
}

const char* rejects(const PageIndexProblem& p) {
  const DType dtype = p.kv.dtype;
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::i8) {
    return "kv_dtype is not f32, f16, bf16 or i8";
  }
  if (p.kv.head_dim <= 0 || p.kv.head_dim % 16 != 0) return "head_dim is not a multiple of 16";
  return nullptr;
}

}  // namespace

void register_page_index() {
  auto& table = ops::mutable_table<PageIndexProblem>();
  for_levels<Level::portable, Level::avx2, Level::avx512>([&]<Level kLevel>() {
    table.add({"page_index." + std::string(name(kLevel)), isa_of(kLevel), rejects,
               run_pages<kLevel>, PageScratch::bytes});
  });
}

}  // namespace effinfer::cpu
