// Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) over a caller's pages: keys are up
// to 512 latent numbers and up to 64 rotated ones, the values the latent ones again, so that what
// is fetched once is multiplied twice. A block an item, of up to 32 (row, head) pairs.
//
// Of eight warps each has 16 rows (warp / 4) and a part (warp % 4): a quarter of the numbers of the
// keys, and 128 dims of the values. A stage is 32 tokens:
//
//   copies have come   sync   scores of the warp's quarter, to shared memory; copies of the stage
//   after next   sync   the four quarters' sum, weights, values of the warp's dims
//
// Weights are made by each of the four warps for itself: the sums of quarters lie as the A operand
// of the values, in registers. Stages of a chunk of 256 tokens share a maximum that may grow;
// chunks are folded or stored as in plain_attention.h, so that a row's bits depend on its own keys
// alone.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/latent_result.h"
#include "cuda/bodies/latent_rows.h"
#include "cuda/bodies/plain_products.h"
#include "cuda/unit.h"
#include "ops/attention.h"

namespace effinfer::cuda {

inline constexpr int kLatentParts = 4;

struct LatentShared {
  Quad queries[kLatentRows][kLatentChunks];
  LatentStage stages[kLatentStages];
  float scores[kLatentParts][kLatentRows][kLatentTokens];
  PlainRow rows[kLatentRows];
  int32_t is_last;
};

template <class Unit, DType kType>
class LatentTile {
 public:
  using Result = LatentResult<Unit, kType>;
  using Products = PlainProducts<kType, 64>;
  static constexpr int kBlocks = kLatentTokens / 8;
  using Scores = float[kBlocks][4];

  EFFINFER_DEVICE LatentTile(Unit& unit, const ops::AttentionProblem& p, LatentShared& shared)
      : unit_(unit),
        p_(p),
        shared_(shared),
        item_(p.work.items[unit.block]),
        tile_(p.work.tiles[item_.tile]),
        group_(unit.warp / kLatentParts),
        part_(unit.warp % kLatentParts),
        result_(unit, p, item_, tile_, group_ * 16, part_ * kLatentOwnDims) {}

  EFFINFER_DEVICE void run() {
    if (unit_.thread < kLatentRows) {
      shared_.rows[unit_.thread] = plain_row(p_, tile_, unit_.thread);
    }
    // Stages under way, and the places of the one that is to be fetched next.
    int32_t stage = next_stage(item_.first_unit * kStagesOfUnit);
    int32_t ahead = stage;
    LatentPlace place = LatentRows::find(unit_, p_, tile_, ahead);
    // Queries come with the first stage.
    if (stage >= 0) LatentRows::fetch_queries(unit_, p_, tile_, shared_.queries);
    for (int i = 0; i + 1 < kLatentStages; ++i) fetch(ahead, place, shared_.stages[i]);
    for (int slot = 0; stage >= 0; slot = (slot + 1) % kLatentStages) {
      unit_.template wait<kLatentStages - 2>();
      if (p_.mask != nullptr) {
        LatentRows::set_mask_bits(unit_, p_, tile_, stage, shared_.stages[slot]);
      }
      if (is_narrow(p_.k.dtype)) {
        LatentRows::template widen<kType>(unit_, p_, shared_.stages[slot]);
      }
      unit_.sync();
      add_quarter(shared_.stages[slot]);
      fetch(ahead, place, shared_.stages[(slot + kLatentStages - 1) % kLatentStages]);
      unit_.sync();
      multiply(shared_.stages[slot]);
      const int32_t next = next_stage(stage + 1);
      if (next < 0 || next / kStagesOfChunk != stage / kStagesOfChunk) {
        result_.add(stage / kStagesOfChunk, max_, sum_, values_);
        restart();
      }
      stage = next;
    }
    finish();
  }

 private:
  static constexpr int kStagesOfUnit = ops::kUnitTokens / kLatentTokens;
  static constexpr int kStagesOfChunk = ops::kChunkUnits * kStagesOfUnit;

  // Of the item, from `stage` on; -1: there is none.
  EFFINFER_DEVICE int32_t next_stage(int32_t stage) const {
    for (; stage < item_.end_unit * kStagesOfUnit; ++stage) {
      const int32_t index = stage / kStagesOfUnit;
      if (index < tile_.sink_units || index >= tile_.first_unit) return stage;
    }
    return -1;
  }

