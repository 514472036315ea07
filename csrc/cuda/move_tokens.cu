#include "cuda/bodies/move_tokens.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {

void register_move_tokens() {
  add<ops::MoveTokensProblem>("move_tokens", takes_all,
                              [](const ops::MoveTokensProblem& p, Queue& queue) {
                                launch<MoveTokens>(p, p.count == 0 ? 0 : p.kv.num_kv_heads, queue);
                              });
}

}  // namespace effinfer::cuda
