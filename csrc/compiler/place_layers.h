// How many of a model's layers run on the first of two devices, where nobody says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace effinfer::compiler {

// A device that may have layers.
struct LayerDevice {
  std::string name;
  double rate = 0;  // bytes a second at which it reads its memory
  size_t free_bytes = 0;
  // Of what so many layers take there, the first ones of the front, the last ones of the other; it
  // grows with them. All of them: the whole model.
  std::function<size_t(int32_t)> bytes_of = nullptr;
};

struct LayerChoice {
  int32_t front = 0;
  std::string reason;
};

// Layers run one after the other, each at the rate of its device: the faster one gets as many as
// its memory holds, the other one the rest. Of two sets of cores over one memory, each of which
// reads its part best, they get layers in proportion to their rates, one at least.
LayerChoice choose_layers(int32_t layers, const LayerDevice& front, const LayerDevice& back,
                          bool one_memory);

}  // namespace effinfer::compiler
