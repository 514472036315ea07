// Selection and sampling over the rows of a batch: the filters of FlashInfer's sampling family and
// what they are made of.
//
// Rows are float32, float16 or bfloat16 [batch, vocab]. Each filter keeps a head of the order
// (value descending, token id ascending): top-k exactly k tokens, top-p (Holtzman et al.,
// arXiv:1904.09751) the smallest head with at least that share of the weight, min-p (Nguyen et al.,
// arXiv:2407.01082) what is at least min_p times as likely as the likeliest. None of them sorts.
//
// A row's result is the same bits in any batch, for any number of threads and at every ISA level.
// Errors: InvalidArgument naming the argument, the row too where its values are to blame: NaNs,
// logits whose highest is not finite, probabilities that are negative or sum to 0 or infinity.
//
// On a GPU, where sums have another order, a draw may be of another token than on the CPU where it
// falls within rounding of a bound, which is rare; else tokens are the same. Nobody looks at values
// there: of rows that the CPU refuses, results are 0, and rows and ids that do not exist are
// undefined. Numbers may lie in the host's memory; index vectors and top_k may be int32.
#pragma once

#include <cstdint>
#include <string_view>

#include "effinfer/executor.h"
#include "effinfer/export.h"
#include "effinfer/tensor.h"

namespace effinfer::ops {

enum class RowKind : uint8_t { logits, probs };

// A parameter is a scalar, [1], or [outputs], one for each output; without data it is off.
struct RowFilters {
  TensorView temperature;  // float32, > 0; of logits
  TensorView top_k;        // int64, >= 1
  TensorView top_p;        // float32, in (0, 1]
  TensorView min_p;        // float32, in [0, 1]
  // Top-k, top-p and min-p see the renormalised distribution that the one before left; with `joint`
  // top-k and top-p both see the whole.
  bool joint = false;
};

// Where uniform numbers come from: a counter-based generator (Philox) at `offset` of `seed`. One
// seed for all outputs numbers them by their place in the batch; [outputs] seeds make each output's
// numbers independent of it.
struct RowSeeds {
  TensorView seed;    // int64, a scalar, [1] or [outputs]
  TensorView offset;  // the same
};

// `op` is the name in error messages of all that follows.

// samples[i], int32 or int64 [outputs], is a token of row indices[i] (int64 [outputs]; without
// data, row i). With `valid`, uint8 [outputs], rows that cannot be sampled give token 0 and 0
// there, and no error. `check_values` refuses them on a GPU too, for which the host waits.
EFFINFER_API void sample_rows(std::string_view op, RowKind kind, const TensorView& x,
                              const RowFilters& filters, const TensorView& indices,
                              const RowSeeds& seeds, const StridedView& samples,
                              const StridedView& valid, const Executor& executor,
                              bool check_values = false);

// out [batch, vocab] (float32, float16, bfloat16): as RowKind::probs what the filters leave, which
// sums to 1, zeros elsewhere; as RowKind::logits (of logits, after top-k alone) the logits left,
// divided by the temperature, negative infinity elsewhere.
EFFINFER_API void filter_rows(std::string_view op, RowKind kind, const TensorView& x,
                              const RowFilters& filters, RowKind out_kind, const StridedView& out,
                              const Executor& executor);

// The k highest of each row, highest first when `sorted`, else in the order of ids. `values`
// [batch, k] in the dtype of x, `ids` int64 [batch, k].
EFFINFER_API void top_k(std::string_view op, const TensorView& x, int64_t k, bool sorted,
                        const StridedView& values, const StridedView& ids,
                        const Executor& executor);

// Speculative sampling of a chain of drafts (Leviathan et al., arXiv:2211.17192; Chen et al.,
// arXiv:2302.01318): tokens [batch, n + 1] are the drafts up to the first rejection and one more
// token, -1 after it, distributed as if drawn from the target. draft_probs float32 [batch, n,
// vocab], draft_ids int32 [batch, n], target_probs float32 [batch, n + 1, vocab]. To `accepted`
// [batch] are added the drafts that would be accepted each by itself, to `emitted` those in tokens.
// Results are int32.
EFFINFER_API void chain_speculative_sampling(const TensorView& draft_probs,
                                             const TensorView& draft_ids,
                                             const TensorView& target_probs, const RowSeeds& seeds,
                                             const StridedView& tokens, const StridedView& accepted,
                                             const StridedView& emitted, const Executor& executor);

// Sets logits [batch, vocab] of the forbidden tokens to negative infinity, in place. bitmask int32
// [batch, ceil(vocab / 32)]: bit i % 32 of word i / 32 is set where token i is allowed (the format
// of xgrammar and llguidance). `indices` int64: only those rows of both. On the CPU a row that
// allows nothing is refused, before anything changes.
EFFINFER_API void apply_token_bitmask(const StridedView& logits, const TensorView& bitmask,
                                      const TensorView& indices, const Executor& executor);

}  // namespace effinfer::ops
