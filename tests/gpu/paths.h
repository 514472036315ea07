// What tests leave out under AddressSanitizer, where kernels run many times as long: it is there
// for accesses, so it needs each path through the code once, and not each value that takes it.
#pragma once

#include <algorithm>
#include <span>

#include "cpp/check.h"

namespace effinfer {

#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kEveryValue = false;
#else
inline constexpr bool kEveryValue = true;
#endif

// At the start of a test that takes no path but those of others of its program.
inline void needs_every_value() {
  if (!kEveryValue) check::skip("other values on paths that other tests take");
}

// Cases that take the same path: all, or the first.
template <class Cases>
auto of_one_path(const Cases& cases) {
  const std::span all(cases);
  return kEveryValue ? all : all.first(std::min<size_t>(all.size(), 1));
}

}  // namespace effinfer
