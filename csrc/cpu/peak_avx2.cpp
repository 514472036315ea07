#include <immintrin.h>

#include "cpu/peak.h"

namespace effinfer::cpu::avx2 {
namespace {

// More than latency x throughput of a multiply-add on any core (10); with two operands and a
// product they fit in the 16 registers.
constexpr int kSums = 12;

}  // namespace

int64_t peak_f32(int64_t rounds) {
  __m256 sums[kSums];
#pragma GCC unroll 16
  for (__m256& sum : sums) {
    sum = _mm256_set1_ps(1.0f);
    asm volatile("" : "+x"(sum));  // unlike the others, as far as the compiler knows
  }
  __m256 a = _mm256_set1_ps(1e-3f);
  const __m256 b = _mm256_set1_ps(1e-3f);
  for (int64_t round = 0; round < rounds; ++round) {
    asm volatile("" : "+x"(a));
#pragma GCC unroll 16
    for (__m256& sum : sums) sum = _mm256_fmadd_ps(a, b, sum);
  }
#pragma GCC unroll 16
  for (const __m256& sum : sums) asm volatile("" : : "x"(sum));
  return rounds * kSums * 8 * 2;
}

// The least that an exact product of bytes takes: 32 multiplications and 16 additions, then 16 more
// additions in int16. What widens to int32 is done once in several of them.
int64_t peak_int8(int64_t rounds) {
  __m256i sums[kSums];
#pragma GCC unroll 16
  for (__m256i& sum : sums) {
    sum = _mm256_setzero_si256();
    asm volatile("" : "+x"(sum));  // unlike the others, as far as the compiler knows
  }
  __m256i a = _mm256_set1_epi8(1);
  const __m256i b = _mm256_set1_epi8(1);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (__m256i& sum : sums) {
      asm volatile("" : "+x"(a));  // else one product serves all sums
      sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b));
    }
  }
#pragma GCC unroll 16
  for (const __m256i& sum : sums) asm volatile("" : : "x"(sum));
  return rounds * kSums * 32 * 2;
}

}  // namespace effinfer::cpu::avx2
