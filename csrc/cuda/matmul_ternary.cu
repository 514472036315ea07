#include <algorithm>

#include "cuda/bodies/ternary.h"
#include "cuda/entry.h"
#include "cuda/matmul_ternary.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

using ops::MatmulProblem;
using ops::PackedFormat;

// With more columns sums of products, of which each is 254 at most, might need more than 32 bits.
constexpr int64_t kMostColumns = int64_t{1} << 22;

// Of blocks of which an H100 holds three; more only where two of the smallest rounds need it.
constexpr int kBulkBytes = 64 << 10;

// One round of all blocks, where they are few; else rounds as large as leave room for two.
template <class Kernel>
TernaryRounds ternary_rounds(int blocks, int tokens) {
  using Bulk = typename Kernel::Bulk;
  constexpr int kWarps = Kernel::kWarps;
  const auto fits = [&](const TernaryRounds& rounds) {
    return Bulk::shared_bytes(rounds, tokens) <= kBulkBytes;
  };
  const int all = static_cast<int>(blocks_for(blocks, kWarps)) * kWarps;
  TernaryRounds rounds;
  for (int of_round = std::min(all, 4 * kWarps);;
       of_round = of_round > 2 * kWarps ? 2 * kWarps : kWarps) {
    const int most = std::min(static_cast<int>(blocks_for(blocks, of_round)), kMostTernaryPlaces);
    rounds = Bulk::rounds_of(of_round, std::min(most, 2), tokens);
    while (rounds.places < most && fits(Bulk::rounds_of(of_round, rounds.places + 1, tokens))) {
      ++rounds.places;
    }
    if (fits(rounds) || of_round == kWarps) return rounds;
  }
}

template <class Kernel>
size_t shared_bytes(const TernaryParams& params, const Queue& queue) {
  const int tokens = std::min(params.tokens, Kernel::kTokens);
  if (has_bulk_copies(queue)) {
    return Kernel::Bulk::shared_bytes(ternary_rounds<Kernel>(params.blocks, tokens), tokens);
  }
  return size_t{1} * Kernel::places_of(params.blocks) * ternary_place_bytes(tokens);
}

template <class Kernel>
void launch_ternary(TernaryParams& params, Queue& queue) {
  params.block_tokens = std::min(params.tokens, Kernel::kTokens);
  params.token_blocks = static_cast<int32_t>(blocks_for(params.tokens, params.block_tokens));
  params.rounds = ternary_rounds<Kernel>(params.blocks, params.block_tokens);
  launch<Kernel>(params, int64_t{params.units} * params.token_blocks, queue,
                 shared_bytes<Kernel>(params, queue));
}

// Two tiles of tokens where blocks have the shared memory for them: both have the same bits.
template <ops::QuantBits kBits>
void launch_bits(TernaryParams& params, Queue& queue) {
  using Two = TernaryMatmul<kBits, 2>;
  const bool fits = shared_bytes<Two>(params, queue) <= static_cast<size_t>(shared_bytes_of(queue));
  if (params.tokens > 8 && fits) return launch_ternary<Two>(params, queue);
  launch_ternary<TernaryMatmul<kBits, 1>>(params, queue);
}

// The parts of one format from `first` on.
void multiply_format(const MatmulProblem& problem, int first, Queue& queue) {
  const PackedFormat format = problem.parts[first].weight.format;
  const int64_t cols = problem.x.cols;
  TernaryParams params;
  params.x = static_cast<const uint8_t*>(problem.x.data);
  params.x_row_bytes = problem.x.row_bytes();
  params.padded = static_cast<int32_t>(ops::padded_cols(cols));
  params.tokens = static_cast<int32_t>(problem.x.rows);
  params.blocks = static_cast<int32_t>(blocks_for(params.padded, ops::kTernaryBlock));
  params.glu = problem.glu;
  params.row_scales = format.scales == ops::ScaleKind::row;
  params.header_bytes = ops::header_bytes(format, cols);
  params.tail_offset = params.header_bytes + ops::ternary_quant_bytes(format.bits, cols);
  params.operand = operand_out(problem.out_operand);
  int count = 0;
  for (int i = first; i < problem.num_parts; ++i) {
    if (problem.parts[i].weight.format != format) continue;
    MatmulWeight& weight = params.parts[count++];
    weight = matmul_weight(problem.parts[i]);
    params.units += (weight.groups + 1) / 2;
  }
  if (problem.glu != ops::UnaryOp::none) params.units = params.parts[0].groups;
  if (format.bits == ops::QuantBits::t2) return launch_bits<ops::QuantBits::t2>(params, queue);
  launch_bits<ops::QuantBits::t1_6>(params, queue);
}

}  // namespace

const char* rejects_ternary(const MatmulProblem& problem) {
  for (int i = 0; i < problem.num_parts; ++i) {
    if (!is_ternary(problem.parts[i].weight.format)) return "needs weights packed as t2 or t1_6";
  }
  if (problem.glu != ops::UnaryOp::none &&
      problem.parts[0].weight.format != problem.parts[1].weight.format) {
    return "GLU needs ternary weights of one packing";
  }
  return problem.x.cols > kMostColumns ? "sums of so many columns need more than 32 bits" : nullptr;
}

void multiply_ternary(const MatmulProblem& problem, Queue& queue) {
  for (int i = 0; i < problem.num_parts; ++i) {
    bool is_new = true;
    for (int j = 0; j < i; ++j) {
      is_new &= problem.parts[j].weight.format != problem.parts[i].weight.format;
    }
    if (is_new) multiply_format(problem, i, queue);
  }
}

}  // namespace effinfer::cuda
