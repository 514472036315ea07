// Numbers that live with the slots of a sequence (KvCache::add_plane), such as what its rows
// attended to, and the rows of a step that add to them.
//
//   values   [heads][stride]   head: layer among those without a window * num_kv_heads + KV head
//             |-- num_slots --|-- room --|
#pragma once

#include <cstdint>
#include <string_view>

namespace effinfer {

struct SlotPlane {
  float* values = nullptr;
  int64_t stride = 0;  // a multiple of 64: the last slot's page has room
  int64_t num_heads = 0;
  int64_t num_slots = 0;
};

// The last `rows` rows of a sequence of a step: what they attend to is added by the graph's
// attention_mass nodes of this name.
struct ScoredRows {
  std::string_view name;
  SlotPlane plane;
  int32_t sequence = 0;
  int32_t rows = 0;
  SlotPlane noise = {};  // logits get as much of it as the node says; no values: none
};

// Of a sequence of a step: attention nodes of this name count a key as often as e to the power of
// its slot's number, so that 0 is once.
struct WeightedSlots {
  std::string_view name;
  SlotPlane plane;
  int32_t sequence = 0;
};

}  // namespace effinfer
