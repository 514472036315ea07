// Decoding's matmuls on Hopper with slices of k that a weight of other rows would have, so that a
// small one comes where warps share tokens, or have two slices each.
#include <functional>

#include "cpp/check.h"
#include "cuda/stream_launch.h"
#include "gpu/hopper_device.h"
#include "gpu/matmul_cases.h"
#include "gpu/mutations.h"

namespace effinfer {
namespace {

using ops::Arithmetic;

struct Launch {
  std::vector<float> out;
  int run_bits;
};

Launch multiply(const GpuWeight& weight, const GpuOperand& x, int slice_bits) {
  const ops::PackedWeight view = weight.view();
  const DeviceArray<float> out(static_cast<size_t>(x.view.rows * view.rows));
  const ops::MatmulPart part = {view, nullptr, nullptr, out.data(), view.rows};
  cuda::StreamParams params;
  params.x = static_cast<const uint8_t*>(x.view.data);
  params.x_row_bytes = x.view.row_bytes();
  params.tokens = static_cast<int32_t>(x.view.rows);
  params.superblocks = static_cast<int32_t>(view.cols / ops::kSuperblock);
  params.header_row_bytes = ops::header_row_bytes(view.cols);
  params.header_bytes = ops::header_bytes(view.format, view.cols);
  params.parts[0] = cuda::stream_part(part);
  params.parts[0].slice_bits = slice_bits;
  const std::unique_ptr<Queue> queue = make_queue(kGpu);
  const bool is_u4 = view.format.bits == ops::QuantBits::u4;
  (is_u4 ? cuda::launch_u4 : cuda::launch_u8_dense)(view.format, params, *queue);
  queue->wait();
  return {out.values(), params.run_bits};
}

void expect_barriers_matter(const std::function<std::vector<float>()>& run) {
  if (cuda::host::detected_races() != cuda::host::Races::all) return;
  const std::vector<float> right = run();
  expect_every_barrier_matters([&] { return same_bits(run(), right); });
}

// Eight units of two slices share a block, and the warps of a slice its tokens, which come in three
// places, as rows or in boxes.
TEST("units share tokens of several places") {
  const OnHopper machine;
  std::mt19937 random(23);
  constexpr int64_t kCols = 64 * 20;
  for (const int64_t tokens : {5, 11}) {
    const GpuWeight weight(DType::q8_0, 8 * 32 - 20, kCols, random);
    const GpuOperand x(Arithmetic::bf16, tokens, kCols, normals(tokens * kCols, random));
    check_product(x, weight, multiply(weight, x, 1).out, expected_output);
    expect_barriers_matter([&] { return multiply(weight, x, 1).out; });
  }
}

// A GPU has the multiprocessors that it has: fewer than 200.
bool is_emulated() {
  return cuda::host::shared_bytes() != 0;
}

// Where units are more than multiprocessors each warp has two slices, of one place or of three and
// of one, two or four superblocks a place; but not where slices are not equally long.
TEST("a warp has two slices in a row where blocks are more than multiprocessors") {
  std::mt19937 random(24);
  const int64_t units = is_emulated() ? 3 : 200;
  for (const int64_t superblocks : {16, 3 * 16, 6 * 16, 4 * 16, 20}) {
    for (const DType dtype : {DType::q4_0, DType::q4_k, DType::q8_0}) {
      const int64_t cols = 64 * superblocks;
      const GpuWeight weight(dtype, units * 32 - 20, cols, random);
      const GpuOperand x(Arithmetic::bf16, 1, cols, normals(cols, random));
      const OnHopper machine(2);
      const Launch two = multiply(weight, x, 4);
      CHECK_EQ(two.run_bits, superblocks % 16 == 0 ? 1 : 0);
      check_product(x, weight, two.out, expected_output);
      if (!is_emulated()) continue;
      if (superblocks == 3 * 16 && dtype == DType::q4_k) {
        expect_barriers_matter([&] { return multiply(weight, x, 4).out; });
      }
      cuda::host::set_multiprocessors(3);
      const Launch one = multiply(weight, x, 4);
      CHECK_EQ(one.run_bits, 0);
      CHECK(same_bits(two.out, one.out));
    }
  }
}

}  // namespace
}  // namespace effinfer

CHECK_MAIN()
