// What the keys of pages are bounded by (ops::PageBounds): those that generated rows choose from
// and that nobody knows yet, before page_index.h reads them. A warp looks at eight pages, and makes
// the bounds of those that it is the first one to ask for: pages of a prefix or of drafts are
// several rows'.
//
// A line of a page is 16 tokens x P dims, a lane's 16 bytes are four tokens of it:
//
//   lane      0           1           2            3             4 ...
//   tokens    0 ... 3     4 ... 7     8 ... 11     12 ... 15     0 ... 3     of the next P dims
//
// and four loads, one of each 16 tokens, are under way at a time.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/float16.h"
#include "cuda/bodies/fragments.h"
#include "cuda/unit.h"
#include "ops/page_index.h"

namespace effinfer::cuda {

struct PageIndexParams {
  ops::PageIndexProblem problem;
  int64_t head_bytes;  // of a KV head's page
  int32_t parts;       // of a list's pages: blocks of PageBoundsKernel
};

template <DType kType>
struct PageBoundsKernel {
  static constexpr const char* kName = "page_bounds";
  static constexpr int kThreads = 256;
  static constexpr int kPages = 8;  // of a warp
  static constexpr int kBlockPages = kThreads / kWarp * kPages;
  static constexpr int P = kType == DType::f32 ? 1 : kType == DType::i8 ? 4 : 2;
  static constexpr int kGroups = 4;  // of 16 tokens
  using Params = PageIndexParams;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared&) {
    const ops::PageIndexProblem& p = params.problem;
    const int32_t list = unit.block / params.parts;
    const int32_t kv_head = list % p.kv.num_kv_heads;
    const ops::VisitBlock row = p.visits.blocks[p.visits.num_blocks + list / p.kv.num_kv_heads];
    if (row.sequence < 0 || p.heads[kv_head] != ops::IndexedHead::chosen) return;
    if (ops::visits_all(p, row)) return;
    const ops::PageCandidates pages = ops::candidates_of(p, row);
    const int32_t* ids = p.batch.kv_indices + p.batch.kv_indptr[row.sequence];
    const int64_t first =
        pages.first + unit.block % params.parts * kBlockPages + unit.warp * kPages;
    const int64_t own = first + unit.lane;
    int32_t page = 0;
    bool is_first = false;
    if (unit.lane < kPages && own < pages.end) {
      page = unit.load(ids + own);
      // It counts who asked. Should the count come round to 0, the same bounds are made again.
      is_first =
          unit.atomic_add(p.kv.bounds.known + page * p.kv.bounds.known_stride + kv_head, 1) == 0;
    }
    const uint32_t unknown = unit.ballot(is_first);
    for (int i = 0; i < kPages; ++i) {
      if ((unknown >> i & 1) != 0) make(unit, params, unit.shfl(page, i), kv_head);
    }
  }

 private:
  template <class Unit>
  EFFINFER_DEVICE static void make(Unit& unit, const Params& params, int64_t page,
                                   int64_t kv_head) {
    const ops::KvLayer& kv = params.problem.kv;
    const int64_t place = page * kv.num_kv_heads + kv_head;
    const auto* keys = reinterpret_cast<const Quad*>(kv.k + place * params.head_bytes);
    uint16_t* const out = kv.bounds.of(page, kv_head, kv.num_kv_heads, kv.head_dim);
    const int lines = kv.head_dim / P;
    Quad scales[kGroups];
    if constexpr (kType == DType::i8) {
      const auto* all = reinterpret_cast<const Quad*>(kv.k_scale + place * ops::kPageSize);
      EFFINFER_UNROLL
      for (int g = 0; g < kGroups; ++g) scales[g] = unit.load(all + 4 * g + unit.lane % 4);
    }
    for (int first = 0; first < lines; first += kWarp / 4) {
      const int line = first + unit.lane / 4;
      float least[P];
      float most[P];
      EFFINFER_UNROLL
      for (int j = 0; j < P; ++j) {
        least[j] = INFINITY;
        most[j] = -INFINITY;
      }
      if (line < lines) {
        Quad quads[kGroups];
        EFFINFER_UNROLL
        for (int g = 0; g < kGroups; ++g) {
          quads[g] = unit.load(keys + 4 * (g * lines + line) + unit.lane % 4);
        }
        EFFINFER_UNROLL
        for (int g = 0; g < kGroups; ++g) widen(unit, quads[g], scales[g], least, most);
      }
      EFFINFER_UNROLL
      for (int j = 0; j < P; ++j) {
        EFFINFER_UNROLL
        for (int mask = 1; mask < 4; mask *= 2) {
          least[j] = fminf(least[j], unit.shfl_xor(least[j], mask));
          most[j] = fmaxf(most[j], unit.shfl_xor(most[j], mask));
        }
        if (unit.lane % 4 != 0 || line >= lines) continue;
        out[line * P + j] = bf16_rounded(least[j], false);
        out[kv.head_dim + line * P + j] = bf16_rounded(most[j], true);
      }
    }
  }

  // By four tokens.
  template <class Unit>
  EFFINFER_DEVICE static void widen(Unit& unit, const Quad& keys, const Quad& scales,
                                    float (&least)[P], float (&most)[P]) {
    EFFINFER_UNROLL
    for (int t = 0; t < 4; ++t) {
      EFFINFER_UNROLL
      for (int j = 0; j < P; ++j) {
        const float x = key(unit, keys.words[t], j, float_of(scales.words[t]));
        least[j] = fminf(least[j], x);
        most[j] = fmaxf(most[j], x);
      }
    }
  }

  template <class Unit>
  EFFINFER_DEVICE static float key(Unit& unit, uint32_t word, int j, [[maybe_unused]] float scale) {
    if constexpr (kType == DType::f32) return float_of(word);
    if constexpr (kType == DType::bf16) return bf16_to_f32(static_cast<uint16_t>(word >> 16 * j));
    if constexpr (kType == DType::f16) return unit.from_f16(static_cast<uint16_t>(word >> 16 * j));
    return unit.mul(static_cast<float>(static_cast<int8_t>(word >> 8 * j)), scale);
  }
};

}  // namespace effinfer::cuda
