// Caches of 8-bit numbers: results have the bits of 16-bit caches with the same numbers.
#include <string>

#include "cpp/check.h"
#include "gpu/caller_attention.h"
#include "gpu/mutations.h"

namespace effinfer {
namespace {

TEST("8-bit caches have the bits of the same numbers in 16") {
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  for (const DType narrow : {DType::f8_e4m3, DType::f8_e5m2, DType::i8}) {
    for (const Case& c : {
             Case{.kv_len = {5, 0, 70}, .rows = {1, 0, 1}, .narrow = narrow},
             Case{.kv_len = {40, 300},
                  .rows = {9, 33},
                  .heads = 2,
                  .order = ops::KvOrder::hnd,
                  .narrow = narrow},
             Case{.kv_len = {600},
                  .rows = {3},
                  .page_size = 7,
                  .dims = 80,
                  .window_left = 50,
                  .sink_tokens = 9,
                  .narrow = narrow},
             Case{.kv_len = {70, 3}, .rows = {2, 3}, .group = 20, .dims = 128, .narrow = narrow},
             Case{.kv_len = {90}, .rows = {1}, .page_size = 1, .dims = 16, .narrow = narrow},
             Case{.kv_len = {300}, .rows = {1}, .dims = 208, .narrow = narrow},
             Case{.kv_len = {90}, .rows = {2}, .dims = 256, .narrow = narrow},
         }) {
      const Attention attention(c);
      const ops::AttentionPlan plan = attention.plan();
      std::vector<float> wide_lse, lse;
      const std::vector<uint16_t> wide = attention.run_there(plan, *queue, &wide_lse);
      CHECK(attention.run_there(plan, *queue, &lse, true) == wide);
      CHECK(lse == wide_lse);
    }
  }
}

TEST("they need each of the barriers, too") {
  if (cuda::host::detected_races() != cuda::host::Races::all) {
    check::skip("races are not detected in this build");
  }
  for (const int32_t dims : {64, 256}) {
    const Attention attention(
        {.kv_len = {600, 70}, .rows = {1, 2}, .group = 2, .dims = dims, .narrow = DType::f8_e4m3});
    const std::vector<uint16_t> right = attention.run_shares(1);
    expect_every_barrier_matters([&] {
      return attention.run_shares(1, nullptr, true) == right &&
             attention.run_shares(1000, nullptr, true) == right;
    });
  }
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
