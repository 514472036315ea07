#include "cpu/operand.h"
#include "cpu/register.h"
#include "ops/registry.h"

namespace effinfer {
namespace {

const char* rejects(const ops::ToOperandProblem&) {
  return nullptr;
}

}  // namespace

ops::StoreOperandRow ops::store_operand_row(Isa isa) {
#if EFFINFER_X86
  if (isa >= Isa::avx512) return cpu::avx512::store_operand_row;
  if (isa >= Isa::avx2) return cpu::avx2::store_operand_row;
#endif
  static_cast<void>(isa);
  return cpu::portable::store_operand_row;
}

ops::StoreOperandBlocks ops::store_operand_blocks(Isa isa) {
#if EFFINFER_X86
  if (isa >= Isa::avx512) return cpu::avx512::store_operand_blocks;
  if (isa >= Isa::avx2) return cpu::avx2::store_operand_blocks;
#endif
  static_cast<void>(isa);
  return cpu::portable::store_operand_blocks;
}

void cpu::register_operand() {
  auto& table = ops::mutable_table<ops::ToOperandProblem>();
  table.add({"to_operand.portable", Isa::portable, rejects, portable::to_operand});
#if EFFINFER_X86
  table.add({"to_operand.avx2", Isa::avx2, rejects, avx2::to_operand});
  table.add({"to_operand.avx512", Isa::avx512, rejects, avx512::to_operand});
#endif
}

}  // namespace effinfer
