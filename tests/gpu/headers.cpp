// A program without tests, whose precompiled header others use.
#include "cpp/check.h"

CHECK_MAIN()
