// The elementwise kernels of each ISA level. Every level instantiates the same bodies
// (cpu/simd/*_body.h) over its own vector of 16 floats.
#pragma once

#include "kernels/elementwise.h"
#include "kernels/registry.h"

namespace effinfer::cpu {

struct ElementwiseKernels {
  void (*rms_norm)(const kernels::RmsNormProblem&, Team&);
  void (*layer_norm)(const kernels::LayerNormProblem&, Team&);
  void (*gated)(const kernels::GatedProblem&, Team&);
  void (*unary)(const kernels::UnaryProblem&, Team&);
  void (*binary)(const kernels::BinaryProblem&, Team&);
  void (*rope)(const kernels::RopeProblem&, Team&);
};

namespace portable {
extern const ElementwiseKernels kElementwise;
}
namespace avx2 {
extern const ElementwiseKernels kElementwise;
}
namespace avx512 {
extern const ElementwiseKernels kElementwise;
}

// What gains nothing from wider vectors: copies, block decoding, double-precision trigonometry.
void embedding(const kernels::EmbeddingProblem& problem, Team& team);
void select_rows(const kernels::SelectRowsProblem& problem, Team& team);
void rope_table(const kernels::RopeTableProblem& problem, Team& team);

}  // namespace effinfer::cpu
