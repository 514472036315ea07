#include "ops/rope.h"

#include "cpu/level.h"
#include "cpu/vectors/rope_heads.h"
#include "effinfer/threads.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

template <class T>
void rope_of(const ops::RopeProblem& p, Team& team) {
  const int64_t half = p.dims / 2;
  const auto rotate_head = p.interleaved ? rope_head_interleaved<T> : rope_head<T>;
  team.for_chunks(p.rows, [&](int64_t row) {
    const int64_t angles = p.positions != nullptr ? p.positions[row] : row;
    const float* cos = p.cos_sin + angles * p.dims;
    for (int64_t head = 0; head < p.heads; ++head) {
      const T* x = p.x.template at<const T>(row, head);
      T* out = p.out.template at<T>(row, head);
      rotate_head(x, cos, cos + half, half, out);
      if (out != x) {
        memcpy(out + p.dims, x + p.dims, static_cast<size_t>(p.head_dim - p.dims) * sizeof(T));
      }
    }
  });
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
void run<Level::EFFINFER_LEVEL>(const ops::RopeProblem& p, Team& team) {
  EFFINFER_LEVEL::with_float_type(p.dtype, [&]<class T>() { EFFINFER_LEVEL::rope_of<T>(p, team); });
}

}  // namespace effinfer::cpu
