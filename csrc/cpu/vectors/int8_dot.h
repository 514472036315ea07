// Int8Dot of the level that is compiled: the inner products of matmul_int8.simd.cpp.
#pragma once

#include "cpu/level.h"
#if EFFINFER_LEVEL_PORTABLE
#include "cpu/vectors/int8_dot_portable.h"
#elif EFFINFER_LEVEL_AVX2
#include "cpu/vectors/int8_dot_avx2.h"
#else
#include "cpu/vectors/int8_dot_avx512.h"
#endif
