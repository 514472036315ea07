#include <cstring>

#include "core/float16.h"
#include "core/memory.h"
#include "ops/paged_batch.h"

namespace effinfer::ops {
namespace {

// Zeros; in huge pages where there are many, as a token's keys of every head are read in one go.
std::shared_ptr<void> allocate(size_t bytes) {
  std::shared_ptr<void> zeros = memory_of({}).allocate(bytes, Pages::huge);
  if (!zeros) {
    throw OutOfMemory("[paged_kv] no memory for " + std::to_string(bytes) + " bytes of pages");
  }
  return zeros;
}

float element(DType dtype, const uint8_t* data, int64_t offset, float scale) {
  const auto at = [&]<class T>(T) {
    T value;
    std::memcpy(&value, data + static_cast<size_t>(offset) * sizeof(T), sizeof(T));
    return value;
  };
  switch (dtype) {
    case DType::f32:
      return at(float{});
    case DType::f16:
      return f16_to_f32(at(uint16_t{}));
    case DType::bf16:
      return bf16_to_f32(at(uint16_t{}));
    default:
      return scale * static_cast<float>(at(int8_t{}));
  }
}

}  // namespace

struct PagedKv::Impl {
  KvLayer layer;
  std::shared_ptr<void> pages;   // K, then V
  std::shared_ptr<void> scales;  // K, then V
};

PagedKv::PagedKv(int32_t num_pages, int32_t num_kv_heads, int32_t head_dim, DType dtype)
    : impl_(std::make_unique<Impl>()) {
  const Validator check("paged_kv");
  check.positive("num_pages", num_pages);
  check.positive("num_kv_heads", num_kv_heads);
  check.expect(head_dim > 0 && head_dim <= 256 && head_dim % 16 == 0, "head_dim",
               "a multiple of 16 up to 256", std::to_string(head_dim));
  check.expect(
      dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::i8,
      "dtype", "f32, f16, bf16 or i8", name(dtype));
  KvLayer& layer = impl_->layer;
  layer.dtype = dtype;
  layer.num_kv_heads = num_kv_heads;
  layer.head_dim = head_dim;
  layer.num_pages = num_pages;
  // At most 2^62 places, times 2 * 64 KiB.
  const size_t heads = static_cast<size_t>(num_pages) * static_cast<size_t>(num_kv_heads);
  size_t plane = 0;
  if (__builtin_mul_overflow(heads, 2 * layer.head_bytes(), &plane)) {
    throw OutOfMemory("[paged_kv] the size of the pages overflows");
  }
  impl_->pages = allocate(plane);
  layer.k = static_cast<uint8_t*>(impl_->pages.get());
  layer.v = layer.k + plane / 2;
  if (dtype != DType::i8) return;
  const size_t count = heads * static_cast<size_t>(kPageSize);
  impl_->scales = allocate(2 * count * sizeof(float));
  layer.k_scale = static_cast<float*>(impl_->scales.get());
  layer.v_scale = layer.k_scale + count;
}

PagedKv::~PagedKv() = default;
PagedKv::PagedKv(PagedKv&&) noexcept = default;
PagedKv& PagedKv::operator=(PagedKv&&) noexcept = default;

int32_t PagedKv::num_pages() const {
  return impl_->layer.num_pages;
}
int32_t PagedKv::num_kv_heads() const {
  return impl_->layer.num_kv_heads;
}
int32_t PagedKv::head_dim() const {
  return impl_->layer.head_dim;
}
DType PagedKv::dtype() const {
  return impl_->layer.dtype;
}

void PagedKv::read(float* k, float* v) const {
  const KvLayer& layer = impl_->layer;
  const int64_t dim = layer.head_dim;
  const int64_t p = 4 / dtype_info(layer.dtype).block_bytes;
  const int64_t heads = static_cast<int64_t>(layer.num_pages) * layer.num_kv_heads;
  for (int64_t head = 0; head < heads; ++head) {
    const uint8_t* k_data = layer.k_head(0, head);
    const uint8_t* v_data = layer.v_head(0, head);
    for (int64_t token = 0; token < kPageSize; ++token) {
      const int64_t place = head * kPageSize + token;
      const float k_scale = layer.k_scale == nullptr ? 1.0f : layer.k_scale[place];
      const float v_scale = layer.v_scale == nullptr ? 1.0f : layer.v_scale[place];
      for (int64_t d = 0; d < dim; ++d) {
        k[place * dim + d] = element(layer.dtype, k_data, k_offset(token, d, dim, p), k_scale);
        v[place * dim + d] = element(layer.dtype, v_data, v_offset(token, d, dim, p), v_scale);
      }
    }
  }
}

const KvLayer& layer_of(const PagedKv& kv) {
  return kv.impl().layer;
}

}  // namespace effinfer::ops
