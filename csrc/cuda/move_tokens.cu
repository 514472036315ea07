#include "cuda/bodies/move_tokens.h"
#include "cuda/bodies/rotate_keys.h"
#include "cuda/entry.h"
#include "cuda/register.h"

namespace effinfer::cuda {
namespace {

void move_tokens(const ops::MoveTokensProblem& p, Queue& queue) {
  launch<MoveTokens>(p, p.count == 0 ? 0 : p.layers.num_heads(), queue);
}

void retain_slots(const ops::RetainSlotsProblem& p, Queue& queue) {
  launch<RetainSlots>(p, p.first >= p.count ? 0 : p.layers.num_heads(), queue);
}

void rotate_keys(const ops::RotateKeysProblem& p, Queue& queue) {
  launch<RotateKeys>(p, p.layers.num_heads() * p.num_pages, queue);
}

}  // namespace

void register_move_tokens() {
  add<ops::MoveTokensProblem>("move_tokens", takes_all, move_tokens);
  add<ops::RetainSlotsProblem>("retain_slots", takes_all, retain_slots);
  add<ops::RotateKeysProblem>("rotate_keys", takes_all, rotate_keys);
}

}  // namespace effinfer::cuda
