// 8-bit numbers as the 16-bit ones that kernels multiply: every one of them.
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/float16.h"
#include "core/float8.h"
#include "cpp/check.h"
#include "cuda/bodies/narrow_numbers.h"
#include "gpu/unit_kernels.h"

namespace effinfer::cuda {
namespace {

// Lane i widens the 16 numbers from 16 i on: of 256.
template <DType kType, DType kNarrow>
struct Widen {
  static constexpr int kThreads = 32;
  struct Shared {};
  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const WordParams& p, Shared&) {
    if (unit.lane >= 16) return;
    Quad narrow;
    for (int i = 0; i < 4; ++i) narrow.words[i] = p.in[unit.lane * 4 + i];
    Quad both[2];
    NarrowNumbers<kType>(kNarrow).widen(unit, narrow, both[0], both[1]);
    for (int i = 0; i < 8; ++i) p.out[unit.lane * 8 + i] = both[i / 4].words[i % 4];
  }
};

float value_of(DType dtype, uint32_t byte) {
  const auto bits = static_cast<uint8_t>(byte);
  if (dtype == DType::f8_e4m3) return f8_e4m3_to_f32(bits);
  return dtype == DType::f8_e5m2 ? f8_e5m2_to_f32(bits)
                                 : static_cast<float>(static_cast<int8_t>(bits));
}

template <DType kType, DType kNarrow>
void check_all() {
  std::vector<uint32_t> in;
  for (uint32_t i = 0; i < 256; i += 4) in.push_back(i * 0x01010101 + 0x03020100);
  const auto out = words_of<WordKernel<Widen<kType, kNarrow>>>(in, 128);
  int failures = 0;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const auto half = static_cast<uint16_t>(out[byte / 2] >> 16 * (byte % 2));
    const float got = kType == DType::f16 ? f16_to_f32(half) : bf16_to_f32(half);
    const float want = value_of(kNarrow, byte);
    const bool same = std::isnan(want) ? std::isnan(got) : got == want;
    // A zero keeps its sign.
    failures += same && (kNarrow == DType::i8 || std::signbit(got) == std::signbit(want)) ? 0 : 1;
  }
  CHECK_EQ(failures, 0);
}

template <DType kType>
void check_types() {
  check_all<kType, DType::f8_e4m3>();
  check_all<kType, DType::f8_e5m2>();
  check_all<kType, DType::i8>();
}

TEST("every number of e4m3, e5m2 and int8, as bfloat16 and as float16") {
  check_types<DType::bf16>();
  check_types<DType::f16>();
}

}  // namespace
}  // namespace effinfer::cuda

CHECK_MAIN()
