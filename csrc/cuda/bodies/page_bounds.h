// What the keys of pages are bounded by, or their means (ops::PageBounds): of those that generated
// rows choose from and that nobody knows yet, before unit_scores.h reads them. A warp looks at
// eight pages, and makes the bounds of those that it is the first one to ask for: pages of a prefix
// or of drafts are several rows'.
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
#include "cuda/bodies/key_products.h"
#include "cuda/unit.h"
#include "ops/page_index.h"
#include "ops/row_scores.h"

namespace effinfer::cuda {

struct PageIndexParams {
  ops::PageIndexProblem problem;
  int64_t head_bytes;  // of a KV head's page
  int32_t parts;       // of a list's pages or units: blocks
  int64_t first_row;   // of those that have lists, and how many
  int64_t num_rows;

  // Of the block that has part `unit.block % parts` of a list.
  EFFINFER_DEVICE int32_t kv_head(int block) const {
    return block / parts % problem.kv.num_kv_heads;
  }
  EFFINFER_DEVICE int64_t row(int block) const {
    return block / parts / problem.kv.num_kv_heads + first_row;
  }
  // Of a row's KV head: a row of so many floats for each of its query heads, and one for all.
  EFFINFER_DEVICE int64_t score_stride() const {
    return ops::row_score_stride(problem.visits.list_words,
                                 ops::kPageSize / problem.summary_unit());
  }
  EFFINFER_DEVICE float* scores(int64_t row, int32_t kv_head) const {
    const int64_t list = (row - first_row) * problem.kv.num_kv_heads + kv_head;
    return problem.visits.row_scores + list * (problem.group() + 1) * score_stride();
  }
};

// Whether a row's KV head chooses.
EFFINFER_DEVICE bool chooses_units(const ops::PageIndexProblem& p, const ops::VisitBlock& row,
                                   int32_t kv_head) {
  return row.sequence >= 0 && p.heads[kv_head] == ops::IndexedHead::chosen &&
         !ops::visits_all(p, row);
}

// Of the units that a row's KV head chooses from, the kUnits that a block scores, or those that are
// left; none where it does not choose.
template <int kUnits>
struct OwnUnits {
  EFFINFER_DEVICE OwnUnits(const PageIndexParams& params, int block, int of_page)
      : kv_head(params.kv_head(block)), index(params.row(block)) {
    const ops::PageIndexProblem& p = params.problem;
    row = p.visits.blocks[p.visits.num_blocks + index];
    if (!chooses_units(p, row, kv_head)) return;
    const ops::PageCandidates pages = ops::candidates_of(p, row);
    ids = p.batch.kv_indices + p.batch.kv_indptr[row.sequence] + pages.first;
    count = static_cast<int>(pages.count()) * of_page;
    first = block % params.parts * kUnits;
    end = first + kUnits < count ? first + kUnits : count;
  }
  EFFINFER_DEVICE bool none() const { return first >= end; }

