// TernaryDot of the level that is compiled: the sums of digits of matmul_ternary.simd.cpp.
#pragma once

#include "cpu/level.h"
#if EFFINFER_LEVEL_PORTABLE
#include "cpu/vectors/ternary_dot_portable.h"
#elif EFFINFER_LEVEL_AVX2
#include "cpu/vectors/ternary_dot_avx2.h"
#else
#include "cpu/vectors/ternary_dot_avx512.h"
#endif
