// The elementwise kernels of each ISA level. Every level instantiates the same bodies
// (cpu/vectors/*_body.h) over its own vector of 16 floats.
#pragma once

#include "ops/elementwise.h"
#include "ops/registry.h"

namespace effinfer::cpu {

struct ElementwiseKernels {
  void (*rms_norm)(const ops::RmsNormProblem&, Team&);
  void (*layer_norm)(const ops::LayerNormProblem&, Team&);
  void (*gated)(const ops::GatedProblem&, Team&);
  void (*unary)(const ops::UnaryProblem&, Team&);
  void (*binary)(const ops::BinaryProblem&, Team&);
  void (*rope)(const ops::RopeProblem&, Team&);
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
void embedding(const ops::EmbeddingProblem& problem, Team& team);
void select_rows(const ops::SelectRowsProblem& problem, Team& team);
void rope_table(const ops::RopeTableProblem& problem, Team& team);

}  // namespace effinfer::cpu
