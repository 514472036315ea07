// Matmuls: which kernel multiplies which weights.
#include <algorithm>
#include <array>

#include "cuda/bodies/matmul_f32.h"
#include "cuda/bodies/matmul_int8.h"
#include "cuda/entry.h"
#include "cuda/matmul_ternary.h"
#include "cuda/register.h"
#include "cuda/stream_launch.h"
#include "cuda/tile_launch.h"
#include "cuda/wgmma_launch.h"
#include "ops/matmul.h"

namespace effinfer::cuda {
namespace {

using ops::Arithmetic;
using ops::MatmulProblem;
using ops::PackedFormat;
using ops::ScaleKind;

using Takes = MatmulParts;

const char* rejects_int8(const MatmulProblem& problem) {
  const bool is_dense = problem.parts[0].weight.format.scales == ScaleKind::dense;
  if (is_dense) return "an int8 operand needs quantised weights";
  const bool is_plain = problem.num_parts == 1 && problem.out_operand.data == nullptr;
  return is_plain ? nullptr : "an int8 operand meets one weight, whose outputs are floats";
}

const char* rejects(const MatmulProblem& problem) {
  if (problem.num_parts < 1 || problem.num_parts > ops::kMaxMatmulParts) {
    return "needs one to four weights";
  }
  const bool ternary = problem.x.arithmetic == Arithmetic::int8_token;
  for (int i = 0; i < problem.num_parts; ++i) {
    const ops::PackedWeight& weight = problem.parts[i].weight;
    if (!ternary && is_ternary(weight.format)) return "needs weights that are not ternary";
    if (weight.cols != problem.x.cols) {
      return "the weights and the operand have different inner sizes";
    }
  }
  if (problem.glu != ops::UnaryOp::none) {
    if (problem.num_parts != 2 || problem.parts[0].weight.rows != problem.parts[1].weight.rows) {
      return "GLU needs two weights of equal size";
    }
    if (!is_activation(problem.glu)) return "the gate of a GLU is an activation";
  }
  if (problem.out_operand.data != nullptr) {
    if (problem.glu == ops::UnaryOp::none && problem.num_parts != 1) {
      return "an operand as output needs one result";
    }
    const Arithmetic out = problem.out_operand.arithmetic;
    if (out != Arithmetic::bf16 && out != Arithmetic::f32) return "writes bf16 or f32 operands";
  }
  if (problem.top != nullptr) return "keeps no highest outputs";
  if (problem.x.arithmetic == Arithmetic::int8) return rejects_int8(problem);
  return ternary ? rejects_ternary(problem) : nullptr;
}

const char* rejects_tiles(const MatmulProblem& problem) {
  if (!problem.rounds_weights) return "rounds weights";
  if (problem.x.arithmetic != Arithmetic::bf16) return "needs a bf16 operand";
  return rejects(problem);
}

size_t tile_shared_bytes(const MatmulProblem&) {
  return kTileSharedBytes;
}

FloatPart float_part(const ops::MatmulPart& part) {
  const PackedFormat& format = part.weight.format;
  const bool dense = format.scales == ScaleKind::dense;
  return {matmul_weight(part),
          format,
          static_cast<int32_t>(ops::quant_bytes(format.bits)),
          dense ? 0 : static_cast<int32_t>(ops::min_offset(format)),
          static_cast<int32_t>(ops::superblock_bytes(format)),
          ops::header_bytes(format, part.weight.cols)};
}

template <int kTokens>
void launch_floats(FloatParams& params, int64_t groups, Queue& queue) {
  using Kernel = FloatMatmul<kTokens>;
  params.token_blocks = static_cast<int32_t>(blocks_for(params.tokens, kTokens));
  params.warps = std::min(params.superblocks, Kernel::kWarps);
  launch<Kernel>(params, groups * params.token_blocks, queue, sizeof(typename Kernel::Shared),
                 params.warps * kWarp);
}

// Parts of which `takes` says so, all of them where there is GLU.
void multiply_floats(const MatmulProblem& problem, Queue& queue, const Takes& takes) {
  FloatParams params;
  params.x = static_cast<const uint8_t*>(problem.x.data);
  params.x_row_bytes = problem.x.row_bytes();
  params.x_is_bf16 = problem.x.arithmetic == Arithmetic::bf16;
  params.tokens = static_cast<int32_t>(problem.x.rows);
  params.superblocks = static_cast<int32_t>(blocks_for(problem.x.cols, ops::kSuperblock));
  params.glu = problem.glu;
  params.header_row_bytes = ops::header_row_bytes(problem.x.cols);
  params.operand = operand_out(problem.out_operand);
  int64_t groups = 0;
  for (int i = 0; i < problem.num_parts; ++i) {
    if (!takes[i]) continue;
    params.parts[params.num_parts++] = float_part(problem.parts[i]);
    if (i == 0 || problem.glu == ops::UnaryOp::none) groups += problem.parts[i].weight.groups();
  }
  if (params.tokens == 1) return launch_floats<1>(params, groups, queue);
  launch_floats<8>(params, groups, queue);
}

void multiply_int8(const MatmulProblem& problem, Queue& queue) {
  Int8Params params;
  params.x = static_cast<const uint8_t*>(problem.x.data);
  params.x_row_bytes = problem.x.row_bytes();
  params.padded = static_cast<int32_t>(ops::padded_cols(problem.x.cols));
  params.tokens = static_cast<int32_t>(problem.x.rows);
  params.token_blocks = static_cast<int32_t>(blocks_for(params.tokens, Int8Matmul::kTokens));
  params.header_row_bytes = ops::header_row_bytes(problem.x.cols);
  params.part = float_part(problem.parts[0]);
  launch<Int8Matmul>(params, int64_t{params.part.weight.groups} * params.token_blocks, queue);
}

bool is_streamed(const PackedFormat& format) {
  return std::ranges::find(kStreamFormats, format) != kStreamFormats.end();
}

// Without parts.
StreamParams stream_params(const MatmulProblem& problem) {
  StreamParams params;
  params.x = static_cast<const uint8_t*>(problem.x.data);
  params.x_row_bytes = problem.x.row_bytes();
  params.tokens = static_cast<int32_t>(problem.x.rows);
  params.superblocks = static_cast<int32_t>(blocks_for(problem.x.cols, ops::kSuperblock));
  params.glu = problem.glu;
  params.header_row_bytes = ops::header_row_bytes(problem.x.cols);
  params.operand = operand_out(problem.out_operand);
  return params;
}

// Multiplies the parts that `takes` names, which have one format.
void multiply_streamed(const MatmulProblem& problem, const Takes& takes, Queue& queue) {
  const bool gated = problem.glu != ops::UnaryOp::none;
  StreamParams params = stream_params(problem);
  PackedFormat format;
  int count = 0;
  for (int i = 0; i < problem.num_parts; ++i) {
    if (!takes[i]) continue;
    format = problem.parts[i].weight.format;
    StreamPart& part = params.parts[count++];
    if (!gated) {
      part = stream_part(problem.parts[i]);
    } else if (i == 0) {
      part = stream_part(problem.parts[0], problem.parts[1]);
    } else {
      part.weight = matmul_weight(problem.parts[i]);  // goes with the first
      continue;
    }
    part.slice_bits = stream_slice_bits(part.units, params.superblocks);
  }
  if (takes[0]) {  // of several launches one
    params.next = stream_next(problem.next, params.parts[0].units << params.parts[0].slice_bits);
  }
  params.header_bytes = ops::header_bytes(format, problem.x.cols);
  switch (format.bits) {
    case ops::QuantBits::u4:
      return launch_u4(format, params, queue);
    case ops::QuantBits::u5:
    case ops::QuantBits::u6:
      return launch_u5_u6(format, params, queue);
    default:
      return launch_u8_dense(format, params, queue);
  }
}

// One kind of kernel for all numbers of tokens: its bits are its own.
void multiply_rounded(const MatmulProblem& problem, const Takes& takes, Queue& queue) {
  if (arch_of(queue) == 90) return multiply_wgmma(problem, takes, queue);
  multiply_tiled(problem, takes, tile_shape(problem, takes, queue), queue);
}

// A GLU of two formats.
void multiply_pair(const MatmulProblem& problem, Queue& queue) {
  PairParams params;
  params.stream = stream_params(problem);
  for (int i = 0; i < 2; ++i) {
    const ops::PackedWeight& weight = problem.parts[i].weight;
    params.stream.parts[i].weight = matmul_weight(problem.parts[i]);
    params.formats[i] = weight.format;
    params.header_bytes[i] = ops::header_bytes(weight.format, weight.cols);
  }
  StreamPart& part = params.stream.parts[0];
  part.units = (part.weight.groups + 1) / 2;
  part.slice_bits = std::min(2, stream_slice_bits(part.units, params.stream.superblocks));
  part.blocks = part.units;
  launch_pair(params, queue);
}

// Parts of one format go together; float32 weights have the kernel of float32 operands, as has a
// GLU with one of them.
void multiply_bf16(const MatmulProblem& problem, Queue& queue) {
  Takes floats = {};
  bool has_floats = false;
  for (int i = 0; i < problem.num_parts; ++i) {
    floats[i] = !is_streamed(problem.parts[i].weight.format);
    has_floats |= floats[i];
  }
  if (problem.glu != ops::UnaryOp::none) {
    if (has_floats) return multiply_floats(problem, queue, {true, true});
    if (problem.parts[0].weight.format != problem.parts[1].weight.format) {
      return multiply_pair(problem, queue);
    }
  }
  Takes done = floats;
  for (int i = 0; i < problem.num_parts; ++i) {
    if (done[i]) continue;
    Takes same = {};
    for (int j = i; j < problem.num_parts; ++j) {
      same[j] = !done[j] && problem.parts[j].weight.format == problem.parts[i].weight.format;
      done[j] = done[j] || same[j];
    }
    if (problem.rounds_weights) {
      multiply_rounded(problem, same, queue);
    } else {
      multiply_streamed(problem, same, queue);
    }
  }
  if (has_floats) multiply_floats(problem, queue, floats);
}

void multiply(const MatmulProblem& problem, Queue& queue) {
  if (problem.x.rows == 0) return;
  if (problem.x.arithmetic == Arithmetic::int8_token) return multiply_ternary(problem, queue);
  if (problem.x.arithmetic == Arithmetic::int8) return multiply_int8(problem, queue);
  if (problem.x.arithmetic == Arithmetic::bf16) return multiply_bf16(problem, queue);
  multiply_floats(problem, queue, {true, true, true, true});
}

}  // namespace

void register_matmul() {
  add<MatmulProblem>("matmul", rejects, multiply);
  // By name, so that explain() tells the two arithmetics apart.
  ops::mutable_table<MatmulProblem>().add({"matmul.cuda.tiles", Isa::portable, rejects_tiles,
                                           nullptr, nullptr, DeviceKind::cuda, multiply, kLeastArch,
                                           tile_shared_bytes});
}

}  // namespace effinfer::cuda
