// Bfloat16 matmul on tiles of AMX, over any tile unit (amx_tiles.h).
//
// The weights of a unit are dequantised to a panel in L2; tokens go by in pairs of tiles:
//
//            k 32                     16 outputs  16 outputs
//         +--------+                 +---------+ +---------+
//   A0    | 16 x 32| rows of the   B0| 16 lines| |         |B1   16 consecutive lines of a panel
//         +--------+ operand         +---------+ +---------+
//   A1    | 16 x 32| as they lie      C00 += A0 B0   C01 += A0 B1
//         +--------+                  C10 += A1 B0   C11 += A1 B1
//
// The sums stay in C for a whole stretch of k and rest in memory between stretches. An element's
// operations follow from k alone, so a row's result is the same bits wherever it lies in a tile, in
// any batch and for any team.
//
// Bound, estimated from the rates of single instructions. Four multiplications take 4 x 16 cycles,
// the four loads that feed them 4 x 21 from L2: 85 cycles for 65536 operations, 780 a cycle.
// Dequantising a superblock of a group takes 170 (4 bits) to 260 (6 bits) cycles of the vector
// units, which are idle otherwise: while one panel is multiplied, the next one is dequantised in
// small steps between multiplications, and the results of the tokens before are written. So for n
// tokens a unit costs, for 64 k, max(n / 32 x 170, 2 x 170..260) cycles: dequantising bounds it
// below 64 to 100 tokens, L2 above.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/matmul_amx.h"
#include "cpu/quantised_formats.h"
#include "cpu/vectors/amx_tiles.h"
#include "cpu/vectors/matmul_epilogue.h"
#include "cpu/vectors/panel_bf16.h"
#include "effinfer/threads.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// The panel of the next job, made a superblock at a time.
class PanelFiller {
 public:
  PanelFiller() = default;
  PanelFiller(const PackedWeight& weight, int64_t first_group, int groups, int64_t k,
              int64_t length, uint8_t* scratch) {
    weight_ = &weight;
    fill_ = pick(weight.format);
    first_superblock_ = k / ops::kSuperblock;
    superblocks_ = length / ops::kSuperblock;
    left_ = groups * superblocks_;
    for (int g = 0; g < groups; ++g) {
      groups_[g] = weight.group(first_group + g);
      // Bfloat16 weights are a panel already: they are only fetched.
      panels_[g] = fill_ == fetch ? const_cast<uint8_t*>(groups_[g]) + k * ops::kGroupRows * 2
                                  : scratch + g * superblocks_ * Bf16Panel::kSuperblockBytes;
    }
  }

  const uint8_t* panel(int group) const { return panels_[group]; }

  // From now on, `steps` calls of step() finish the panel.
  void spread(int64_t steps) {
    steps_ = steps;
    rate_ = left_;
    due_ = 0;
  }

  [[gnu::always_inline]] void step() {
    for (due_ += rate_; due_ >= steps_ && left_ > 0; due_ -= steps_) fill_next();
  }

  void finish() {
    while (left_ > 0) fill_next();
  }

 private:
  using Fill = void (*)(const PackedWeight&, const uint8_t* group, int64_t s, uint8_t* out);

  void fill_next() {
    fill_(*weight_, groups_[group_], first_superblock_ + index_,
          panels_[group_] + index_ * Bf16Panel::kSuperblockBytes);
    --left_;
    if (++index_ == superblocks_) {
      index_ = 0;
      ++group_;
    }
  }

  static Fill pick(const PackedFormat& format) {
    if (format.scales == ScaleKind::dense) {
      return format.bits == QuantBits::bf16  ? fetch
             : format.bits == QuantBits::f16 ? fill_dense<QuantBits::f16>
                                             : fill_dense<QuantBits::f32>;
    }
    Fill fill = nullptr;
    with_quantised_format(format, [&]<PackedFormat known>() { fill = fill_quantised<known>; });
    return fill;
  }

