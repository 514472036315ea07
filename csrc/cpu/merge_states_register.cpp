#include "cpu/merge_states.h"
#include "cpu/register.h"
#include "ops/registry.h"

namespace effinfer::cpu {
namespace {

using ops::MergeStatesProblem;

const char* rejects(const MergeStatesProblem& p) {
  const bool known = p.dtype == DType::f32 || p.dtype == DType::f16 || p.dtype == DType::bf16;
  return known ? nullptr : "v must be f32, f16 or bf16";
}

// The weights of one head's states.
size_t scratch_bytes(const MergeStatesProblem& p) {
  return static_cast<size_t>(p.num_states) * sizeof(float);
}

void add(const char* name, Isa isa, void (*run)(const MergeStatesProblem&, Team&)) {
  ops::mutable_table<MergeStatesProblem>().add({name, isa, rejects, run, scratch_bytes});
}

}  // namespace

void register_merge_states() {
  add("merge_states.portable", Isa::portable, portable::merge_states);
#if EFFINFER_X86
  add("merge_states.avx2", Isa::avx2, avx2::merge_states);
  add("merge_states.avx512", Isa::avx512, avx512::merge_states);
#endif
}

}  // namespace effinfer::cpu
