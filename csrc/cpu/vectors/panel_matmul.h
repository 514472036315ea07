// Matmul by panels: the weights of a unit, unpacked for a stretch of k, stay in L1 or L2 while all
// tokens of a chunk are multiplied by them. With few tokens a panel would be read once or twice
// only: dense weights are then converted in registers instead.
//
// A sum runs over k in order, in one chain; between stretches it rests in memory as float32. So a
// result does not depend on the stretch, the other tokens or the team.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/level.h"
#include "cpu/matmul_units.h"
#include "cpu/vectors/matmul_epilogue.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// Both groups of a panel are 32 KB at most: 256 k of float32, 512 of bfloat16. More k would push
// them out of L1 for nothing: the sums are loaded and stored once in so many multiplications.
constexpr int64_t kPanelGroupBytes = int64_t{16} << 10;
constexpr int64_t kFewTokensK = 64;
constexpr int64_t kPanelTokens = 240;  // of a chunk: tiles of 4, 6 and 12 divide it

// Panel of the level has
//   kTokens            tokens of a tile: chunks are cut at multiples of it
//   kUnits             units of a chunk at most: a stretch of the tokens comes from the last cache
//                      once for all of them
//   kStretch           k of a panel
//   panel(weight, group, k, count, scratch)
//                      16 rows x [k, k + count) as the inner kernel reads them, in scratch or in
//                      the weights themselves
//   multiply(format, panels, k, count, rows, tokens, sums)
//                      sums[token][32] += the two panels of weights of `format` times [k, k +
//                      count) of `tokens` rows
//   kStreamTiles       up to how many tiles of tokens have dense weights multiplied by
//   stream(weight, groups, x, x_stride, tokens, sums)
//                      sums[token][32] = two groups of dense weights times `tokens` rows
template <class Panel>
struct PanelMatmul {
  using Sums = MatmulEpilogue::Sums;

  static void run(const ops::MatmulProblem& problem, Team& team) {
    const Cut cut(problem, team.size());
    const int64_t chunks = cut.runs * cut.blocks;
    // A member claims its next chunk before it works on the one at hand, to know what to fetch.
    for (int64_t chunk = team.claim(); chunk < chunks;) {
      const int64_t next = team.claim();
      const int64_t run = chunk % cut.runs;
      Strips strips(problem, cut.first_unit(run), cut.first_unit(run + 1), team.rank());
      if (next < chunks) {
        strips.follow(find_unit(problem, cut.first_unit(next % cut.runs), team.rank()));
      }
      const int64_t first = chunk / cut.runs * cut.size;
      const int64_t left = problem.x.rows - first;
      run_chunk(problem, strips, first, left < cut.size ? left : cut.size,
                static_cast<uint8_t*>(team.scratch()));
      chunk = next;
    }
  }

  // Two groups of a panel, then the sums of all strips.
  static size_t scratch_bytes(const ops::MatmulProblem& problem) {
    return static_cast<size_t>(2 * kPanelGroupBytes +
                               2 * Panel::kUnits * chunk_tokens(problem) * kUnitOutputs * 4);
  }

 private:
  // Chunks are runs of units times blocks of `size` tokens.
  struct Cut {
    int64_t units;
    int64_t runs;
    int64_t blocks;
    int64_t size;

    Cut(const ops::MatmulProblem& problem, int64_t team) : units(count_units(problem)) {
      const int64_t tokens = problem.x.rows;
      blocks = (tokens + kPanelTokens - 1) / kPanelTokens;
      // Few outputs for a large team: cut the tokens too, down to 4 tiles, where unpacking the same
      // weights in several chunks still costs little.
      while (units * blocks < 4 * team && tokens >= 2 * blocks * 4 * Panel::kTokens) blocks *= 2;
      size = (tokens + blocks - 1) / blocks;
      size = (size + Panel::kTokens - 1) / Panel::kTokens * Panel::kTokens;
      blocks = (tokens + size - 1) / size;
      int64_t run = Panel::kUnits;
      while (run > 1 && units * blocks < 8 * team * run) run /= 2;
      runs = (units + run - 1) / run;
    }
    int64_t first_unit(int64_t run) const { return run * units / runs; }
  };

  // Two groups of weights, side by side, or one.
  struct Strip {
    const ops::PackedWeight* weight;
    int64_t group;
    int64_t groups;
    int64_t header;      // bytes of a group
    int64_t superblock;  // bytes
  };

  // Those of a chunk, unit after unit and part after part, and the first one of the next chunk.
  struct Strips {
    MatmulUnit units[Panel::kUnits];
    int num_units = 0;
    Strip strips[2 * Panel::kUnits + 1];
    int count = 0;
    bool followed = false;

    Strips(const ops::MatmulProblem& problem, int64_t first, int64_t end, int member) {
      for (int64_t unit = first; unit < end; ++unit) {
        units[num_units] = find_unit(problem, unit, member);
        for (int part = 0; part < units[num_units].num_parts; ++part) {
          strips[count++] = strip(units[num_units], part);
        }
        ++num_units;
      }
    }
    void follow(const MatmulUnit& unit) {
      strips[count] = strip(unit, 0);
      followed = true;
    }
    const Strip* after(int i) const { return i + 1 < count || followed ? strips + i + 1 : nullptr; }
    static Strip strip(const MatmulUnit& unit, int part) {
      const ops::PackedWeight& weight = unit.parts[part].weight;
      return {&weight, 2 * unit.index, unit.num_outputs > ops::kGroupRows ? 2 : 1,
              ops::header_bytes(weight.format, weight.cols), ops::superblock_bytes(weight.format)};
    }
  };

