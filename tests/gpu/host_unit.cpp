// What a thread does alone or with its warp. As fiber.cpp, never built with -fsanitize=thread.
#include "gpu/host_unit.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/float16.h"
#include "gpu/block.h"
#include "gpu/fiber.h"
#include "gpu/fragments.h"

namespace effinfer::cuda::host {

void Unit::refuse(const char* what, const char* message) {
  throw std::logic_error(std::string(what) + ": " + message);
}

void Unit::require_shared(const void* pointer, size_t bytes, const char* what) const {
  require_aligned(pointer, bytes, what);
  require(in_shared(pointer) && in_shared(static_cast<const char*>(pointer) + bytes - 1), what,
          "expected an address in shared memory");
}

void Unit::wait_for_inputs() {
  const Machine machine(*owner_, owner_->thread(*this).progress);
  owner_->thread(*this).progress.is_early = false;
}

// Not where it is called: there the unit's own numbers are watched, too.
void Unit::begin_load(const void* pointer, size_t bytes, size_t alignment) {
  require_global(pointer, alignment, "load");
  if (owner_->observer() == nullptr) return;
  const Progress& progress = owner_->thread(*this).progress;
  const Machine machine(*owner_, progress);
  owner_->observer()->loads(progress, pointer, bytes);
}

void Unit::tell_add(void* pointer, size_t bytes) {
  if (owner_->observer() == nullptr) return;
  const Progress& progress = owner_->thread(*this).progress;
  const Machine machine(*owner_, progress);
  owner_->observer()->adds(progress, pointer, bytes);
}

void Unit::add_shared(uint32_t* pointer, uint32_t value) {
  require_shared(pointer, sizeof value, "add_shared");
  tell_add(pointer, sizeof value);
  std::atomic_ref(*pointer).fetch_add(value, std::memory_order_relaxed);
}

void Unit::add_global(uint64_t* pointer, uint64_t value) {
  require_global(pointer, sizeof value, "add_global");
  tell_add(pointer, sizeof value);
  std::atomic_ref(*pointer).fetch_add(value, std::memory_order_relaxed);
}

void Unit::count_atomic() {
  Block::Thread& mine = owner_->thread(*this);
  const Machine machine(*owner_, mine.progress);
  owner_->release(mine.progress);
}

void Unit::shuffle(const void* in, void* out, size_t bytes, int from, const char* what,
                   Where where) {
  struct Slot {
    const void* in;
    void* out;
    size_t bytes;
    int from;
  } slot{in, out, bytes, from};
  owner_->meet(*this, {true, false, what, where}, &slot, [](void** all) {
    for (int i = 0; i < kWarp; ++i) {
      const auto* mine = static_cast<Slot*>(all[i]);
      const void* theirs = static_cast<Slot*>(all[mine->from & (kWarp - 1)])->in;
      if (mine->bytes == 4) {  // mostly: no call
        std::memcpy(mine->out, theirs, 4);
      } else {
        std::memcpy(mine->out, theirs, mine->bytes);
      }
    }
  });
}

uint32_t Unit::ballot(bool value, Where where) {
  struct Slot {
    bool in;
    uint32_t out;
  } slot{value, 0};
  owner_->meet(*this, {true, false, "ballot", where}, &slot, [](void** all) {
    uint32_t bits = 0;
    for (int i = 0; i < kWarp; ++i) {
      bits |= static_cast<uint32_t>(static_cast<Slot*>(all[i])->in) << i;
    }
    for (int i = 0; i < kWarp; ++i) static_cast<Slot*>(all[i])->out = bits;
  });
  return slot.out;
}

void Unit::ldmatrix(uint32_t (&out)[4], const void* row, Where where) {
  load_matrices(out, row, false, where);
}

void Unit::ldmatrix_transposed(uint32_t (&out)[4], const void* row, Where where) {
  load_matrices(out, row, true, where);
}

// Lane i brings row i % 8 of matrix i / 8, and gets elements 2 (i % 4) and the next one of row
// i / 4 of each, or of column i / 4 (PTX ISA, ldmatrix).
void Unit::load_matrices(uint32_t (&out)[4], const void* row, bool transposed, Where where) {
  constexpr size_t kRowBytes = 16;
  require_shared(row, kRowBytes, "ldmatrix");
  tell_read(row, kRowBytes);
  if (owner_->observer() != nullptr) {
    owner_->observer()->reads(owner_->thread(*this).progress, row, kRowBytes);
  }
  struct Slot {
    const char* row;
    uint32_t* out;
    bool transposed;
  } slot{static_cast<const char*>(row), out, transposed};
  owner_->meet(*this, {true, false, "ldmatrix", where}, &slot, [](void** all) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      const auto at = [&](int r, int column) {
        uint16_t element;
        std::memcpy(&element, static_cast<Slot*>(all[matrix * 8 + r])->row + 2 * column, 2);
        return uint32_t{element};
      };
      for (int i = 0; i < kWarp; ++i) {
        const auto* mine = static_cast<Slot*>(all[i]);
        const int own = i / 4, next = i % 4 * 2;
        mine->out[matrix] = mine->transposed ? at(next, own) | at(next + 1, own) << 16
                                             : at(own, next) | at(own, next + 1) << 16;
      }
    }
  });
}

