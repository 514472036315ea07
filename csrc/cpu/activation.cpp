#include "cpu/activation.h"

#include "cpu/activation_rows.h"
#include "cpu/simd/math_portable.h"

namespace effinfer::cpu::portable {
namespace {
struct Portable {
  using Vector = F32x16;
};
}  // namespace

void store_activation_row(const kernels::Activation& out, int64_t row, const float* values) {
  ActivationRows<Portable>::store_row(out, row, values);
}

void store_activation_blocks(const kernels::Activation& out, int64_t row, int64_t first_block,
                             int64_t num_blocks, const float* values) {
  ActivationRows<Portable>::store_blocks(out, row, first_block, num_blocks, values);
}

void to_activation(const kernels::ToActivationProblem& problem, Team& team) {
  convert_rows<Portable>(problem, team);
}

}  // namespace effinfer::cpu::portable
