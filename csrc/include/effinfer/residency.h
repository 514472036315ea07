// Hooks that choose which keys a sequence has (hooks.h), for engines without Python in their steps.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "effinfer/export.h"
#include "effinfer/hooks.h"

namespace effinfer {

// The first `sinks` slots and the last `recent` ones, the others dropped some `stride` at a time: a
// sequence has sinks + recent slots at most between two steps, and at least recent - stride + 1
// recent ones. With `reposition` keys move to the positions that their slots have, so that a text
// of any length has positions below sinks + recent and a step's tokens; else they keep their own.
struct KeepRecent {
  int64_t sinks = 4;
  int64_t recent = 1020;
  int64_t stride = 64;  // of whole pages a table changes, and few bytes move
  bool reposition = true;
  std::string technique = {};  // that requests name to have it; empty: it is for all
};

// Throws InvalidArgument: sinks below 0, recent below stride, stride below 1. Layers with a window
// keep theirs, and move with the others.
EFFINFER_API std::shared_ptr<StepHook> keep_recent(const KeepRecent& rule);

}  // namespace effinfer
