// Loops of independent multiply-adds in registers: what no kernel of that arithmetic can pass.
#pragma once

#include <cstdint>

namespace effinfer::cpu {

// Does `rounds` rounds and returns the number of operations, a multiply-add being two.
using PeakProbe = int64_t (*)(int64_t rounds);

namespace avx2 {
int64_t peak_f32(int64_t rounds);
int64_t peak_int8(int64_t rounds);
}  // namespace avx2
namespace avx512 {
int64_t peak_f32(int64_t rounds);
int64_t peak_int8(int64_t rounds);
}  // namespace avx512
namespace avx512bf16 {
int64_t peak_bf16(int64_t rounds);
}  // namespace avx512bf16

}  // namespace effinfer::cpu
