#include "cuda/bodies/decode_pages.h"
#include "cuda/decode_pages.h"
#include "cuda/entry.h"

namespace effinfer::cuda {

void launch_decode_pages(const ops::AttentionProblem& p, Queue& queue) {
  if (p.decoded.count == 0) return;
  DecodePagesParams params;
  params.coded = p.coded;
  params.decoded = p.decoded;
  params.dtype = p.k.dtype;
  params.num_kv_heads = p.num_kv_heads;
  params.head_dim = p.k.dims;
  launch<DecodePages>(params, DecodePages::blocks(params), queue);
}

}  // namespace effinfer::cuda
