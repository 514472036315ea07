#include "cpu/activation.h"
#include "cpu/register.h"
#include "kernels/registry.h"

namespace effinfer {
namespace {

const char* rejects(const kernels::ToActivationProblem&) {
  return nullptr;
}

}  // namespace

kernels::StoreActivationRow kernels::store_activation_row(Isa isa) {
#if EFFINFER_X86
  if (isa >= Isa::avx512) return cpu::avx512::store_activation_row;
  if (isa >= Isa::avx2) return cpu::avx2::store_activation_row;
#endif
  static_cast<void>(isa);
  return cpu::portable::store_activation_row;
}

kernels::StoreActivationBlocks kernels::store_activation_blocks(Isa isa) {
#if EFFINFER_X86
  if (isa >= Isa::avx512) return cpu::avx512::store_activation_blocks;
  if (isa >= Isa::avx2) return cpu::avx2::store_activation_blocks;
#endif
  static_cast<void>(isa);
  return cpu::portable::store_activation_blocks;
}

void cpu::register_activation() {
  auto& table = kernels::mutable_table<kernels::ToActivationProblem>();
  table.add({"to_activation.portable", Isa::portable, rejects, portable::to_activation});
#if EFFINFER_X86
  table.add({"to_activation.avx2", Isa::avx2, rejects, avx2::to_activation});
  table.add({"to_activation.avx512", Isa::avx512, rejects, avx512::to_activation});
#endif
}

}  // namespace effinfer
