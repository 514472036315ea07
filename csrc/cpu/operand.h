// What producers of matmul operands (ops/operand.h) call at a level; the bits are the same at all.
#pragma once

#include "effinfer/device.h"
#include "ops/operand.h"

namespace effinfer::cpu {

// Writes one row of `out` from out.cols floats: of a producer that has a row in registers or
// scratch.
using StoreOperandRow = void (*)(const ops::Operand& out, int64_t row, const float* values);

// Writes whole blocks of one row: a producer of some columns need not wait for the others. The last
// block's writer also writes the padding; out.cols is a multiple of kOperandBlock. Not for
// int8_token.
using StoreOperandBlocks = void (*)(const ops::Operand& out, int64_t row, int64_t first_block,
                                    int64_t num_blocks, const float* values);

struct OperandKernels {
  StoreOperandRow store_row;
  StoreOperandBlocks store_blocks;
};

// Of the highest level at or below `isa`.
StoreOperandRow store_operand_row(Isa isa);

}  // namespace effinfer::cpu
