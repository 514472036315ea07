// Copies and the decoding of blocks: wider vectors gain nothing.
#include "ops/embedding.h"

#include <cstring>

#include "cpu/level.h"
#include "effinfer/gguf.h"

namespace effinfer::cpu {

template <>
void run<Level::portable>(const ops::EmbeddingProblem& problem, Team& team) {
  const TensorView table{problem.table, problem.dtype, {problem.vocab_size, problem.cols}};
  team.for_chunks(problem.rows, [&](int64_t row) {
    float* out = problem.out + row * problem.cols;
    const int32_t id = problem.ids[row];
    if (problem.packed != nullptr) {
      ops::unpack_row(*problem.packed, id, out);
    } else {
      dequantize_part(table, id * problem.cols, problem.cols, out);
    }
    if (problem.scale == 1.0f) return;
    for (int64_t i = 0; i < problem.cols; ++i) out[i] *= problem.scale;
  });
}

template <>
void run<Level::portable>(const ops::SelectRowsProblem& problem, Team& team) {
  const size_t row_bytes = static_cast<size_t>(problem.cols) * sizeof(float);
  if (row_bytes == 0) return;
  team.for_chunks(problem.num_rows, [&](int64_t i) {
    std::memcpy(problem.out + i * problem.cols, problem.x + problem.rows[i] * problem.cols,
                row_bytes);
  });
}

}  // namespace effinfer::cpu
