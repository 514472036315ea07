// Lists of a fixed pattern: an item is the list of one block or generated row and KV head.
#include "ops/strided_index.h"

#include "cpu/choose_tokens.h"
#include "cpu/level.h"

namespace effinfer::cpu {
namespace {

using ops::IndexedHead;
using ops::kPageSize;
using ops::StridedIndexProblem;
using ops::VisitBlock;

// The slot of a block's last row. A tree's tokens lie behind each other, whatever their positions
// are.
int64_t last_slot(const StridedIndexProblem& p, const VisitBlock& block) {
  const int32_t first = p.batch.qo_indptr[block.sequence];
  return p.batch.step_begin(block.sequence) + block.first_row - first + block.num_rows - 1;
}

void write_list(const StridedIndexProblem& p, int64_t index, int64_t kv_head) {
  if (p.heads[kv_head] == IndexedHead::other) return;
  const VisitBlock& block = p.visits.blocks[index];
  const int64_t end = last_slot(p, block) + 1;
  const TokenSet list(p.visits.list(index, kv_head), TokenSet::words_of(end));
  const bool sees_all = block.position + block.num_rows < p.min_tokens;
  if (p.heads[kv_head] == IndexedHead::dense || sees_all) return list.add_all();
  list.clear();
  list.add(0, p.sink_tokens);
  for (int64_t page = (kv_head + p.shift) % p.stride; page * kPageSize < end; page += p.stride) {
    list.add(page * kPageSize, (page + 1) * kPageSize);
  }
  list.add((block.position / kPageSize - local_pages(p)) * kPageSize, end);
}

}  // namespace

template <>
void run<Level::portable>(const StridedIndexProblem& p, Team& team) {
  const int64_t heads = p.visits.num_kv_heads;
  team.for_chunks((p.visits.num_blocks + p.visits.num_rows) * heads,
                  [&](int64_t i) { write_list(p, i / heads, i % heads); });
}

}  // namespace effinfer::cpu
