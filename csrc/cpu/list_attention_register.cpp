// The list attention driver: a team shares the plan's items. Who finishes a tile's last item merges
// its partial results, so no barrier is needed in between.
#include <algorithm>
#include <atomic>

#include "cpu/list_attention.h"
#include "cpu/register.h"
#include "ops/registry.h"

namespace effinfer::cpu {
namespace {

using ops::ListAttentionProblem;

int64_t dim_qk(const ListAttentionProblem& p) {
  return round_up_16(p.k.dims + p.k_rope.dims);
}
int64_t dim_vo(const ListAttentionProblem& p) {
  return round_up_16(p.v.dims);
}

ops::QueryRows at(ops::QueryRows q, const ops::ListTile& tile) {
  if (q.dims == 0) return q;
  const int64_t element = tile.first_row * q.row_stride + tile.first_head * q.head_stride;
  q.data += element * dtype_info(q.dtype).block_bytes;
  return q;
}

ops::KvRows at(ops::KvRows rows, int64_t head) {
  if (rows.dims == 0) return rows;
  rows.data += head * rows.head_stride;
  if (rows.scales != nullptr) rows.scales += head * rows.scale_head_stride;
  return rows;
}

ListAttentionTile make_tile(const ListAttentionProblem& p, const ops::ListTile& of,
                            uint8_t* scratch) {
  ListAttentionTile tile = {};
  tile.q = at(p.q, of);
  tile.q_rope = at(p.q_rope, of);
  tile.k = at(p.k, of.kv_head);
  tile.k_rope = at(p.k_rope, of.kv_head);
  tile.v = at(p.v, of.kv_head);
  const int32_t first_kv = p.kv_indptr[of.sequence];
  if (p.pages != nullptr) tile.pages = p.pages + first_kv;
  tile.page_size = p.page_size;
  tile.first_token = p.pages != nullptr ? 0 : first_kv;
  tile.num_rows = of.num_rows;
  tile.num_heads = of.num_heads;
  tile.spans = p.plan->spans.data() + of.first_span;
  tile.num_spans = of.num_spans;
  tile.num_tokens = of.num_tokens;
  tile.phase = of.phase;
  const int32_t behind = p.qo_indptr[of.sequence + 1] - of.first_row;
  tile.position = p.kv_len[of.sequence] - behind;
  tile.causal = p.causal;
  tile.window_left = p.window_left;
  tile.mask = p.mask;
  tile.mask_bytes = p.mask_bytes;
  if (p.mask != nullptr) tile.mask_row_stride = p.mask_row_strides[of.sequence];
  tile.list_row = of.list_row;
  tile.sm_scale = p.sm_scale;
  tile.soft_cap = p.logits_soft_cap;
  tile.v_scale = p.v_scale;
  if (p.alibi_slopes != nullptr) tile.alibi_slopes = p.alibi_slopes + of.first_head;
  if (p.sinks != nullptr) tile.sinks = p.sinks + of.first_head;
  tile.out_dtype = p.q.dtype;
  tile.out_row_stride = static_cast<int64_t>(p.num_qo_heads) * p.v.dims;
  const int64_t first_out =
      of.first_row * tile.out_row_stride + static_cast<int64_t>(of.first_head) * p.v.dims;
  tile.out = p.out + first_out * dtype_info(p.q.dtype).block_bytes;
  tile.lse_row_stride = p.num_qo_heads;
  if (p.lse != nullptr) {
    tile.lse = p.lse + static_cast<int64_t>(of.first_row) * p.num_qo_heads + of.first_head;
  }
  tile.lse_factor = p.lse_factor;
  tile.scratch = scratch;
  return tile;
}

// The items that a member of the team claims.
class Items {
 public:
  Items(const ListAttentionKernels& level, const ListAttentionProblem& p, Team& team)
      : level_(level),
        p_(p),
        team_(team),
        count_(static_cast<int64_t>(p.plan->items.size())),
        scratch_(static_cast<uint8_t*>(team.scratch())) {}

