// What other drivers need of matmul operands (ops/operand.h) at a level.
#pragma once

#include "ops/operand.h"

namespace effinfer::cpu {

struct OperandKernels {
  ops::StoreOperandRow store_row;
  ops::StoreOperandBlocks store_blocks;
};

}  // namespace effinfer::cpu
