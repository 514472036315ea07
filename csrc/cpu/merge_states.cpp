#include "cpu/merge_states.h"

#include "cpu/simd/math_portable.h"
#include "cpu/simd/merge_states_body.h"

namespace effinfer::cpu::portable {
namespace {

struct Halves {
  template <class Convert>
  static F32x16 load(const uint16_t* from, Convert&& convert) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = convert(from[i]);
    return F32x16::load(lanes);
  }
  template <class Convert>
  static void store(const F32x16& x, uint16_t* to, Convert&& convert) {
    float lanes[16];
    x.store(lanes);
    for (int i = 0; i < 16; ++i) to[i] = convert(lanes[i]);
  }
  static F32x16 load_f16(const uint16_t* from) { return load(from, f16_to_f32); }
  static void store_f16(const F32x16& x, uint16_t* to) { store(x, to, f32_to_f16); }
  static F32x16 load_bf16(const uint16_t* from) { return load(from, bf16_to_f32); }
  static void store_bf16(const F32x16& x, uint16_t* to) { store(x, to, f32_to_bf16); }
};

}  // namespace

void merge_states(const kernels::MergeStatesProblem& problem, Team& team) {
  MergeStatesBody<F32x16, Halves>::run(problem, team);
}

}  // namespace effinfer::cpu::portable
