// Lines of K and V pages as floats (see ops/kv_layout.h), element by element.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/float16.h"
#include "cpu/vectors/math_portable.h"

namespace effinfer::cpu::portable {
namespace {

template <class Element, bool kIsScaled>
struct KvView {
  using V = F32x16;
  static constexpr int P = 4 / static_cast<int>(sizeof(typename Element::Bits));
  static constexpr bool kScaled = kIsScaled;
  static constexpr bool kPairs = false;
  static constexpr int wide(int) { return 1; }

  static void expand(const uint8_t* line, V (&out)[P]) {
    typename Element::Bits bits[16 * P];
    std::memcpy(bits, line, sizeof(bits));
    for (int j = 0; j < P; ++j) {
      float lanes[16];
      for (int i = 0; i < 16; ++i) lanes[i] = Element::to_float(bits[i * P + j]);
      out[j] = V::load(lanes);
    }
  }
};

struct F32Element {
  using Bits = float;
  static float to_float(float value) { return value; }
};
struct F16Element {
  using Bits = uint16_t;
  static float to_float(uint16_t bits) { return f16_to_f32(bits); }
};
struct Bf16Element {
  using Bits = uint16_t;
  static float to_float(uint16_t bits) { return bf16_to_f32(bits); }
};
struct I8Element {
  using Bits = int8_t;
  static float to_float(int8_t value) { return value; }
};

using KvF32 = KvView<F32Element, false>;
using KvF16 = KvView<F16Element, false>;
using KvBf16 = KvView<Bf16Element, false>;
using KvI8 = KvView<I8Element, true>;

}  // namespace
}  // namespace effinfer::cpu::portable
