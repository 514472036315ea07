// Panel of the level that is compiled: what matmul_panel.simd.cpp unpacks and multiplies.
#pragma once

#include "cpu/level.h"
#if EFFINFER_LEVEL_PORTABLE
#include "cpu/vectors/panel_portable.h"
#elif EFFINFER_LEVEL_AVX2
#include "cpu/vectors/panel_avx2.h"
#elif EFFINFER_LEVEL_AVX512
#include "cpu/vectors/panel_avx512.h"
#else
#include "cpu/vectors/panel_avx512bf16.h"
#endif
