#include "cpu/operand.h"

#include "cpu/level.h"

namespace effinfer::cpu {

StoreOperandRow store_operand_row(Isa isa) {
  return kernels_at<OperandKernels>(isa).store_row;
}

}  // namespace effinfer::cpu
