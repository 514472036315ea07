// What most tests of kernels include, as a precompiled header: for the emulator, and as it is on a
// GPU (tests/gpu/CMakeLists.txt).
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpp/arrays.h"
#include "cpp/check.h"
#include "effinfer/error.h"
#include "gpu/device_arrays.h"
#include "gpu/hopper_device.h"
#include "gpu/mutations.h"
#include "gpu/paths.h"
#include "gpu/replays.h"
