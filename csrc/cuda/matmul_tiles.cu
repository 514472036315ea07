// Matmuls with weights that are rounded: which kernel multiplies how many tokens.
#include "cuda/tile_launch.h"

namespace effinfer::cuda {
namespace {

// Cycles are for a superblock of 64 k: of a multiprocessor of four tensor cores which take 8 cycles
// a product, what shared memory takes where that is more, and a chain of products' latency at
// least. They are counted, not measured.
constexpr TileShape choose_tile(int64_t units, int64_t tokens, int64_t multiprocessors) {
  struct Candidate {
    TileShape shape;
    int64_t cycles;  // of a block
    int64_t least;
  };
  constexpr Candidate kCandidates[] = {
      {{128, true}, 2048, 2048},
      {{64, true}, 1024, 1024},
      {{64, false}, 350, 350},
      {{16, false}, 100, 160},
  };
  TileShape best;
  int64_t best_time = INT64_MAX;
  for (const auto& [shape, cycles, least] : kCandidates) {
    const int64_t blocks =
        blocks_for(tokens, shape.tokens) * (shape.wide ? blocks_for(units, kTileWarps) : units);
    const int64_t time = std::max(least, blocks_for(blocks, multiprocessors) * cycles);
    if (time >= best_time) continue;
    best = shape;
    best_time = time;
  }
  return best;
}

// 8B models' weights on 132 multiprocessors.
static_assert(choose_tile(14336 / 16, 2048, 132).tokens == 128);
static_assert(choose_tile(4096 / 32, 512, 132).tokens == 64);
static_assert(choose_tile(4096 / 32, 512, 132).wide);
static_assert(choose_tile(4096 / 32, 8, 132).tokens == 16);

// With GLU a unit has 16 rows of each weight.
int32_t units_of(const ops::MatmulProblem& problem, int part) {
  const auto groups = static_cast<int32_t>(problem.parts[part].weight.groups());
  if (problem.glu == ops::UnaryOp::none) return (groups + 1) / 2;
  return part == 0 ? groups : 0;  // the second goes with the first
}

}  // namespace

TileShape tile_shape(const ops::MatmulProblem& problem, const MatmulParts& takes,
                     const Queue& queue) {
  int64_t units = 0;
  for (int i = 0; i < problem.num_parts; ++i) units += takes[i] ? units_of(problem, i) : 0;
  return choose_tile(units, problem.x.rows, num_multiprocessors(queue));
}

TileParams tile_params(const ops::MatmulProblem& problem, const MatmulParts& takes) {
  TileParams params;
  params.tokens = static_cast<int32_t>(problem.x.rows);
  params.superblocks = static_cast<int32_t>(blocks_for(problem.x.cols, ops::kSuperblock));
  params.glu = problem.glu;
  params.header_row_bytes = ops::header_row_bytes(problem.x.cols);
  params.operand = operand_out(problem.out_operand);
  int count = 0;
  for (int i = 0; i < problem.num_parts; ++i) {
    if (!takes[i]) continue;
    TilePart& part = params.parts[count++];
    part.weight = matmul_weight(problem.parts[i]);
    part.units = units_of(problem, i);
    part.fours = has_fours(problem.parts[i]);
  }
  params.header_bytes = ops::header_bytes(tile_format(problem, takes), problem.x.cols);
  return params;
}

ops::PackedFormat tile_format(const ops::MatmulProblem& problem, const MatmulParts& takes) {
  const auto first = std::find(takes.begin(), takes.end(), true) - takes.begin();
  return problem.parts[first].weight.format;
}

void multiply_tiled(const ops::MatmulProblem& problem, const MatmulParts& takes, TileShape shape,
                    Queue& queue) {
  TileParams params = tile_params(problem, takes);
  const ops::PackedFormat format = tile_format(problem, takes);
  switch (format.bits) {
    case ops::QuantBits::u4:
      return launch_tiles_u4(format, problem.x, params, shape, queue);
    case ops::QuantBits::u5:
    case ops::QuantBits::u6:
      return launch_tiles_u5_u6(format, problem.x, params, shape, queue);
    default:
      return launch_tiles_u8_dense(format, problem.x, params, shape, queue);
  }
}

}  // namespace effinfer::cuda