  static int64_t chunk_tokens(const ops::MatmulProblem& problem) {
    return problem.x.rows < kPanelTokens ? problem.x.rows : kPanelTokens;
  }

  static void run_chunk(const ops::MatmulProblem& problem, const Strips& strips,
                        int64_t first_token, int64_t count, uint8_t* scratch) {
    auto* sums = reinterpret_cast<Sums*>(scratch + 2 * kPanelGroupBytes);
    if (count <= Panel::kStreamTiles * Panel::kTokens) {
      multiply_few(problem, strips, first_token, count, scratch, sums);
    } else {
      multiply_strips(problem, strips.strips, strips.count, strips.after(strips.count - 1),
                      first_token, count, scratch, sums);
    }
    for (int unit = 0; unit < strips.num_units; ++unit) {
      const int parts = strips.units[unit].num_parts;
      const Sums* unit_sums = sums + unit * parts * count;
      MatmulEpilogue::run(problem, strips.units[unit], first_token, count, unit_sums,
                          unit_sums + count);
    }
  }

  // Those of `tokens`, of nearly equal size.
  struct Tiles {
    int64_t tokens;
    int64_t count = (tokens + Panel::kTokens - 1) / Panel::kTokens;

    int64_t first(int64_t tile) const { return tile * tokens / count; }
  };

  // sums[strip][token] = the strip times the token, for a few tiles of tokens.
  static void multiply_few(const ops::MatmulProblem& problem, const Strips& strips,
                           int64_t first_token, int64_t count, uint8_t* scratch, Sums* sums) {
    if constexpr (Panel::kStreamTiles > 0) {
      const Tiles tiles = {count};
      for (int i = 0; i < strips.count; ++i) {
        const Strip& strip = strips.strips[i];
        if (strip.weight->format.scales != ops::ScaleKind::dense) {
          multiply_strips(problem, &strip, 1, strips.after(i), first_token, count, scratch,
                          sums + i * count);
          continue;
        }
        const uint8_t* groups[2] = {strip.weight->group(strip.group),
                                    strip.weight->group(strip.group + strip.groups - 1)};
        for (int64_t tile = 0; tile < tiles.count; ++tile) {
          const int64_t t = tiles.first(tile);
          Panel::stream(*strip.weight, groups, problem.x.row(first_token + t),
                        problem.x.row_bytes(), static_cast<int>(tiles.first(tile + 1) - t),
                        sums + i * count + t);
        }
      }
    }
  }

  // sums[strip][token] = the strip times the token, a stretch of k after the other. `after` is what
  // the member reads then, or null.
  static void multiply_strips(const ops::MatmulProblem& problem, const Strip* strips,
                              int num_strips, const Strip* after, int64_t first_token,
                              int64_t count, uint8_t* scratch, Sums* sums) {
    std::memset(sums, 0, static_cast<size_t>(num_strips * count) * sizeof(Sums));
    const int64_t cols = ops::padded_cols(problem.x.cols);
    const TokenRows rows = {problem.x.row(first_token), problem.x.row_bytes(), cols};
    const Tiles tiles = {count};
    // With one tile of tokens the panel is used once: keep it small, it is read back at once.
    const int64_t stretch = tiles.count == 1 ? kFewTokensK : Panel::kStretch;
    for (int64_t k = 0; k < cols; k += stretch) {
      const int64_t length = k + stretch < cols ? stretch : cols - k;
      for (int i = 0; i < num_strips; ++i) {
        const auto& [weight, group, groups, header, superblock] = strips[i];
        const bool last = i + 1 == num_strips;
        const int64_t next_k = !last ? k : k + length < cols ? k + length : 0;
        const int64_t next_end = next_k + stretch < cols ? next_k + stretch : cols;
        const Strip* next = last ? strips : strips + i + 1;
        const Fetch fetch(last && next_k == 0 ? after : next, next_k, next_end);
        const uint8_t* panels[2];
        panels[0] = Panel::panel(*weight, group, k, length, scratch);
        // Without a second group the first is multiplied twice and half the sums are dropped.
        panels[1] = groups == 1
                        ? panels[0]
                        : Panel::panel(*weight, group + 1, k, length, scratch + kPanelGroupBytes);
        for (int64_t tile = 0; tile < tiles.count; ++tile) {
          const int64_t t = tiles.first(tile);
          fetch.share(tile, tiles.count);
          Panel::multiply(weight->format, panels, k, length, rows.from(t),
                          static_cast<int>(tiles.first(tile + 1) - t), sums + i * count + t);
        }
      }
    }
  }

  // While one stretch of a strip is multiplied, what is unpacked after it is fetched, a share of it
  // a tile. With the first stretch come the scales at the head of the groups.
  class Fetch {
   public:
    Fetch(const Strip* strip, int64_t k, int64_t end) {
      if (strip == nullptr) return;
      const int64_t first = k == 0 ? 0 : strip->header + k / ops::kSuperblock * strip->superblock;
      lines_ = (strip->header + end / ops::kSuperblock * strip->superblock - first) / 64;
      groups_ = strip->groups;
      for (int64_t g = 0; g < groups_; ++g) {
        data_[g] = strip->weight->group(strip->group + g) + first;
      }
    }
    void share(int64_t tile, int64_t tiles) const {
      for (int64_t line = tile * lines_ / tiles; line < (tile + 1) * lines_ / tiles; ++line) {
        for (int64_t g = 0; g < groups_; ++g) __builtin_prefetch(data_[g] + line * 64, 0, 2);
      }
    }

   private:
    const uint8_t* data_[2] = {};
    int64_t groups_ = 0;
    int64_t lines_ = 0;
  };
};

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL
