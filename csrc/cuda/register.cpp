#include "cuda/register.h"

namespace effinfer::cuda {

void register_cuda() {
  register_elementwise();
}

}  // namespace effinfer::cuda
