// Levels: portable avx2 avx512 avx512bf16 amx
//
// Matmul by panels: the weights of a unit, dequantised for a stretch of k, stay in L1 or L2 while
// all tokens of a chunk are multiplied by them. Shared by f32 and bf16 operands. With few tokens a
// panel would be read once or twice only: dense weights are then converted in registers instead.
//
// A sum runs over k in order, in one chain; between stretches it rests in memory as float32. So a
// result does not depend on the stretch, the other tokens or the team.
#include "cpu/level.h"
#include "cpu/matmul.h"
#if EFFINFER_LEVEL_AMX
#include "cpu/vectors/matmul_amx.h"
#else
#include "cpu/matmul_units.h"
#include "cpu/vectors/matmul_epilogue.h"
#include "cpu/vectors/panel.h"
#endif

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

#if EFFINFER_LEVEL_AMX
using Matmul = AmxMatmul<NativeTiles>;
#else
// Both groups of a panel are 32 KB: 256 k of float32, 512 of bfloat16. More k would push them out
// of L1 for nothing: the sums are loaded and stored once in so many multiplications.
constexpr int64_t kPanelGroupBytes = int64_t{16} << 10;
constexpr int64_t kFewTokensK = 64;
constexpr int64_t kPanelTokens = 240;  // of a chunk: tiles of 6 and 12 divide it

// Panel of the level has
//   kTokens            tokens of a tile: chunks are cut at multiples of it
//   kElementBytes      of the operand
//   panel(weight, group, k, count, scratch)
//                      16 rows x [k, k + count) as the inner kernel reads them, in scratch or in
//                      the weights themselves
//   multiply(panels, count, x, x_stride, tokens, sums)
//                      sums[token][32] += the two panels times `tokens` operand rows
//   kStreams           whether there is also, for one tile of tokens,
//   stream(weight, groups, x, x_stride, tokens, sums)
//                      sums[token][32] = two groups of dense weights times `tokens` rows
template <class Panel>
struct PanelMatmul {
  using Sums = MatmulEpilogue::Sums;
  static constexpr int64_t kPanelK = kPanelGroupBytes / (ops::kGroupRows * Panel::kElementBytes);

  static void run(const ops::MatmulProblem& problem, Team& team) {
    const int64_t units = count_units(problem);
    const int64_t tokens = problem.x.rows;
    int64_t blocks = (tokens + kPanelTokens - 1) / kPanelTokens;
    // Few outputs for a large team: cut the tokens too, down to 4 tiles, where unpacking the same
    // weights in several chunks still costs little.
    while (units * blocks < 4 * team.size() && tokens >= 2 * blocks * 4 * Panel::kTokens) {
      blocks *= 2;
    }
    int64_t size = (tokens + blocks - 1) / blocks;
    size = (size + Panel::kTokens - 1) / Panel::kTokens * Panel::kTokens;
    blocks = (tokens + size - 1) / size;
    team.for_chunks(units * blocks, [&](int64_t chunk) {
      const int64_t first = chunk / units * size;
      const int64_t count = first + size < tokens ? size : tokens - first;
      run_chunk(problem, find_unit(problem, chunk % units, team.rank()), first, count,
                static_cast<uint8_t*>(team.scratch()));
    });
  }

  // Two groups of a panel, then the sums of two parts.
  static size_t scratch_bytes(const ops::MatmulProblem& problem) {
    return static_cast<size_t>(2 * kPanelGroupBytes + 2 * chunk_tokens(problem) * kUnitOutputs * 4);
  }

 private:
  static int64_t chunk_tokens(const ops::MatmulProblem& problem) {
    return problem.x.rows < kPanelTokens ? problem.x.rows : kPanelTokens;
  }