  static void fetch(const PackedWeight&, const uint8_t*, int64_t, uint8_t* out) {
    for (int64_t i = 0; i < Bf16Panel::kSuperblockBytes; i += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(out + i), _MM_HINT_T1);
    }
  }

  template <QuantBits bits>
  static void fill_dense(const PackedWeight&, const uint8_t* group, int64_t s, uint8_t* out) {
    Bf16Panel::dense(bits, group, s * ops::kSuperblock, ops::kSuperblock, out);
  }

  template <PackedFormat format>
  static void fill_quantised(const PackedWeight& weight, const uint8_t* group, int64_t s,
                             uint8_t* out) {
    constexpr int64_t kAhead = 4096;  // a page: what the hardware's prefetcher does not cross
    const uint8_t* data =
        group + ops::header_bytes(format, weight.cols) + s * ops::superblock_bytes(format) + kAhead;
    for (int64_t i = 0; i < ops::superblock_bytes(format); i += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(data + i), _MM_HINT_T0);
    }
    Bf16Panel::quantised<format>(weight, group, s, out);
  }

  const PackedWeight* weight_ = nullptr;
  const uint8_t* groups_[2] = {};
  uint8_t* panels_[2] = {};
  Fill fill_ = nullptr;
  int64_t first_superblock_ = 0;
  int64_t superblocks_ = 0;
  int64_t left_ = 0;
  int64_t index_ = 0;
  int group_ = 0;
  int64_t steps_ = 1;
  int64_t rate_ = 0;
  int64_t due_ = 0;
};

template <class Tiles>
class AmxMatmul {
 public:
  static void run(const ops::MatmulProblem& problem, Team& team) {
    const AmxPlan plan = amx_plan(problem, team.size());
    const int64_t first = team.claim();
    if (first >= plan.chunks()) return;
    AmxMatmul matmul(problem, plan, team);
    matmul.run_chunks(first);
    matmul.tiles_.release();
  }

  static size_t scratch_bytes(const ops::MatmulProblem& problem) {
    return amx_scratch_bytes(problem);
  }

 private:
  using Sums = MatmulEpilogue::Sums;

  // One panel times one block of tokens: a part of a unit over a stretch of k.
  struct Job {
    int64_t chunk = 0;
    int64_t k = 0;
    int64_t unit_index = 0;
    int part = 0;
    MatmulUnit unit{};
  };

