#include "cpu/operand.h"

#include "cpu/level.h"

namespace effinfer {

ops::StoreOperandRow ops::store_operand_row(Isa isa) {
  return cpu::kernels_at<cpu::OperandKernels>(isa).store_row;
}

ops::StoreOperandBlocks ops::store_operand_blocks(Isa isa) {
  return cpu::kernels_at<cpu::OperandKernels>(isa).store_blocks;
}

}  // namespace effinfer
