// Lookup of the level that is compiled: the tables of matmul_lookup.simd.cpp.
#pragma once

#include "cpu/level.h"
#if EFFINFER_LEVEL_AVX2
#include "cpu/vectors/lookup_avx2.h"
#else
#include "cpu/vectors/lookup_avx512.h"
#endif
