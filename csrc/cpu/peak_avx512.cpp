#include <immintrin.h>

#include "cpu/peak.h"

namespace effinfer::cpu::avx512 {
namespace {

constexpr int kSums = 12;  // more than latency x throughput of any core (10)

}  // namespace

int64_t peak_f32(int64_t rounds) {
  __m512 sums[kSums];
#pragma GCC unroll 16
  for (__m512& sum : sums) {
    sum = _mm512_set1_ps(1.0f);
    asm volatile("" : "+v"(sum));  // unlike the others, as far as the compiler knows
  }
  __m512 a = _mm512_set1_ps(1e-3f);
  const __m512 b = _mm512_set1_ps(1e-3f);
  for (int64_t round = 0; round < rounds; ++round) {
    asm volatile("" : "+v"(a));
#pragma GCC unroll 16
    for (__m512& sum : sums) sum = _mm512_fmadd_ps(a, b, sum);
  }
#pragma GCC unroll 16
  for (const __m512& sum : sums) asm volatile("" : : "v"(sum));
  return rounds * kSums * 16 * 2;
}

int64_t peak_int8(int64_t rounds) {
  __m512i sums[kSums];
#pragma GCC unroll 16
  for (__m512i& sum : sums) {
    sum = _mm512_setzero_si512();
    asm volatile("" : "+v"(sum));  // unlike the others, as far as the compiler knows
  }
  __m512i a = _mm512_set1_epi8(1);
  const __m512i b = _mm512_set1_epi8(1);
  for (int64_t round = 0; round < rounds; ++round) {
    asm volatile("" : "+v"(a));
#pragma GCC unroll 16
    for (__m512i& sum : sums) sum = _mm512_dpbusd_epi32(sum, a, b);
  }
#pragma GCC unroll 16
  for (const __m512i& sum : sums) asm volatile("" : : "v"(sum));
  return rounds * kSums * 64 * 2;
}

}  // namespace effinfer::cpu::avx512