  AmxMatmul(const ops::MatmulProblem& problem, const AmxPlan& plan, Team& team)
      : problem_(problem),
        plan_(plan),
        team_(team),
        scratch_(static_cast<uint8_t*>(team.scratch())),
        sums_(reinterpret_cast<Sums*>(scratch_ + 2 * plan.panel_bytes())) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = kTileRowBytes;
      config.rows[tile] = tile >= kB ? kTileRows : static_cast<uint8_t>(plan.tile_rows);
    }
    tiles_.configure(config);
  }

  void run_chunks(int64_t chunk) {
    Job job = first_job(chunk);
    PanelFiller panel = filler(job, 0);
    panel.finish();
    for (int buffer = 1;; buffer ^= 1) {
      const int64_t steps = (block_tokens(job) + kAmxPairRows - 1) / kAmxPairRows *
                            (stretch_length(job) / ops::kSuperblock);
      Job next = job;
      const bool more = advance(next);
      PanelFiller next_panel = more ? filler(next, buffer) : PanelFiller();
      next_panel.spread(steps);
      multiply(job, panel, next_panel);
      next_panel.finish();
      if (!more) break;
      job = next;
      panel = next_panel;
    }
    write_rows(plan_.block);
  }

  Job first_job(int64_t chunk) const {
    Job job;
    job.chunk = chunk;
    job.unit_index = first_unit(job);
    job.unit = find_unit(problem_, job.unit_index, team_.rank());
    return job;
  }

  int64_t first_unit(const Job& job) const { return job.chunk % plan_.unit_chunks * plan_.batch; }
  int64_t end_unit(const Job& job) const {
    const int64_t end = first_unit(job) + plan_.batch;
    return end < plan_.units ? end : plan_.units;
  }
  int64_t first_token(const Job& job) const { return job.chunk / plan_.unit_chunks * plan_.block; }
  int64_t block_tokens(const Job& job) const {
    const int64_t left = plan_.tokens - first_token(job);
    return left < plan_.block ? left : plan_.block;
  }
  int64_t stretch_length(const Job& job) const {
    const int64_t left = plan_.cols - job.k;
    return left < plan_.stretch ? left : plan_.stretch;
  }
  const PackedWeight& weight(const Job& job) const { return job.unit.parts[job.part].weight; }
  static int num_groups(const Job& job) { return job.unit.num_outputs > ops::kGroupRows ? 2 : 1; }
  Sums* sums(const Job& job, int part) const {
    return sums_ + ((job.unit_index - first_unit(job)) * job.unit.num_parts + part) * plan_.block;
  }

  // The job after this one: parts, then units, then stretches, then the next chunk.
  bool advance(Job& job) {
    if (++job.part < job.unit.num_parts) return true;
    job.part = 0;
    if (++job.unit_index == end_unit(job)) {
      job.unit_index = first_unit(job);
      job.k += plan_.stretch;
      if (job.k >= plan_.cols) {
        const int64_t chunk = team_.claim();
        if (chunk >= plan_.chunks()) return false;
        job = first_job(chunk);
        return true;
      }
    }
    job.unit = find_unit(problem_, job.unit_index, team_.rank());
    return true;
  }

  PanelFiller filler(const Job& job, int buffer) const {
    return PanelFiller(weight(job), 2 * job.unit.index, num_groups(job), job.k, stretch_length(job),
                       scratch_ + buffer * plan_.panel_bytes());
  }

  // The first row of a tile. The last tile of a block ends with it, though it may begin inside the
  // tile before: a tile has as many rows as the configuration says, and rows do not interact.
  int64_t tile_row(const Job& job, int64_t tile) const {
    const int64_t start = first_token(job) + tile * kTileRows;
    const int64_t last = first_token(job) + block_tokens(job) - plan_.tile_rows;
    return start < last ? start : last;
  }

  void multiply(const Job& job, const PanelFiller& panel, PanelFiller& next) {
    const int64_t tiles = (block_tokens(job) + kTileRows - 1) / kTileRows;
    const bool two = num_groups(job) == 2;
    int64_t tile = 0;
    for (; tile + 2 <= tiles; tile += 2) {
      two ? pass<2, 2>(job, panel, tile, next) : pass<2, 1>(job, panel, tile, next);
    }
    if (tile < tiles) two ? pass<1, 2>(job, panel, tile, next) : pass<1, 1>(job, panel, tile, next);
  }

  // Tiles: C 0..3 (row tile, group), A 4..5, B 6..7.
  static constexpr int kA = 4;
  static constexpr int kB = 6;

  template <int rows, int groups>
  void pass(const Job& job, const PanelFiller& panel, int64_t tile, PanelFiller& next) {
    const int64_t stride = problem_.x.row_bytes();
    const uint8_t* a[rows];
    for (int r = 0; r < rows; ++r) a[r] = problem_.x.row(tile_row(job, tile + r)) + job.k * 2;
    const uint8_t* b[groups];
    for (int g = 0; g < groups; ++g) b[g] = panel.panel(g);
    Sums* c = sums(job, job.part) + tile * kTileRows;

    unroll<rows * groups>([&](auto i) __attribute__((always_inline)) {
      constexpr int r = i / groups;
      constexpr int g = i % groups;
      if (job.k == 0) {
        tiles_.template zero<2 * r + g>();
      } else {
        tiles_.template load<2 * r + g>(c[r * kTileRows] + g * 16, sizeof(Sums));
      }
    });
    const int64_t length = stretch_length(job);
    const int64_t rows_per_step = rows_per_step_of(length / ops::kSuperblock);
    for (int64_t k = 0; k < length; k += ops::kSuperblock) {
      unroll<ops::kSuperblock / kTileK>([&](auto half) __attribute__((always_inline)) {
        multiply_tiles<rows, groups>(a, k * 2 + half * kTileRowBytes, stride, b,
                                     k * ops::kGroupRows * 2 + half * kTileBytes);
      });
      next.step();
      write_rows(rows_per_step);
    }
    write_rows(plan_.block);  // before their sums are overwritten
    unroll<rows * groups>([&](auto i) __attribute__((always_inline)) {
      constexpr int r = i / groups;
      constexpr int g = i % groups;
      tiles_.template store<2 * r + g>(c[r * kTileRows] + g * 16, sizeof(Sums));
    });
    if (job.part + 1 == job.unit.num_parts && job.k + plan_.stretch >= plan_.cols) {
      complete(job, tile * kTileRows, rows * kTileRows);
    }
  }

  template <int rows, int groups>
  [[gnu::always_inline]] void multiply_tiles(const uint8_t* const* a, int64_t a_offset,
                                             int64_t stride, const uint8_t* const* b,
                                             int64_t b_offset) {
    unroll<rows>([&](auto r) __attribute__((always_inline)) {
      tiles_.template load<kA + r>(a[r] + a_offset, stride);
      unroll<groups>([&](auto g) __attribute__((always_inline)) {
        if constexpr (r == 0) tiles_.template load<kB + g>(b[g] + b_offset, kTileRowBytes);
        tiles_.template dpbf16ps<2 * r + g, kA + r, kB + g>();
      });
    });
  }

  // Rows of a unit whose sums are complete: the epilogue takes them, a few at a time, while the
  // next ones are multiplied. Rows count from the first token of the block.
  struct Complete {
    MatmulUnit unit{};
    int64_t first_token = 0;
    int64_t row = 0;
    int64_t end = 0;
    int64_t last_tile = 0;  // from this row on, sums lie `skip` rows further
    int64_t skip = 0;
    const Sums* sums[2] = {};
  };

  // The last tile's sums are rows of their own, so its overlap with the tile before is skipped.
  void complete(const Job& job, int64_t row, int64_t count) {
    const int64_t tokens = block_tokens(job);
    complete_.unit = job.unit;
    complete_.first_token = first_token(job);
    complete_.row = row;
    complete_.end = row + count < tokens ? row + count : tokens;
    complete_.last_tile = (tokens - 1) / kTileRows * kTileRows;
    complete_.skip = complete_.last_tile + complete_.first_token -
                     tile_row(job, complete_.last_tile / kTileRows);
    complete_.sums[0] = sums(job, 0);
    complete_.sums[1] = sums(job, job.unit.num_parts - 1);
  }

  int64_t rows_per_step_of(int64_t steps) const {
    return (complete_.end - complete_.row + steps - 1) / steps;
  }

  void write_rows(int64_t count) {
    while (count > 0 && complete_.row < complete_.end) {
      const int64_t row = complete_.row;
      const int64_t limit = row < complete_.last_tile ? complete_.last_tile : complete_.end;
      int64_t run = (limit < complete_.end ? limit : complete_.end) - row;
      run = run < count ? run : count;
      const int64_t at = row < complete_.last_tile ? row : row + complete_.skip;
      write_run(row, run, at);
      complete_.row += run;
      count -= run;
    }
  }

  [[gnu::noinline]] void write_run(int64_t row, int64_t count, int64_t at) {
    MatmulEpilogue::run(problem_, complete_.unit, complete_.first_token + row, count,
                        complete_.sums[0] + at, complete_.sums[1] + at);
  }

  const ops::MatmulProblem& problem_;
  const AmxPlan plan_;
  Team& team_;
  uint8_t* scratch_;
  Sums* sums_;
  Complete complete_;
  Tiles tiles_;
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
