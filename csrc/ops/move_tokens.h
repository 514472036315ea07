// Moving tokens within the engine's pages, and rotating their keys, on devices whose memory the
// host does not touch: what KvCache's keep(), retain(), evict() and reposition() ask for.
#pragma once

#include <cstdint>
#include <string>

#include "ops/kv_layers.h"

namespace effinfer::ops {

// K, V and scales of every head, move by move: a later one may read what none before it wrote, and
// write what any before it read.
struct MoveTokensProblem {
  static constexpr int32_t kMost = 64;

  KvLayers layers;
  int32_t count = 0;
  TokenPlace from[kMost];
  TokenPlace to[kMost];
};

// Of the sequence that has these pages, slot i of a head becomes what slot list[i] was, for each i
// from `first` to `count`. Lists strictly increase, so that list[i] >= i.
struct RetainSlotsProblem {
  KvLayers layers;
  const int32_t* pages = nullptr;
  const int32_t* slots = nullptr;  // [heads][count], or [count] for all heads
  int64_t list_stride = 0;         // `count`, or 0
  int32_t first = 0;
  int32_t count = 0;
};

// How a layer's keys are turned: pair d by the angle of number d.
struct KeyRotation {
  const float* cos = nullptr;  // [pairs], and the sines behind them
  int32_t pairs = 0;           // 0: keys are not rotated
  bool interleaved = false;    // pairs (2 d, 2 d + 1), else (d, d + pairs)
};

// Turns the keys of slots [first, end), counted from the first of these pages.
struct RotateKeysProblem {
  KvLayers layers;
  const KeyRotation* rotations = nullptr;  // of each layer
  const int32_t* pages = nullptr;
  int32_t num_pages = 0;
  int32_t first = 0;
  int32_t end = 0;
};

std::string describe(const MoveTokensProblem& problem);
std::string describe(const RetainSlotsProblem& problem);
std::string describe(const RotateKeysProblem& problem);

}  // namespace effinfer::ops
