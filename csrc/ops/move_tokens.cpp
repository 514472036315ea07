#include "ops/move_tokens.h"

#include "ops/describe.h"
#include "ops/rope_append.h"

namespace effinfer::ops {
namespace {

std::string describe_layers(const KvLayers& layers) {
  return field("layers", layers.count) + describe_kv(layers.first);
}

}  // namespace

std::string describe(const MoveTokensProblem& problem) {
  return "[move_tokens]" + field("count", problem.count) + describe_layers(problem.layers);
}

std::string describe(const RetainSlotsProblem& problem) {
  return "[retain_slots]" + field("first", problem.first) + field("count", problem.count) +
         describe_layers(problem.layers);
}

std::string describe(const RotateKeysProblem& problem) {
  return "[rotate_keys]" + field("first", problem.first) + field("end", problem.end) +
         describe_layers(problem.layers);
}

}  // namespace effinfer::ops
