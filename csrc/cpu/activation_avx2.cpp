#include "cpu/activation.h"
#include "cpu/activation_rows.h"
#include "cpu/simd/math_avx2.h"

namespace effinfer::cpu::avx2 {
namespace {
struct Avx2 {
  using Vector = F32x16;
};
}  // namespace

void store_activation_row(const kernels::Activation& out, int64_t row, const float* values) {
  ActivationRows<Avx2>::store_row(out, row, values);
}

void store_activation_blocks(const kernels::Activation& out, int64_t row, int64_t first_block,
                             int64_t num_blocks, const float* values) {
  ActivationRows<Avx2>::store_blocks(out, row, first_block, num_blocks, values);
}

void to_activation(const kernels::ToActivationProblem& problem, Team& team) {
  convert_rows<Avx2>(problem, team);
}

}  // namespace effinfer::cpu::avx2
