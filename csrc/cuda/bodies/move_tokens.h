// Tokens from one place of the engine's pages to another: a block a head, a thread the same
// dimensions of all moves, so that moves keep their order without a barrier.
#pragma once

#include <type_traits>

#include "cuda/bodies/head_pages.h"
#include "cuda/unit.h"
#include "ops/move_tokens.h"

namespace effinfer::cuda {

// Calls with the number of each of a head's arrays of numbers, of which a thread has some: keys of
// a dimension, values of one, scales.
template <class T, class Pages, class Each>
EFFINFER_DEVICE void for_own_numbers(int thread, int threads, const Pages& pages, Each&& each) {
  for (int d = thread; d < pages.dims(); d += threads) {
    each([&](ops::TokenPlace place) -> T& { return pages.key(place, d); });
    each([&](ops::TokenPlace place) -> T& { return pages.value(place, d); });
  }
  if (!pages.has_scales() || thread > 0) return;
  each([&](ops::TokenPlace place) -> float& { return pages.key_scale(place); });
  each([&](ops::TokenPlace place) -> float& { return pages.value_scale(place); });
}

struct MoveTokens {
  static constexpr const char* kName = "move_tokens";
  static constexpr int kThreads = 128;
  using Params = ops::MoveTokensProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int bytes = element_bytes(p.layers.first.dtype);
    if (bytes == 4) return move<uint32_t>(unit, p);
    if (bytes == 2) return move<uint16_t>(unit, p);
    move<uint8_t>(unit, p);
  }

 private:
  template <class T, class Unit>
  EFFINFER_DEVICE static void move(Unit& unit, const Params& p) {
    const HeadPages<T> pages(p.layers, unit.block);
    for_own_numbers<T>(unit.thread, kThreads, pages, [&](auto&& at) {
      for (int i = 0; i < p.count; ++i) at(p.to[i]) = at(p.from[i]);
    });
  }
};

// Some slots of a sequence close up.
struct RetainSlots {
  static constexpr const char* kName = "retain_slots";
  static constexpr int kThreads = 128;
  using Params = ops::RetainSlotsProblem;
  struct Shared {};

  template <class Unit>
  EFFINFER_DEVICE static void run(Unit& unit, const Params& p, Shared&) {
    const int bytes = element_bytes(p.layers.first.dtype);
    if (bytes == 4) return retain<uint32_t>(unit, p);
    if (bytes == 2) return retain<uint16_t>(unit, p);
    retain<uint8_t>(unit, p);
  }

 private:
  // Slots that are read before the first of them is written. None that is read later is among
  // those, as slots never move up.
  static constexpr int kAhead = 4;

  template <class T, class Unit>
  EFFINFER_DEVICE static void retain(Unit& unit, const Params& p) {
    const HeadPages<T> pages(p.layers, unit.block);
    const int32_t* slots = p.slots + unit.block * p.list_stride;
    const auto place = [&](int slot) {
      constexpr int kPage = ops::kPageSize;
      return ops::TokenPlace{unit.load(p.pages + slot / kPage), slot % kPage};
    };
    for_own_numbers<T>(unit.thread, kThreads, pages, [&](auto&& at) {
      for (int first = p.first; first < p.count; first += kAhead) {
        std::remove_reference_t<decltype(at(place(0)))> ahead[kAhead] = {};
        EFFINFER_UNROLL
        for (int i = 0; i < kAhead; ++i) {
          if (first + i < p.count) ahead[i] = at(place(unit.load(slots + first + i)));
        }
        EFFINFER_UNROLL
        for (int i = 0; i < kAhead; ++i) {
          if (first + i < p.count) at(place(first + i)) = ahead[i];
        }
      }
    });
  }
};

}  // namespace effinfer::cuda
