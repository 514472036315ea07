// Scores of cells of keys and rows (block_index.h): products on the tensor cores, their softmax,
// its sums by page.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/index_keys.h"
#include "cuda/bodies/row_block.h"
#include "cuda/bodies/softmax.h"
#include "cuda/unit.h"
#include "ops/prefill_index.h"

namespace effinfer::cuda {

// e^(x - reference), for x up to the reference.
EFFINFER_DEVICE float weight_of(float x, float reference) {
  return exp2f(rounded_product(x - reference, 1.44269504f));
}

struct BlockIndexParams {
  ops::BlockIndexProblem problem;
  int64_t head_bytes;  // of a KV head's page
};

// How a problem's cells lie.
struct CellShape {
  int stride;     // keys of a cell
  int places;     // of different rows
  int head_rows;  // rows of cells of a head, and cells of a page
  int rows;       // of all heads of a KV head

  EFFINFER_DEVICE static CellShape of(const ops::BlockIndexProblem& p) {
    const int group = p.in.num_qo_heads / p.in.kv.num_kv_heads;
    if (p.stride == 0) return {64, 1, 1, group};
    return {p.stride, p.stride, 64 / p.stride, group * (64 / p.stride)};
  }
};

// `Shared` has queries as A operands, maxima and sums of the warps' rows, scores by page.
template <DType kType, class Unit, class Shared>
class CellScores {
 public:
  using Keys = IndexKeys<kType>;
  // Of a warp: rows lane / 4 and + 8, cells 8 g + 2 (lane % 4) and + 1.
  using Cells = float[2][4];

  EFFINFER_DEVICE CellScores(Unit& unit, const BlockIndexParams& params, Shared& shared,
                             int64_t index, int64_t kv_head)
      : unit_(unit),
        p_(params.problem),
        shared_(shared),
        rows_(p_.in.visits.blocks[index]),
        shape_(CellShape::of(p_)),
        keys_(Keys::of(p_.in, params.head_bytes, rows_.sequence, kv_head)) {
    const int end = rows_.position + rows_.num_rows;
    ops::PageCandidates pages = {0, (end - 1) / 64 + 1};
    if (p_.has_budget()) pages = ops::candidates_of(p_, rows_);
    first_page_ = static_cast<int>(pages.first);
    pages_ = static_cast<int>(pages.count());
    position_ = rows_.position - 64 * first_page_;
    end_ = end - 64 * first_page_ < 64 * pages_ ? end - 64 * first_page_ : 64 * pages_;
    keys_.pages += first_page_;
  }

 protected:
  EFFINFER_DEVICE void multiply(int cell, Cells& cells) {
    const int steps = keys_.dims / 16;
    EFFINFER_UNROLL
    for (int g = 0; g < 2; ++g) {
      const int token = (cell + 8 * g + unit_.lane / 4) * shape_.stride;
      const uint8_t* page = keys_.keys;
      if (token < end_) page += unit_.load(keys_.pages + token / 64) * keys_.page_bytes;
      for (int j = 0; j < shape_.stride; j += 4) {
        float sums[Keys::kScaled ? 4 : 1][4] = {};
        for (int step = 0; step < steps; ++step) {
          Quad quads[Keys::kLoads] = {};
          // Tokens behind the block's rows count as zeros.
          const int left = end_ - token - j;
          if (left > 0) keys_.load(unit_, page, (token + j) % 64, step, quads);
          EFFINFER_UNROLL
          for (int t = 0; t < 4; ++t) {
            uint32_t b[2] = {};
            if (t < left) Keys::operand(unit_, quads, t, b);
            const int place = shape_.places > 1 ? j + t : 0;
            const Quad a = shared_.queries[place * steps + step][unit_.lane];
            Keys::multiply(unit_, Keys::kScaled ? sums[t % 4] : cells[g], a, b);
          }
        }
        if constexpr (Keys::kScaled) add_scaled(sums, cell + 8 * g, j, cells[g]);
      }
    }
  }

  EFFINFER_DEVICE void add_scaled(const float (&sums)[4][4], int cell, int j, float (&to)[4]) {
    EFFINFER_UNROLL
    for (int e = 0; e < 2; ++e) {
      const int token = (cell + 2 * (unit_.lane % 4) + e) * shape_.stride + j;
      if (token >= end_) continue;
      const int64_t page = unit_.load(keys_.pages + token / 64);
      const float* scales = keys_.scales + page * keys_.page_scales + token % 64;
      for (int t = 0; t < 4 && token + t < end_; ++t) {
        const float scale = unit_.load(scales + t);
        to[e] += unit_.mul(sums[t][e], scale);
        to[2 + e] += unit_.mul(sums[t][2 + e], scale);
      }
    }
  }

