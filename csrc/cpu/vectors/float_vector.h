// F32x16 of the level that is compiled: 16 floats, as vectors/math.h describes them.
#pragma once

#include "cpu/level.h"
#if EFFINFER_LEVEL_PORTABLE
#include "cpu/vectors/math_portable.h"
#elif EFFINFER_LEVEL_AVX2
#include "cpu/vectors/math_avx2.h"
#else
#include "cpu/vectors/math_avx512.h"
#endif