void Unit::mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Where where) {
  using Bf16 = Product<float, 2>;
  Bf16::Slot slot{d, a, b};
  owner_->meet(*this, {true, false, "mma", where}, &slot, Bf16::multiply<of_bf16>);
}

void Unit::mma_first(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Where where) {
  for (float& sum : d) sum = 0.0f;
  mma(d, a, b, where);
}

void Unit::mma_onto(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                    const float (&c)[4], Where where) {
  for (int i = 0; i < 4; ++i) d[i] = c[i];
  mma(d, a, b, where);
}

void Unit::mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Where where) {
  using F16 = Product<float, 2>;
  F16::Slot slot{d, a, b};
  owner_->meet(*this, {true, false, "mma_f16", where}, &slot, F16::multiply<host::of_f16>);
}

void Unit::mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Where where) {
  using S8 = Product<int32_t, 4>;
  S8::Slot slot{d, a, b};
  owner_->meet(*this, {true, false, "mma_s8", where}, &slot, S8::multiply<of_s8>);
}

// Any NaN becomes the one that the instruction gives.
uint32_t Unit::bf16x2(float low, float high) {
  constexpr uint32_t kNan = 0x7fff;
  const auto rounded = [](float x) { return std::isnan(x) ? kNan : uint32_t{f32_to_bf16(x)}; };
  return rounded(low) | rounded(high) << 16;
}

uint32_t Unit::f16x2(float low, float high) {
  return uint32_t{f32_to_f16(low)} | uint32_t{f32_to_f16(high)} << 16;
}

float Unit::from_f16(uint16_t bits) {
  return f16_to_f32(bits);
}

uint32_t Unit::fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  const auto fma = [&](int half) {
    const auto of = [&](uint32_t pair) { return of_bf16(pair >> 16 * half & 0xffff); };
    return std::fma(of(a), of(b), of(c));
  };
  return bf16x2(fma(0), fma(1));
}

uint32_t Unit::fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  const auto fma = [&](int half) {
    const auto of = [&](uint32_t pair) {
      return f16_to_f32(static_cast<uint16_t>(pair >> 16 * half & 0xffff));
    };
    return std::fma(of(a), of(b), of(c));
  };
  return f16x2(fma(0), fma(1));
}

namespace {
float without_subnormals(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}
}  // namespace

float Unit::exp2(float x) {
  return without_subnormals(std::exp2(without_subnormals(x)));
}

float Unit::reciprocal(float x) {
  return without_subnormals(1.0f / without_subnormals(x));
}

uint32_t Unit::permute(uint32_t a, uint32_t b, uint32_t picks) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= static_cast<uint32_t>(bytes >> 8 * (picks >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return out;
}

}  // namespace effinfer::cuda::host