  const int32_t kv_head;
  const int64_t index;  // of the row
  ops::VisitBlock row;
  const int32_t* ids = nullptr;  // of pages, from the first candidate on
  int count = 0;                 // of the row's
  int first = 0;
  int end = 0;
};

struct PageBoundsKernel {
  static constexpr const char* kName = "page_bounds";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 3;
  static constexpr int kPages = 8;  // of a warp
  static constexpr int kBlockPages = kThreads / kWarp * kPages;
  static constexpr int P = AnyKeyLine::kMost;  // dims of a line, at most
  static constexpr int kGroups = 4;            // of 16 tokens
  using Params = PageIndexParams;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& params, Shared&) {
    const ops::PageIndexProblem& p = params.problem;
    const int32_t kv_head = params.kv_head(unit.block);
    const ops::VisitBlock row = p.visits.blocks[p.visits.num_blocks + params.row(unit.block)];
    if (!chooses_units(p, row, kv_head)) return;
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
    const AnyKeyLine line_of(kv);
    const int lines = line_of.lines();
    const auto* scales = reinterpret_cast<const Quad*>(kv.k_scale + place * ops::kPageSize);
    const bool means = params.problem.means;
    const int of_unit = static_cast<int>(params.problem.summary_unit() / 16);
    const int64_t numbers = params.problem.summary_vectors() * kv.head_dim;
    EFFINFER_NO_UNROLL
    for (int i = 0; i < (lines + kWarp / 4 - 1) / (kWarp / 4) * (kGroups / of_unit); ++i) {
      const int line = i / (kGroups / of_unit) * (kWarp / 4) + unit.lane / 4;
      const int own = i % (kGroups / of_unit);
      const bool inside = line < lines;
      Quad quads[kGroups] = {};
      EFFINFER_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        if (!inside || g >= of_unit) continue;
        quads[g] = unit.load(keys + 4 * ((own * of_unit + g) * lines + line) + unit.lane % 4);
      }
      Extremes extremes = Extremes::none(means);
      EFFINFER_NO_UNROLL
      for (int g = 0; g < of_unit; ++g) {
        Quad scale = {bits_of(1.0f), bits_of(1.0f), bits_of(1.0f), bits_of(1.0f)};
        if (kv.dtype == DType::i8) {
          scale = unit.load(scales + 4 * (own * of_unit + g) + unit.lane % 4);
        }
        widen(unit, line_of, quads[0], scale, means, extremes);
        // Registers have no index.
        EFFINFER_UNROLL
        for (int next = 1; next < kGroups; ++next) quads[next - 1] = quads[next];
      }
      join(unit, means, extremes);
      if (unit.lane % 4 != 0 || !inside) continue;
      write(means, extremes, line_of, out + own * numbers + line * line_of.of_line);
    }
  }

  // The least and the greatest of each dimension of a line; of means the sum in place of the least.
  struct Extremes {
    float least[P];
    float most[P];

    EFFINFER_DEVICE static Extremes none(bool means) {
      Extremes e;
      EFFINFER_UNROLL
      for (int j = 0; j < P; ++j) {
        e.least[j] = means ? 0.0f : INFINITY;
        e.most[j] = -INFINITY;
      }
      return e;
    }
  };

  // Over the lanes of a line.
  template <class Unit>
  EFFINFER_DEVICE static void join(Unit& unit, bool means, Extremes& e) {
    EFFINFER_UNROLL
    for (int j = 0; j < P; ++j) {
      EFFINFER_UNROLL
      for (int mask = 1; mask < 4; mask *= 2) {
        const float other = unit.shfl_xor(e.least[j], mask);
        e.least[j] = means ? e.least[j] + other : fminf(e.least[j], other);
        e.most[j] = fmaxf(e.most[j], unit.shfl_xor(e.most[j], mask));
      }
    }
  }
  EFFINFER_DEVICE static void write(bool means, const Extremes& e, const AnyKeyLine& line_of,
                                    uint16_t* to) {
    EFFINFER_UNROLL
    for (int j = 0; j < P; ++j) {
      if (j >= line_of.of_line) continue;
      if (means) {
        to[j] = f32_to_bf16(e.least[j] * (1.0f / 16.0f));
        continue;
      }
      to[j] = bf16_rounded(e.least[j], false);
      to[line_of.dims + j] = bf16_rounded(e.most[j], true);
    }
  }

  // By four tokens.
  template <class Unit>
  EFFINFER_DEVICE static void widen(Unit& unit, const AnyKeyLine& line_of, Quad keys, Quad scales,
                                    bool means, Extremes& e) {
    EFFINFER_NO_UNROLL
    for (int t = 0; t < 4; ++t) {
      float k[P];
      line_of.widen(unit, keys.words[0], k);
      EFFINFER_UNROLL
      for (int j = 0; j < P; ++j) {
        const float x = unit.mul(k[j], float_of(scales.words[0]));
        e.least[j] = means ? e.least[j] + x : fminf(e.least[j], x);
        e.most[j] = fmaxf(e.most[j], x);
      }
      EFFINFER_UNROLL
      for (int next = 1; next < 4; ++next) {
        keys.words[next - 1] = keys.words[next];
        scales.words[next - 1] = scales.words[next];
      }
    }
  }
};

}  // namespace effinfer::cuda
