// Symbol visibility: the library hides everything that is not marked EFFINFER_API.
#pragma once

#if defined(_WIN32)
#define EFFINFER_API
#else
#define EFFINFER_API __attribute__((visibility("default")))
#endif
