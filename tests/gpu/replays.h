// How many recordings were replayed since.
#pragma once

#include <cstdint>

#include "cpp/check.h"
#include "gpu/host_backend.h"

namespace effinfer {

class Replays {
 public:
  void expect_at_least(int64_t count) const { CHECK(so_far() >= count); }
  void expect_at_most(int64_t count) const { CHECK(so_far() <= count); }

 private:
  int64_t so_far() const { return cuda::host::num_replays() - before_; }

  const int64_t before_ = cuda::host::num_replays();
};

}  // namespace effinfer