  // A group of copies, which behind the last stage is empty; then the next one's places.
  EFFINFER_DEVICE void fetch(int32_t& ahead, LatentPlace& place, LatentStage& to) {
    if (ahead >= 0) {
      LatentRows::fetch(unit_, p_, tile_.kv_head, place, to);
      ahead = next_stage(ahead + 1);
      place = LatentRows::find(unit_, p_, tile_, ahead);
    }
    unit_.commit();
  }

  // Of the lane's two tokens of block n among a row's scores: lanes of four rows are in all banks.
  EFFINFER_DEVICE int pair_place(int row, int n) const {
    return 8 * (n ^ row % 4) + unit_.lane % 4 * 2;
  }

  // Scores of the warp's rows by its quarter of the numbers.
  EFFINFER_DEVICE void add_quarter(const LatentStage& stage) {
    Scores scores = {};
    const int steps = latent_chunks(p_) / 2;
    const int share = (steps + kLatentParts - 1) / kLatentParts;
    const int end = (part_ + 1) * share < steps ? (part_ + 1) * share : steps;
    const int row = group_ * 16 + unit_.lane % 16;
    const int token = unit_.lane / 16 * 8 + unit_.lane % 8;
    for (int step = part_ * share; step < end; ++step) {
      uint32_t a[4];
      unit_.ldmatrix(a, &shared_.queries[row][swizzled(row, 2 * step + unit_.lane / 16)]);
      EFFINFER_UNROLL
      for (int pair = 0; pair < kBlocks / 2; ++pair) {
        const int from = pair * 16 + token;
        uint32_t b[4];
        unit_.ldmatrix(b, &stage.rows[from][swizzled(from, 2 * step + unit_.lane / 8 % 2)]);
        Products::multiply(unit_, scores[2 * pair], a, b[0], b[1]);
        Products::multiply(unit_, scores[2 * pair + 1], a, b[2], b[3]);
      }
    }
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int own_row = group_ * 16 + unit_.lane / 4 + 8 * r;
      EFFINFER_UNROLL
      for (int n = 0; n < kBlocks; ++n) {
        float* pair = shared_.scores[part_][own_row] + pair_place(own_row, n);
        pair[0] = scores[n][2 * r];
        pair[1] = scores[n][2 * r + 1];
      }
    }
  }

