// Tests of what only Hopper has.
#pragma once

namespace effinfer {

// While it lives the emulated device is one, with so many multiprocessors. On a GPU: skips the test
// where it is another one, which has the multiprocessors that it has.
class OnHopper {
 public:
  explicit OnHopper(int multiprocessors = 132);
  ~OnHopper();
  // Whether there is one to be had.
  static bool is_possible();
  OnHopper(const OnHopper&) = delete;
  OnHopper& operator=(const OnHopper&) = delete;
};

}  // namespace effinfer
