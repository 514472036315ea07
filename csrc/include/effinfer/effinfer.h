// Everything: the whole C++ API.
#pragma once

#include "effinfer/compiler.h"
#include "effinfer/device.h"
#include "effinfer/dtype.h"
#include "effinfer/engine.h"
#include "effinfer/error.h"
#include "effinfer/gguf.h"
#include "effinfer/graph.h"
#include "effinfer/kv_cache.h"
#include "effinfer/model.h"
#include "effinfer/sampling.h"
#include "effinfer/tensor.h"
#include "effinfer/threads.h"
#include "effinfer/version.h"
#include "effinfer/weights.h"