  // The stage's weights, and what they add to the warp's dims.
  EFFINFER_DEVICE void multiply(const LatentStage& stage) {
    Scores scores;
    set_logits(stage, scores);
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      float highest = max_[r];
      EFFINFER_UNROLL
      for (int t = 0; t < 2 * kBlocks; ++t) highest = fmaxf(highest, scores[t / 2][2 * r + t % 2]);
      highest = fmaxf(highest, unit_.shfl_xor(highest, 1));
      highest = fmaxf(highest, unit_.shfl_xor(highest, 2));
      const float kept = plain_weight(max_[r], highest);
      max_[r] = highest;
      float own = 0.0f;
      EFFINFER_UNROLL
      for (int t = 0; t < 2 * kBlocks; ++t) {
        float& x = scores[t / 2][2 * r + t % 2];
        x = plain_weight(x, highest);
        own += x;
      }
      own += unit_.shfl_xor(own, 1);
      own += unit_.shfl_xor(own, 2);
      sum_[r] = fmaf(sum_[r], kept, own);
      EFFINFER_UNROLL
      for (int n = 0; n < kLatentOwnDims / 8; ++n) {
        values_[n][2 * r] *= kept;
        values_[n][2 * r + 1] *= kept;
      }
    }
    add_values(stage, scores);
  }

  EFFINFER_DEVICE void set_logits(const LatentStage& stage, Scores& scores) {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int own_row = group_ * 16 + unit_.lane / 4 + 8 * r;
      const PlainRow row = shared_.rows[own_row];
      EFFINFER_UNROLL
      for (int t = 0; t < 2 * kBlocks; ++t) {
        const int at = t / 2 * 8 + unit_.lane % 4 * 2 + t % 2;
        const int place = pair_place(own_row, t / 2) + t % 2;
        float x = shared_.scores[0][own_row][place];
        EFFINFER_UNROLL
        for (int i = 1; i < kLatentParts; ++i) x += shared_.scores[i][own_row][place];
        const int32_t token = stage.token[at];
        x = plain_logit(p_, row, token, x);
        const int64_t bit = p_.mask != nullptr ? row.mask_bit + stage.mask_bit[at] : 0;
        const bool seen = token >= 0 && plain_sees(p_, row, token, bit);
        scores[t / 2][2 * r + t % 2] = seen ? x : -INFINITY;
      }
      unit_.keep_order();
    }
  }

  EFFINFER_DEVICE void add_values(const LatentStage& stage, const Scores& weights) {
    const auto rounded = [&](float low, float high) {
      return kType == DType::f16 ? unit_.f16x2(low, high) : unit_.bf16x2(low, high);
    };
    // Places of chunks differ in their lowest three bits, those of rows 16 apart in none: four
    // addresses are all that the loops need.
    constexpr int kPairs = 4;
    const int row = unit_.lane % 16;
    const Quad* from[kPairs];
    EFFINFER_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      from[i] =
          &stage.rows[row][part_ * (kLatentOwnDims / 8) + swizzled(row, 2 * i + unit_.lane / 16)];
    }
    EFFINFER_UNROLL
    for (int step = 0; step < kBlocks / 2; ++step) {
      const float (&low)[4] = weights[2 * step];
      const float (&high)[4] = weights[2 * step + 1];
      const uint32_t a[4] = {rounded(low[0], low[1]), rounded(low[2], low[3]),
                             rounded(high[0], high[1]), rounded(high[2], high[3])};
      EFFINFER_UNROLL
      for (int pair = 0; pair < kLatentOwnDims / 16; ++pair) {
        if (part_ * kLatentOwnDims + 16 * pair >= p_.v.dims) continue;
        uint32_t b[4];
        const int offset = step * 16 * kLatentChunks + pair / kPairs * 8;
        unit_.ldmatrix_transposed(b, from[pair % kPairs] + offset);
        Products::multiply(unit_, values_[2 * pair], a, b[0], b[1]);
        Products::multiply(unit_, values_[2 * pair + 1], a, b[2], b[3]);
      }
    }
  }

  EFFINFER_DEVICE void restart() {
    EFFINFER_UNROLL
    for (int r = 0; r < 2; ++r) {
      max_[r] = kPlainNoScore;
      sum_[r] = 0.0f;
      EFFINFER_UNROLL
      for (int n = 0; n < kLatentOwnDims / 8; ++n) {
        values_[n][2 * r] = 0.0f;
        values_[n][2 * r + 1] = 0.0f;
      }
    }
  }

  // Whoever ends a tile's last item folds its partial results, in the order of the keys.
  EFFINFER_DEVICE void finish() {
    if (item_.partial < 0) return result_.store();
    const ops::AttentionMerge& merge = p_.work.merges[item_.merge];
    unit_.sync();
    if (unit_.thread == 0) {
      unit_.fence();
      const int32_t before = unit_.atomic_add(p_.done + item_.merge, 1);
      shared_.is_last = before + 1 == merge.num_items ? 1 : 0;
      if (shared_.is_last != 0) p_.done[item_.merge] = 0;
      unit_.fence();
    }
    unit_.sync();
    if (shared_.is_last == 0) return;
    result_.add_partials(merge);
    result_.store();
  }

  Unit& unit_;
  const ops::AttentionProblem& p_;
  LatentShared& shared_;
  const ops::AttentionItem& item_;
  const ops::AttentionTile& tile_;
  const int group_;
  const int part_;
  Result result_;
  // Of the chunk so far.
  float max_[2] = {kPlainNoScore, kPlainNoScore};
  float sum_[2] = {};
  typename Result::Values values_ = {};
};

template <DType kType>
struct LatentAttentionKernel {
  static constexpr const char* kName = "latent_attention";
  static constexpr int kThreads = kLatentWarps * kWarp;
  static constexpr int kMinBlocks = 1;
  using Params = ops::AttentionProblem;
  using Shared = LatentShared;
  static_assert(sizeof(Shared) <= 163 << 10);  // of an A100's SM

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared& shared) {
    if (p.work.items[unit.block].tile < 0) return;  // a block of a recording that has no item
    LatentTile<Unit, kType>(unit, p, shared).run();
  }
};

}  // namespace effinfer::cuda
