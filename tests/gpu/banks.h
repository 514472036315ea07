// What accesses of shared memory cost: it has 32 banks of 4 bytes, each of which serves one word of
// a phase a cycle, to any number of lanes. A warp's access of up to 4 bytes a lane is one phase, of
// 8 bytes one for each half of the warp, of 16 bytes one for each quarter. For races.cpp.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "cuda/unit.h"
#include "gpu/host_unit.h"

namespace effinfer::cuda::host {

// Lanes run one after the other, so that the n-th time that each is at an instruction since the
// last barrier is one access of the warp.
class BankCounter {
 public:
  // More than 16 bytes are several accesses.
  void add(const void* instruction, int thread, size_t place, size_t bytes) {
    constexpr size_t kMost = 16;
    for (; bytes > kMost; bytes -= kMost, place += kMost) add(instruction, thread, place, kMost);
    const auto key =
        reinterpret_cast<uintptr_t>(instruction) * 64 + static_cast<uintptr_t>(thread / kWarp);
    Accesses& all = accesses_[key];
    const auto lane = static_cast<size_t>(thread % kWarp);
    const size_t turn = all.turns[lane]++;
    if (turn == all.of_warp.size()) all.of_warp.emplace_back().fill(kNowhere);
    all.words = std::bit_ceil((bytes + kWordBytes - 1) / kWordBytes);
    all.of_warp[turn][lane] = place / kWordBytes;
  }
  // All threads are at a barrier, or have left.
  void pass_barrier() {
    for (const auto& [key, all] : accesses_) {
      for (const Lanes& lanes : all.of_warp) count(lanes, all.words);
    }
    accesses_.clear();
  }
  const Banks& total() const { return total_; }

 private:
  static constexpr size_t kBanks = 32;
  static constexpr size_t kWordBytes = 4;
  static constexpr size_t kNowhere = SIZE_MAX;
  using Lanes = std::array<size_t, kWarp>;  // the first word of each
  struct Accesses {
    size_t words = 1;  // a lane
    std::array<size_t, kWarp> turns = {};
    std::vector<Lanes> of_warp;
  };

  void count(const Lanes& lanes, size_t words) {
    const size_t in_phase = kWarp / words;
    for (size_t first = 0; first < kWarp; first += in_phase) {
      std::vector<size_t> touched;
      for (size_t lane = first; lane < first + in_phase; ++lane) {
        if (lanes[lane] == kNowhere) continue;
        for (size_t i = 0; i < words; ++i) touched.push_back(lanes[lane] + i);
      }
      if (touched.empty()) continue;
      std::sort(touched.begin(), touched.end());
      touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
      std::array<uint64_t, kBanks> of_bank = {};
      for (const size_t word : touched) ++of_bank[word % kBanks];
      total_.cycles += *std::max_element(of_bank.begin(), of_bank.end());
      total_.least += (touched.size() + kBanks - 1) / kBanks;
    }
  }

  std::unordered_map<uintptr_t, Accesses> accesses_;
  Banks total_;
};

}  // namespace effinfer::cuda::host
