// Levels: avx2 avx512 avx512bf16
#include "cpu/peak.h"

#include <immintrin.h>

#include "cpu/level.h"

namespace effinfer::cpu::EFFINFER_LEVEL {
namespace {

// These are more sums than latency x throughput of a multiply-add on any core (10); with two
// operands and a product they fit in the 16 registers of AVX2.
constexpr int kSums = 12;

#if EFFINFER_LEVEL_AVX2

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

constexpr PeakProbes kProbes = {peak_f32, peak_int8, nullptr};

#elif EFFINFER_LEVEL_AVX512

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

constexpr PeakProbes kProbes = {peak_f32, peak_int8, nullptr};

#else

int64_t peak_bf16(int64_t rounds) {
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

constexpr PeakProbes kProbes = {nullptr, nullptr, peak_bf16};

#endif

}  // namespace
}  // namespace effinfer::cpu::EFFINFER_LEVEL

namespace effinfer::cpu {

template <>
const PeakProbes& kernels<Level::EFFINFER_LEVEL>() {
  return EFFINFER_LEVEL::kProbes;
}

}  // namespace effinfer::cpu
