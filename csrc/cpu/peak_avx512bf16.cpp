#include <immintrin.h>

#include "cpu/peak.h"

namespace effinfer::cpu::avx512bf16 {

int64_t peak_bf16(int64_t rounds) {
  constexpr int kSums = 12;  // latency x throughput of a core with two such units
  __m512 sums[kSums];
#pragma GCC unroll 16
  for (__m512& sum : sums) {
    sum = _mm512_set1_ps(1.0f);
    asm volatile("" : "+v"(sum));  // unlike the others, as far as the compiler knows
  }
  __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3a83));  // 0.001
  const __m512bh b = a;
  for (int64_t round = 0; round < rounds; ++round) {
    asm volatile("" : "+v"(a));
#pragma GCC unroll 16
    for (__m512& sum : sums) sum = _mm512_dpbf16_ps(sum, a, b);
  }
#pragma GCC unroll 16
  for (const __m512& sum : sums) asm volatile("" : : "v"(sum));
  return rounds * kSums * 32 * 2;
}

}  // namespace effinfer::cpu::avx512bf16
