// The global operator new, counted: for tests that something allocates nothing. Included by one
// file of an executable.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

std::atomic<int64_t> allocations{0};

void* allocate(std::size_t size, std::size_t alignment) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  void* pointer =
      alignment <= alignof(std::max_align_t)
          ? std::malloc(size)
          : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (pointer == nullptr) throw std::bad_alloc();
  return pointer;
}

// Not inlined: compilers take free() for a mistake where they have seen operator new.
[[gnu::noinline]] void give_back(void* pointer) noexcept {
  std::free(pointer);
}

}  // namespace

void* operator new(std::size_t size) {
  return allocate(size, alignof(std::max_align_t));
}
void* operator new[](std::size_t size) {
  return allocate(size, alignof(std::max_align_t));
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(size);
}
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(size);
}
void operator delete(void* pointer) noexcept {
  give_back(pointer);
}
void operator delete[](void* pointer) noexcept {
  give_back(pointer);
}
void operator delete(void* pointer, std::size_t) noexcept {
  give_back(pointer);
}
void operator delete[](void* pointer, std::size_t) noexcept {
  give_back(pointer);
}
void operator delete(void* pointer, std::align_val_t) noexcept {
  give_back(pointer);
}
void operator delete[](void* pointer, std::align_val_t) noexcept {
  give_back(pointer);
}
void operator delete(void* pointer, std::size_t, std::align_val_t) noexcept {
  give_back(pointer);
}
void operator delete[](void* pointer, std::size_t, std::align_val_t) noexcept {
  give_back(pointer);
}