  // Cells that row lane / 4 + 8 r has: those that begin up to its last token.
  EFFINFER_DEVICE int seen_cells(int r) const {
    const int row = first_ + unit_.lane / 4 + 8 * r;
    if (row >= shape_.rows) return 0;
    if (p_.stride == 0) return pages_;
    const int past = (row % shape_.head_rows + 1) * shape_.stride;
    const int seen = position_ + (past < rows_.num_rows ? past : rows_.num_rows);
    return ((seen < end_ ? seen : end_) + shape_.stride - 1) / shape_.stride;
  }
  // A cell's score: of means the mean over the page's keys.
  EFFINFER_DEVICE float score(float cell_sum, int cell) const {
    if (p_.stride != 0) return cell_sum;
    const int left = end_ - cell * 64;
    return cell_sum / static_cast<float>(left < 64 ? left : 64);
  }
  EFFINFER_DEVICE int cell_of(int cell, int g, int e) const {
    return cell + 8 * g + 2 * (unit_.lane % 4) + e;
  }

  EFFINFER_DEVICE void add_cells(const Cells& cells, int cell, float (&max)[2],
                                 float (&sum)[2]) const {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int seen = seen_cells(r);
      float x[4];
      float highest = max[r];
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int at = cell_of(cell, i / 2, i % 2);
        x[i] = at < seen ? score(cells[i / 2][2 * r + i % 2], at) : kNoScore;
        highest = fmaxf(highest, x[i]);
      }
      sum[r] *= weight_of(max[r], highest);
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (cell_of(cell, i / 2, i % 2) < seen) sum[r] += weight_of(x[i], highest);
      }
      max[r] = highest;
    }
  }

  // Of all lanes and warps: the maximum, and the sum as a factor.
  EFFINFER_DEVICE void join_sums(float (&max)[2], float (&sum)[2]) {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      EFFINFER_UNROLL
      for (int mask = 1; mask <= 2; mask *= 2) {
        const float other = unit_.shfl_xor(max[r], mask);
        const float highest = fmaxf(max[r], other);
        const float mine = unit_.mul(sum[r], weight_of(max[r], highest));
        sum[r] = mine + unit_.shfl_xor(mine, mask);
        max[r] = highest;
      }
      const int row = unit_.lane / 4 + 8 * r;
      if (unit_.lane % 4 == 0) {
        shared_.max[unit_.warp][row] = max[r];
        shared_.sum[unit_.warp][row] = sum[r];
      }
    }
    unit_.sync();
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = unit_.lane / 4 + 8 * r;
      max[r] = kNoScore;
      for (int w = 0; w < kRowWarps; ++w) max[r] = fmaxf(max[r], shared_.max[w][row]);
      float all = 0.0f;
      for (int w = 0; w < kRowWarps; ++w) {
        all += unit_.mul(shared_.sum[w][row], weight_of(shared_.max[w][row], max[r]));
      }
      sum[r] = 1.0f / all;
    }
  }

  // Shares of the softmax, summed by page over the rows of a head.
  EFFINFER_DEVICE void write_scores(Cells& cells, int cell, const float (&max)[2],
                                    const float (&factor)[2]) {
    const int rows = shape_.head_rows;
    EFFINFER_UNROLL
    for (int g = 0; g < 2; ++g) {
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int at = cell_of(cell, g, i % 2);
        const bool seen = at < seen_cells(i / 2);
        const float x = seen ? score(cells[g][i], at) : kNoScore;
        cells[g][i] = seen ? weight_of(x, max[i / 2]) * factor[i / 2] : 0.0f;
      }
      if (rows == 16) {
        cells[g][0] += cells[g][2];
        cells[g][1] += cells[g][3];
      }
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        // Rows of a head lie 1, 2 and 4 lanes of four apart.
        EFFINFER_UNROLL
        for (int apart = 1; apart < 8; apart *= 2) {
          const float other = unit_.shfl_xor(cells[g][i], 4 * apart);
          if (apart < rows) cells[g][i] += other;
        }
      }
    }
    write_pages(cells, cell);
  }

  // A page has as many cells as a head has rows of them.
  EFFINFER_DEVICE void write_pages(Cells& cells, int cell) {
    const int count = shape_.head_rows;
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      float page[2][2];
      EFFINFER_UNROLL
      for (int g = 0; g < 2; ++g) {
        EFFINFER_UNROLL
        for (int e = 0; e < 2; ++e) page[g][e] = cells[g][2 * r + e];
        if (count >= 2) page[g][0] += page[g][1];
        EFFINFER_UNROLL
        for (int apart = 1; apart <= 2; apart *= 2) {
          const float other = unit_.shfl_xor(page[g][0], apart);
          if (2 * apart < count) page[g][0] += other;
        }
      }
      if (count >= 16) page[0][0] += page[1][0];
      const int row = unit_.lane / 4 + 8 * r;
      if (row % count != 0 || first_ + row >= shape_.rows) continue;
      EFFINFER_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int at = cell_of(cell, i / 2, i % 2);
        if (at % count != 0 || at / count >= pages_) continue;
        shared_.scores[row / count * pages_ + at / count] = page[i / 2][i % 2];
      }
    }
  }

  Unit& unit_;
  const ops::BlockIndexProblem& p_;
  Shared& shared_;
  const ops::VisitBlock rows_;
  const CellShape shape_;
  Keys keys_;
  // Of what is chosen from: all pages of the block's keys, or a budget's. Tokens count from its
  // first page on.
  int first_page_;
  int pages_;
  int position_;   // of the block's first row
  int end_;        // past its last row, or past the pages
  int first_ = 0;  // of the rows of cells at hand
};

}  // namespace effinfer::cuda
