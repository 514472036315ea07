// How much attention keys get: what methods that evict, compress or select keys look at (H2O, Zhang
// et al., arXiv:2306.14048; SnapKV, Li et al., arXiv:2404.14469; MInference, Jiang et al.,
// arXiv:2407.02490; SampleAttention, Zhu et al., arXiv:2406.15486).
#pragma once

#include <cstdint>

#include "effinfer/executor.h"
#include "effinfer/export.h"
#include "effinfer/ops/attention.h"
#include "effinfer/tensor.h"

namespace effinfer::ops {

enum class ScoreReduce { sum, max };

struct AttentionScoresInputs : LogitInputs {
  TensorView positions;     // int32 [T]: of the rows in their sequences; rank 0: the last ones
  TensorView lse;           // float32 [T, num_qo_heads], of all logits of a row; rank 0: computed
  float lse_factor = 1.0f;  // the lse is natural logarithms times this
  ScoreReduce reduce = ScoreReduce::sum;
};

// Rows of a sequence at most whose diagonals are summed.
inline constexpr int64_t kMaxDiagonalRows = 128;

// out: float32 [num_qo_heads, sum of kv_len]: for each head and key, one sequence after the other,
// the sum (or the maximum) over the sequence's query rows of softmax(logits). diagonals: null, or
// of the same shape: for each head and distance d the sum over rows of the probability of the key d
// places before the row; needs geometry.causal, reduce sum, no positions, and at most
// kMaxDiagonalRows rows a sequence. The same bits for any batch and any number of threads. On a GPU
// tensors and results lie there, and nobody looks at positions. Throws InvalidArgument, and
// Unsupported where a GPU has no kernel.
EFFINFER_API void attention_scores(const AttentionGeometry& geometry,
                                   const AttentionSequences& sequences,
                                   const AttentionScoresInputs& inputs, float* out,
                                   float* diagonals, const Executor& executor);

enum class ScorePooling { none, max, avg };
enum class BlockReduce { sum, mean, max };

struct ScorePool {
  ScorePooling pooling = ScorePooling::none;
  int32_t kernel_size = 1;  // odd
  BlockReduce block_reduce = BlockReduce::sum;
  int32_t block_size = 1;  // keys
  int32_t group = 1;       // heads that are added up; divides the number of heads
};

// Scores [heads, sum of kv_len] as blocks [heads / group, sum of ceil(kv_len / block_size)]: heads
// of a group are added, then each score becomes the maximum or the average of the kernel_size
// around it in its sequence (zeros outside count for the average, as in SnapKV, section 4), then
// those of each block are reduced. kv_len is the host's, scores and out may be a GPU's. Throws
// InvalidArgument.
EFFINFER_API void pool_scores(const TensorView& scores, const TensorView& kv_len,
                              const ScorePool& options, float* out, const Executor& executor);

}  // namespace effinfer::ops
