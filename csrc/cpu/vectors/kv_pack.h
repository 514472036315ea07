// KvPack of the level that is compiled: rows of keys and values into lines (ops/kv_layout.h).
#pragma once

#include "cpu/level.h"
#if EFFINFER_LEVEL_PORTABLE
#include "cpu/vectors/kv_pack_portable.h"
#elif EFFINFER_LEVEL_AVX2
#include "cpu/vectors/kv_pack_avx2.h"
#else
#include "cpu/vectors/kv_pack_avx512.h"
#endif
