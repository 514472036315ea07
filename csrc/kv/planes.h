// Planes of a sequence (effinfer/slot_plane.h): how they grow and move with its slots.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "effinfer/slot_plane.h"

namespace effinfer::kv {

struct Plane {
  std::string name;
  int64_t num_heads = 0;
  int64_t stride = 0;         // slots that there is room for
  std::vector<float> values;  // [num_heads][stride]

  SlotPlane view(int64_t num_slots) { return {values.data(), stride, num_heads, num_slots}; }
  // Slots [first, end) are new: zeros.
  void add(int64_t first, int64_t end);
  // Slot first + rows[i] becomes first + i; rows strictly increase.
  void close_up(int64_t first, std::span<const int32_t> rows);
  // Slot i of a head becomes what slot lists[head][i] was, or lists[0][i] of one list for all.
  void retain(std::span<const std::vector<int32_t>> lists);
  // Slots [begin, end) go; those behind, up to num_slots, move up.
  void evict(int64_t begin, int64_t end, int64_t num_slots);
};

}  // namespace effinfer::kv
