#include "cuda/bodies/decode_pages.h"
#include "cuda/bodies/expand_pages.h"
#include "cuda/decode_pages.h"
#include "cuda/entry.h"

namespace effinfer::cuda {

void launch_decode_pages(const ops::AttentionProblem& p, Queue& queue) {
  if (p.decoded.count == 0) return;
  ExpandPagesParams params{DecodePagesParams::of(p), {}, {}};
  const int64_t blocks = DecodedSlice::blocks(params);
  const bool has_ranges = p.coded.features == nullptr && p.coded.codebooks == nullptr;
  if (has_ranges) return launch<DecodePages>(params, blocks, queue);
  if (p.coded.features != nullptr) params.features = *p.coded.features;
  if (p.coded.codebooks != nullptr) params.codebooks = *p.coded.codebooks;
  launch<ExpandPages>(params, blocks, queue);
}

}  // namespace effinfer::cuda
