// Pages to 4 or 2 bits: of each range the least and the greatest number, then codes to the nearest.
#include "ops/encode_pages.h"

#include "core/float16.h"
#include "cpu/level.h"
#include "cpu/vectors/kv.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

using V = KvBf16::V;

constexpr int64_t kLine = 64;  // bytes, and those of a row of codes

// Adding it rounds numbers below 2^22 to integers, to nearest even.
constexpr float kRounder = 0x1.8p23f;

// The numbers of a range in the even, or the odd, words of its lines.
template <int kBits, int kLines>
struct Column {
  static constexpr float kMostCode = (1 << kBits) - 1;
  V x[kLines];
  V inverse;  // of the step
  V least;

  // Sets the range, as binary16 has it.
  void measure(uint16_t& least_bits, uint16_t& step_bits) {
    V low = x[0];
    V high = x[0];
    for (int i = 1; i < kLines; ++i) {
      low = min(low, x[i]);
      high = max(high, x[i]);
    }
    least_bits = f32_to_f16(within_f16(-maximum(V::set(0.0f) - low)));
    const float from = f16_to_f32(least_bits);
    const float wanted = (maximum(high) - from) / kMostCode;
    step_bits = f32_to_f16(within_f16(wanted < 0.0f ? 0.0f : wanted));
    const float step = f16_to_f32(step_bits);
    inverse = V::set(step > 0.0f ? 1.0f / step : 0.0f);
    least = V::set(from);
  }
  V code(int line) const {
    const V place = max((x[line] - least) * inverse, V::set(0.0f));
    return min(place, V::set(kMostCode)) + V::set(kRounder) - V::set(kRounder);
  }

 private:
  static float within_f16(float x) {
    constexpr float kLargest = 65504.0f;
    return x < -kLargest ? -kLargest : x > kLargest ? kLargest : x;
  }
};

// The 32 words of a row from the sums of their codes, which floats hold exactly.
void store_row(V even, V odd, uint8_t* row) {
  float words[2][16];
  even.store(words[0]);
  odd.store(words[1]);
  uint32_t dwords[16];
  for (int i = 0; i < 16; ++i) {
    dwords[i] = static_cast<uint32_t>(static_cast<int32_t>(words[0][i])) |
                static_cast<uint32_t>(static_cast<int32_t>(words[1][i])) << 16;
  }
  __builtin_memcpy(row, dwords, sizeof(dwords));
}

// Lines of keys or values, whose words load(n, even, odd) gives, to rows of codes and to ranges.
template <int kBits, int kRangeLines, class Load>
void encode_lines(int64_t num_lines, uint8_t* codes, uint8_t* range_bytes, Load&& load) {
  constexpr int kRowLines = 16 / kBits;
  auto* ranges = reinterpret_cast<ops::CodeRange*>(range_bytes);
  for (int64_t first = 0; first < num_lines; first += kRowLines, codes += kLine) {
    V even = V::set(0.0f);
    V odd = V::set(0.0f);
    float weight = 1.0f;  // of a line's codes in a word
    for (int at = 0; at < kRowLines; at += kRangeLines) {
      Column<kBits, kRangeLines> evens;
      Column<kBits, kRangeLines> odds;
      for (int i = 0; i < kRangeLines; ++i) {
        load(first + at + i, evens.x[i], odds.x[i]);
      }
      ops::CodeRange& range = *ranges++;
      evens.measure(range.least_even, range.step_even);
      odds.measure(range.least_odd, range.step_odd);
      for (int i = 0; i < kRangeLines; ++i, weight *= 1 << kBits) {
        even = fma(evens.code(i), V::set(weight), even);
        odd = fma(odds.code(i), V::set(weight), odd);
      }
    }
    store_row(even, odd, codes);
  }
}

// The words of a line of bfloat16; of float32 two lines hold them.
void load_line(const uint8_t* line, V& even, V& odd) {
  V words[2];
  KvBf16::expand(line, words);
  even = words[0];
  odd = words[1];
}
void load_lines(const uint8_t* line, int64_t to_odd, V& even, V& odd) {
  even = V::load(reinterpret_cast<const float*>(line));
  odd = V::load(reinterpret_cast<const float*>(line + to_odd));
}

template <int kBits>
void encode_head(const ops::KvLayer& kv, const ops::PageCoding& page, int64_t head) {
  const ops::CodedPages& coded = kv.coded;
  const int64_t dim = kv.head_dim;
  const uint8_t* keys = kv.k_head(page.from, head);
  const uint8_t* values = kv.v_head(page.from, head);
  uint8_t* to = coded.head(page.to, head);
  const bool wide = kv.dtype == DType::f32;
  // Four groups of tokens of each pair of dimensions.
  encode_lines<kBits, ops::CodedPages::kKeyLines>(
      2 * dim, to, to + coded.code_bytes(), [&](int64_t n, V& even, V& odd) {
        const int64_t line = n % 4 * (dim / 2) + n / 4;
        if (wide) return load_lines(keys + 2 * line * kLine, kLine, even, odd);
        load_line(keys + line * kLine, even, odd);
      });
  to += coded.key_bytes();
  const int64_t row = dim / 16;  // lines of a pair of tokens
  encode_lines<kBits, kBits>(2 * dim, to, to + coded.code_bytes(), [&](int64_t n, V& even, V& odd) {
    const int64_t line = n / row * 2 * row + n % row;
    if (wide) return load_lines(values + line * kLine, row * kLine, even, odd);
    load_line(values + n * kLine, even, odd);
  });
}

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
void run<Level::EFFINFER_LEVEL>(const ops::EncodePagesProblem& p, Team& team) {
  using namespace EFFINFER_LEVEL;
  const auto encode = p.layers[0].coded.bits == 4 ? encode_head<4> : encode_head<2>;
  const int64_t heads = p.layers[0].num_kv_heads;
  team.for_chunks(p.num_layers * p.num_pages * heads, [&](int64_t task) {
    const int64_t page = task / heads;
    encode(p.layers[page / p.num_pages], p.pages[page % p.num_pages], task % heads);
  });
}

}  // namespace effinfer::cpu
