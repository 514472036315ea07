// Loops over constants.
#pragma once

#include <type_traits>
#include <utility>

namespace effinfer::cpu {
namespace {

// Calls body(integral_constant 0), ..., body(integral_constant count - 1).
template <int count, class Body>
[[gnu::always_inline]] inline void unroll(Body&& body) {
  [&]<int... index>(std::integer_sequence<int, index...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, index>()), ...);
  }(std::make_integer_sequence<int, count>());
}

}  // namespace
}  // namespace effinfer::cpu
