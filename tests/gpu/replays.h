// How many recordings were replayed since, which the emulator counts and a GPU does not.
#pragma once

#include <cstdint>

namespace effinfer {

class Replays {
 public:
  Replays();
  void expect_at_least(int64_t count) const;
  void expect_at_most(int64_t count) const;

 private:
  int64_t before_;
};

}  // namespace effinfer