  static void run_chunk(const ops::MatmulProblem& problem, const MatmulUnit& unit,
                        int64_t first_token, int64_t count, uint8_t* scratch) {
    auto* sums = reinterpret_cast<Sums*>(scratch + 2 * kPanelGroupBytes);
    const int64_t part_tokens = chunk_tokens(problem);
    for (int part = 0; part < unit.num_parts; ++part) {
      multiply_part(problem, unit, unit.parts[part].weight, first_token, count, scratch,
                    sums + part * part_tokens);
    }
    MatmulEpilogue::run(problem, unit, first_token, count, sums, sums + part_tokens);
  }

  static void multiply_part(const ops::MatmulProblem& problem, const MatmulUnit& unit,
                            const ops::PackedWeight& weight, int64_t first_token, int64_t count,
                            uint8_t* scratch, Sums* sums) {
    if constexpr (Panel::kStreams) {
      if (weight.format.scales == ops::ScaleKind::dense && count <= Panel::kTokens) {
        const int64_t last = 2 * unit.index + (unit.num_outputs > ops::kGroupRows ? 1 : 0);
        const uint8_t* groups[2] = {weight.group(2 * unit.index), weight.group(last)};
        Panel::stream(weight, groups, problem.x.row(first_token), problem.x.row_bytes(),
                      static_cast<int>(count), sums);
        return;
      }
    }
    std::memset(sums, 0, static_cast<size_t>(count) * sizeof(Sums));
    const int64_t cols = ops::padded_cols(weight.cols);
    const int64_t row_bytes = problem.x.row_bytes();
    const int64_t tiles = (count + Panel::kTokens - 1) / Panel::kTokens;  // of nearly equal size
    // With one tile of tokens the panel is used once: keep it small, it is read back at once.
    const int64_t stretch = count <= Panel::kTokens ? kFewTokensK : kPanelK;
    for (int64_t k = 0; k < cols; k += stretch) {
      const int64_t length = k + stretch < cols ? stretch : cols - k;
      const uint8_t* panels[2];
      panels[0] = Panel::panel(weight, 2 * unit.index, k, length, scratch);
      // Without a second group the first is multiplied twice and half the sums are dropped.
      panels[1] =
          unit.num_outputs > ops::kGroupRows
              ? Panel::panel(weight, 2 * unit.index + 1, k, length, scratch + kPanelGroupBytes)
              : panels[0];
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t t = tile * count / tiles;
        fetch_next(weight, 2 * unit.index, k, length, tile, tiles);
        Panel::multiply(panels, length, problem.x.row(first_token + t) + k * Panel::kElementBytes,
                        row_bytes, static_cast<int>((tile + 1) * count / tiles - t), sums + t);
      }
    }
  }

  // While one stretch of weights is multiplied, the next one is fetched, a share of it a tile: of
  // the same two groups, or of the unit that follows, which this member mostly gets.
  static void fetch_next(const ops::PackedWeight& weight, int64_t first_group, int64_t k,
                         int64_t length, int64_t tile, int64_t tiles) {
    const int64_t superblock = ops::superblock_bytes(weight.format);
    const bool more = k + length < ops::padded_cols(weight.cols);
    const int64_t group = more ? first_group : first_group + 2;
    const int64_t place = ops::header_bytes(weight.format, weight.cols) +
                          (more ? k + length : 0) / ops::kSuperblock * superblock;
    const int64_t lines = length / ops::kSuperblock * superblock / 64;
    for (int64_t line = tile * lines / tiles; line < (tile + 1) * lines / tiles; ++line) {
      for (int64_t g = group; g < group + 2; ++g) {
        __builtin_prefetch(weight.group(g) + place + line * 64, 0, 2);
      }
    }
  }
};

using Matmul = PanelMatmul<Panel>;
#endif

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
const PanelKernel& kernels<Level::EFFINFER_LEVEL>() {
  using EFFINFER_LEVEL::Matmul;
  static constexpr PanelKernel kKernel = {Matmul::run, Matmul::scratch_bytes};
  return kKernel;
}

}  // namespace effinfer::cpu
