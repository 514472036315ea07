// Hooks that choose which keys a sequence has (hooks.h), for engines without Python in their steps.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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

// Which slots stay by a plane of the sequence (slot_plane.h).
struct SlotChoice {
  std::string plane;
  int64_t count = 0;  // of each head
  int64_t first = 0;  // of them the sequence's first slots, whatever they have,
  int64_t last = 0;   // and its last ones
  // A slot counts as much as the greatest of so many around it, or as their average (zeros outside
  // count). Odd; 1: as itself.
  int32_t pool = 1;
  bool maximum = true;
  int32_t group = -1;  // whose heads choose, of those without a window; -1: all of them do
};

// Keeps of each (layer without a window, KV head) the `count` slots that have most, of equal ones
// the earlier, in order; all where there are no more. Throws InvalidArgument, and what
// SequenceState's plane() and retain() throw.
EFFINFER_API void keep_top(SequenceState& sequence, const SlotChoice& choice);

struct KeepTop {
  SlotChoice choice;
  // 0: once, at the prompt's end. Else whenever there are more slots than choice.count, so many at
  // a time: at least count - stride + 1 stay.
  int64_t stride = 0;
  std::string technique = {};  // that requests name to have it; empty: it is for all
};

// The hook that does it. Throws InvalidArgument: a choice that is none, count below first + last +
// stride.
EFFINFER_API std::shared_ptr<StepHook> keep_top_hook(const KeepTop& rule);

// Of each (layer without a window, KV head) slot i goes into slot into[head][i]; those that go into
// themselves stay, as many in each head. Keys and values become means of what goes into a
// slot, by how often it counts: e to the power of plane `weights`, whose numbers become those of
// the sums. Throws InvalidArgument for other lists, with nothing changed, and what SequenceState's
// plane(), merge() and retain() throw; Unsupported where such layers have several page tables.
EFFINFER_API void merge_slots(SequenceState& sequence, std::span<const std::vector<int32_t>> into,
                              std::string_view weights);

}  // namespace effinfer
