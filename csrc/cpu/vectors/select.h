// Comparing and picking lanes of the F32x16 of the level that is compiled.
#pragma once

#include "cpu/level.h"
#if EFFINFER_LEVEL_PORTABLE
#include "cpu/vectors/select_portable.h"
#elif EFFINFER_LEVEL_AVX2
#include "cpu/vectors/select_avx2.h"
#else
#include "cpu/vectors/select_avx512.h"
#endif
