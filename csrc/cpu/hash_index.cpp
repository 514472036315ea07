// The driver of hash_index: an item is the list of one generated row and KV head, with its weights.
#include "ops/hash_index.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu/hash_index.h"
#include "cpu/level.h"
#include "cpu/page_index.h"
#include "cpu/page_summaries.h"
#include "cpu/register.h"
#include "cpu/token_set.h"
#include "ops/registry.h"

namespace effinfer::cpu {
namespace {

using ops::HashIndexProblem;
using ops::IndexedHead;
using ops::kPageSize;
using ops::VisitBlock;

class HashMember {
 public:
  HashMember(const HashIndexKernels& level, const HashIndexProblem& p, void* scratch)
      : level_(level),
        p_(p),
        queries_(static_cast<uint64_t*>(scratch)),
        own_(queries_ + p.tables.planes()),
        keys_(reinterpret_cast<float*>(own_ + p.tables.planes())),
        products_(keys_ + hash_scratch_floats(p.kv.head_dim)),
        squares_(products_ + int64_t{p.tables.group} * 16),
        sizes_(squares_ + 16) {}

  static size_t scratch_bytes(const HashIndexProblem& p) {
    const int64_t floats = hash_scratch_floats(p.kv.head_dim) + int64_t{p.tables.group} * 17 + 16;
    return static_cast<size_t>(2 * p.tables.planes()) * sizeof(uint64_t) +
           static_cast<size_t>(floats) * sizeof(float);
  }

  void run_item(int64_t index, int64_t kv_head) const {
    if (p_.heads[kv_head] == IndexedHead::other) return;
    const int64_t block = p_.visits.num_blocks + index;
    const VisitBlock& row = p_.visits.blocks[block];
    // A tree's tokens lie behind each other, whatever their positions are.
    const int64_t slot =
        p_.batch.step_begin(row.sequence) + row.first_row - p_.batch.qo_indptr[row.sequence];
    const TokenSet list(p_.visits.list(block, kv_head), slot / kPageSize + 1);
    uint8_t& weighted = p_.visits.weighted[block * p_.visits.num_kv_heads + kv_head];
    weighted = p_.heads[kv_head] == IndexedHead::chosen && !visits_all(p_, row) ? 1 : 0;
    if (weighted == 0) return list.add_all();
    list.clear();
    draw(row, kv_head, p_.visits.list(block, kv_head), p_.visits.list_weights(block, kv_head));
    const auto add_once = [&](int64_t begin, int64_t end) {
      begin = std::max<int64_t>(begin, 0);
      if (begin >= end) return;
      list.add(begin, end);
      std::fill(p_.visits.list_weights(block, kv_head) + begin,
                p_.visits.list_weights(block, kv_head) + end, 0.0f);
    };
    add_once(0, p_.sink_tokens);
    add_once(row.position + 1 - p_.local_tokens, row.position + 1);
    add_once((row.position / kPageSize - 1) * kPageSize, slot + 1);
  }

 private:
  void draw(const VisitBlock& row, int64_t kv_head, uint64_t* words, float* weights) const {
    const int64_t dim = p_.kv.head_dim;
    const float* q = p_.q + row.first_row * p_.q_stride + kv_head * p_.tables.group * dim;
    level_.hash_queries(q, dim, p_.planes, p_.tables, queries_);
    for (int32_t head = 0; head < p_.tables.group; ++head) {
      double sum = 0.0;
      for (int64_t d = 0; d < dim; ++d) sum += double{q[head * dim + d]} * q[head * dim + d];
      sizes_[head] = static_cast<float>(std::sqrt(sum));
    }
    const int32_t* ids = p_.batch.kv_indices + p_.batch.kv_indptr[row.sequence];
    const ops::PageCandidates pages = candidates_of(p_, row);
    for (int64_t i = pages.first; i < pages.end; ++i) {
      words[i] = level_.collide(codes_of(ids[i], kv_head), queries_, p_.tables);
      if (words[i] != 0) weigh(q, ids[i], kv_head, words[i], weights + i * kPageSize);
    }
  }

  const uint64_t* codes_of(int64_t page, int64_t head) const {
    const auto make = [&](uint16_t* to) {
      const HashedPage keys = {{p_.kv.dtype, p_.kv.head_dim},
                               keys_of(p_.kv, page, head),
                               mean_of(head),
                               p_.planes,
                               p_.tables.planes()};
      level_.hash(keys, keys_, reinterpret_cast<uint64_t*>(to));
    };
    return reinterpret_cast<const uint64_t*>(
        page_summary(p_.kv, page, head, reinterpret_cast<uint16_t*>(own_), make));
  }
  const float* mean_of(int64_t head) const { return p_.means + head * p_.kv.head_dim; }

  // The logarithms of how often the drawn tokens of a page count.
  void weigh(const float* q, int64_t page, int64_t head, uint64_t drawn, float* weights) const {
    KeyAngles angles = {{p_.kv.dtype, p_.kv.head_dim},
                        keys_of(p_.kv, page, head),
                        0,
                        mean_of(head),
                        q,
                        p_.tables.group,
                        products_,
                        squares_};
    for (; angles.first < kPageSize; angles.first += 16) {
      uint64_t bits = drawn >> angles.first & 0xffff;
      if (bits == 0) continue;
      level_.measure(angles);
      for (; bits != 0; bits &= bits - 1) {
        const int lane = std::countr_zero(bits);
        weights[angles.first + lane] = -std::log(chance_of(lane));
      }
    }
  }

  // That a key is drawn by some head.
  float chance_of(int64_t lane) const {
    const float size = std::sqrt(squares_[lane]);
    float chance = 0.0f;
    for (int32_t head = 0; head < p_.tables.group; ++head) {
      const float cosine = products_[head * 16 + lane] / (sizes_[head] * size);
      chance += ops::hash_chance(p_.chances, cosine) * (1.0f - chance);
    }
    return chance;
  }

  const HashIndexKernels& level_;
  const HashIndexProblem& p_;
  uint64_t* const queries_;  // codes
  uint64_t* const own_;      // of a page whose codes are not in the cache
  float* const keys_;
  float* const products_;
  float* const squares_;
  float* const sizes_;  // of the queries
};

template <Level kLevel>
void run_rows(const HashIndexProblem& p, Team& team) {
  const HashMember member(kernels<kLevel, HashIndexKernels>(), p, team.scratch());
  const int64_t heads = p.kv.num_kv_heads;
  team.for_chunks(p.visits.num_rows * heads,
                  [&](int64_t i) { member.run_item(i / heads, i % heads); });
}

const char* rejects(const HashIndexProblem& p) {
  return rejects_keys(p.kv);
}

}  // namespace

void register_hash_index() {
  auto& table = ops::mutable_table<HashIndexProblem>();
  for_levels<Level::portable, Level::avx2, Level::avx512>([&]<Level kLevel>() {
    table.add({"hash_index." + std::string(name(kLevel)), isa_of(kLevel), rejects, run_rows<kLevel>,
               HashMember::scratch_bytes});
  });
}

}  // namespace effinfer::cpu
