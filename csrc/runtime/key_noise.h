// Noise of a sequence's keys, by which methods that rank them explore (Keyformer, Adnan et al.,
// arXiv:2403.09054, section 3.2).
#pragma once

#include <cstdint>
#include <span>

#include "effinfer/slot_plane.h"

namespace effinfer::runtime {

// Of a request: greedy texts are to be the same again, so it is its prompt's, and no seed of draws.
uint64_t noise_seed(std::span<const int32_t> prompt);

// Heads [begin, end) of a plane, whose layers have one page table of so many slots.
struct NoisyHeads {
  SlotPlane plane;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t num_slots = 0;
};

// Standard Gumbel noise of the heads' last `count` slots, which are keys of positions from
// `position` on: a function of seed, position and head.
void set_gumbel_noise(uint64_t seed, int64_t position, int64_t count, const NoisyHeads& heads);

}  // namespace effinfer::runtime
