// Lines of K and V pages (ops/kv_layout.h) as vectors of the level that is compiled.
#pragma once

#include "cpu/level.h"
#if EFFINFER_LEVEL_PORTABLE
#include "cpu/vectors/kv_portable.h"
#elif EFFINFER_LEVEL_AVX2
#include "cpu/vectors/kv_avx2.h"
#elif EFFINFER_LEVEL_AVX512
#include "cpu/vectors/kv_avx512.h"
#else
#include "cpu/vectors/kv_avx512bf16.h"
#endif
