// Stored keys, turned by a difference of positions: a block a page of a head, a thread a token, so
// that a warp's loads and stores are lines of the page. Bits are those of the CPU (kv/rotate.cpp).
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/bodies/any_float.h"
#include "cuda/bodies/head_pages.h"
#include "cuda/unit.h"
#include "ops/move_tokens.h"
#include "ops/operand.h"

namespace effinfer::cuda {

struct RotateKeys {
  static constexpr const char* kName = "rotate_keys";
  static constexpr int kThreads = ops::kPageSize;
  using Params = ops::RotateKeysProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int slot = unit.block % p.num_pages * kThreads + unit.thread;
    const int head = unit.block / p.num_pages;
    const ops::KeyRotation& rotation = p.rotations[head / p.layers.first.num_kv_heads];
    if (slot < p.first || slot >= p.end || rotation.pairs == 0) return;
    const ops::TokenPlace place = {unit.load(p.pages + slot / kThreads), unit.thread};
    const DType dtype = p.layers.first.dtype;
    if (dtype == DType::f32) {
      const HeadPages<float> pages(p.layers, head);
      for_pairs(unit, rotation, [&](int d) -> float& { return pages.key(place, d); });
    } else if (dtype == DType::i8) {
      rotate_scaled(unit, rotation, HeadPages<int8_t>(p.layers, head), place);
    } else {
      const HeadPages<uint16_t> pages(p.layers, head);
      for_pairs(unit, rotation,
                [&](int d) { return Narrow<Unit>{unit, dtype, pages.key(place, d)}; });
    }
  }

 private:
  // A number of 16 bits as a float.
  template <class Unit>
  struct Narrow {
    Unit& unit;
    DType dtype;
    uint16_t& bits;

    EFFINFER_DEVICE operator float() const { return float_of_bits(unit, dtype, bits); }
    EFFINFER_DEVICE void operator=(float x) const {
      bits = static_cast<uint16_t>(bits_of_float(unit, dtype, x));
    }
  };

  // at(d): dimension d, which is read and written.
  template <class Unit, class At>
  EFFINFER_DEVICE static void for_pairs(Unit& unit, const ops::KeyRotation& rotation, At&& at) {
    for (int d = 0; d < rotation.pairs; ++d) {
      const Pair pair = rotated(unit, rotation, d, at);
      at(first_of(rotation, d)) = pair.x;
      at(second_of(rotation, d)) = pair.y;
    }
  }

  EFFINFER_DEVICE static int first_of(const ops::KeyRotation& rotation, int d) {
    return rotation.interleaved ? 2 * d : d;
  }
  EFFINFER_DEVICE static int second_of(const ops::KeyRotation& rotation, int d) {
    return rotation.interleaved ? 2 * d + 1 : d + rotation.pairs;
  }

  struct Pair {
    float x;
    float y;
  };
  template <class Unit, class At>
  EFFINFER_DEVICE static Pair rotated(Unit& unit, const ops::KeyRotation& rotation, int d,
                                      At&& at) {
    const float cos = unit.load(rotation.cos + d);
    const float sin = unit.load(rotation.cos + rotation.pairs + d);
    const float x = at(first_of(rotation, d));
    const float y = at(second_of(rotation, d));
    return {unit.mul(x, cos) - unit.mul(y, sin), unit.mul(x, sin) + unit.mul(y, cos)};
  }

  // Twice over the key: its largest magnitude gives the new scale.
  template <class Unit>
  EFFINFER_DEVICE static void rotate_scaled(Unit& unit, const ops::KeyRotation& rotation,
                                            const HeadPages<int8_t>& pages, ops::TokenPlace place) {
    const float before = pages.key_scale(place);
    const auto at = [&](int d) { return unit.mul(pages.key(place, d), before); };
    float highest = 0.0f;
    bool finite = true;
    const auto look = [&](float x) {
      finite = finite && fabsf(x) < INFINITY;
      highest = fmaxf(highest, fabsf(x));
    };
    for (int d = 0; d < rotation.pairs; ++d) {
      const Pair pair = rotated(unit, rotation, d, at);
      look(pair.x);
      look(pair.y);
    }
    for (int d = 2 * rotation.pairs; d < pages.dims(); ++d) look(at(d));
    const float scale = !finite ? NAN : highest < ops::kSmallestBlock ? 0.0f : highest / 127.0f;
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    const auto put = [&](int d, float x) {
      const float rounded = inverse == 0.0f ? 0.0f : rintf(unit.mul(x, inverse));
      pages.key(place, d) = static_cast<int8_t>(rounded);
    };
    for (int d = 0; d < rotation.pairs; ++d) {
      const Pair pair = rotated(unit, rotation, d, at);
      put(first_of(rotation, d), pair.x);
      put(second_of(rotation, d), pair.y);
    }
    for (int d = 2 * rotation.pairs; d < pages.dims(); ++d) put(d, at(d));
    pages.key_scale(place) = scale;
  }
};

}  // namespace effinfer::cuda