  void run() {
    for (claim(); next_ < count_;) {
      const ops::ListItem& item = p_.plan->items[static_cast<size_t>(next_)];
      ListAttentionTile tile = next_tile_;
      tile.context = this;
      tile.following = [](void* items) { return static_cast<Items*>(items)->claim(); };
      const int64_t claimed = next_;
      level_.tile(tile);
      if (item.merge >= 0) merge(item, tile);
      if (next_ == claimed) claim();  // the tile has no unit
    }
  }

 private:
  // Claims when the item at hand is nearly done, so that no member waits beside claimed items.
  const ListAttentionTile* claim() {
    next_ = team_.claim();
    if (next_ >= count_) return nullptr;
    const ops::ListItem& item = p_.plan->items[static_cast<size_t>(next_)];
    next_tile_ = make_tile(p_, p_.plan->tiles[static_cast<size_t>(item.tile)], scratch_);
    next_tile_.first_unit = item.first_unit;
    next_tile_.end_unit = item.end_unit;
    if (item.partial >= 0) {
      next_tile_.partial_out = p_.partial_out + item.partial * dim_vo(p_);
      next_tile_.partial_ms = p_.partial_ms + static_cast<int64_t>(item.partial) * 2;
    }
    return &next_tile_;
  }

  // Whoever comes last merges, in the order of the list: the result does not depend on who that is.
  void merge(const ops::ListItem& item, const ListAttentionTile& tile) const {
    const ops::ListMerge& merge = p_.plan->merges[static_cast<size_t>(item.merge)];
    std::atomic_ref<int32_t> done(p_.done[item.merge]);
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < merge.num_items) return;
    level_.merge(
        tile, {p_.partial_out + merge.first_partial * dim_vo(p_),
               p_.partial_ms + static_cast<int64_t>(merge.first_partial) * 2, merge.num_partials});
  }

  const ListAttentionKernels& level_;
  const ListAttentionProblem& p_;
  Team& team_;
  const int64_t count_;
  uint8_t* const scratch_;
  int64_t next_ = 0;
  ListAttentionTile next_tile_ = {};
};

template <const ListAttentionKernels* kLevel>
void run(const ListAttentionProblem& p, Team& team) {
  Items(*kLevel, p, team).run();
}

const char* rejects(const ListAttentionProblem&) {
  return nullptr;
}

#if EFFINFER_X86
// Queries that are bfloat16 anyway lose nothing; probabilities are rounded to it.
const char* rejects_bf16(const ListAttentionProblem& p) {
  if (p.q.dtype != DType::bf16) return "needs bf16 queries";
  if (p.k.dtype == DType::f32 || p.k.dtype == DType::f16) return "needs bf16 or 8-bit keys";
  if (!cpu_features().avx512_bf16) return "needs AVX512-BF16";
  return nullptr;
}
#endif

size_t scratch_bytes(const ListAttentionProblem& p) {
  int64_t rows = 0;
  for (const ops::ListTile& tile : p.plan->tiles) {
    rows = std::max(rows, int64_t{tile.num_rows} * tile.num_heads);
  }
  return static_cast<size_t>(list_attention_scratch(rows, dim_qk(p), dim_vo(p)));
}

}  // namespace

void register_list_attention() {
  auto& table = ops::mutable_table<ListAttentionProblem>();
  table.add({"list_attention.portable", Isa::portable, rejects, run<&portable::kListAttention>,
             scratch_bytes});
#if EFFINFER_X86
  table.add({"list_attention.avx2", Isa::avx2, rejects, run<&avx2::kListAttention>, scratch_bytes});
  table.add(
      {"list_attention.avx512", Isa::avx512, rejects, run<&avx512::kListAttention>, scratch_bytes});
  table.add({"list_attention.avx512.bf16", Isa::avx512, rejects_bf16,
             run<&avx512bf16::kListAttention>, scratch_bytes});
#endif
}

}  // namespace effinfer::cpu
