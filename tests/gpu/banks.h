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
#include <utility>
#include <vector>

#include "cuda/unit.h"
#include "gpu/host_unit.h"

namespace effinfer::cuda::host {

// Lanes run one after the other, so that the n-th time that each is at an instruction since the
// last barrier is one access of the warp. What a lane touches in a row within 16 aligned bytes
// counts as one: a compiler for GPUs makes one of the parts of a Quad.
class BankCounter {
 public:
  void add(const void* instruction, int thread, size_t place, size_t bytes) {
    const bool goes_on = last_.bytes > 0 && thread == last_.thread &&
                         place == last_.place + last_.bytes &&
                         place / kMostBytes == last_.place / kMostBytes;
    if (goes_on) {
      last_.bytes += bytes;
    } else {
      flush();
      last_ = {instruction, thread, place, bytes};
    }
  }
  // The thread's lane takes no part in an access of its warp.
  void skip(const void* instruction, int thread) {
    flush();
    take_turn(instruction, thread, kNowhere);
  }
  // All threads are at a barrier, or have left.
  void pass_barrier() {
    flush();
    for (const auto& [key, all] : accesses_) {
      Cycles& sum = cycles_[key / kMostWarps];
      for (const Lanes& lanes : all.of_warp) count(lanes, all.words, sum);
    }
    accesses_.clear();
  }
  // name(address) of the worst instruction.
  template <class Name>
  Banks total(Name&& name) const {
    Banks out;
    uint64_t most = 0;
    for (const auto& [instruction, sum] : cycles_) {
      out.cycles += sum.cycles;
      out.least += sum.least;
      if (sum.cycles - sum.least <= most) continue;
      most = sum.cycles - sum.least;
      out.worst = name(reinterpret_cast<const void*>(instruction));
    }
    return out;
  }

 private:
  struct Access {
    const void* instruction = nullptr;
    int thread = 0;
    size_t place = 0;
    size_t bytes = 0;
  };
  struct Cycles {
    uint64_t cycles = 0;
    uint64_t least = 0;
  };
  static constexpr uintptr_t kMostWarps = 32;  // of a block
  static constexpr size_t kBanks = 32;
  static constexpr size_t kWordBytes = 4;
  static constexpr size_t kMostBytes = 16;
  static constexpr size_t kNowhere = SIZE_MAX;
  using Lanes = std::array<size_t, kWarp>;  // the first word of each
  struct Accesses {
    size_t words = 1;  // a lane
    std::array<size_t, kWarp> turns = {};
    std::vector<Lanes> of_warp;
  };

  void flush() {
    const auto [instruction, thread, place, bytes] = std::exchange(last_, {});
    for (size_t done = 0; done < bytes; done += kMostBytes) {
      const size_t now = std::min(bytes - done, kMostBytes);
      Accesses& all = take_turn(instruction, thread, (place + done) / kWordBytes);
      all.words = std::bit_ceil((now + kWordBytes - 1) / kWordBytes);
    }
  }

  Accesses& take_turn(const void* instruction, int thread, size_t word) {
    const auto key = reinterpret_cast<uintptr_t>(instruction) * kMostWarps +
                     static_cast<uintptr_t>(thread / kWarp);
    Accesses& all = accesses_[key];
    const auto lane = static_cast<size_t>(thread % kWarp);
    const size_t turn = all.turns[lane]++;
    if (turn == all.of_warp.size()) all.of_warp.emplace_back().fill(kNowhere);
    all.of_warp[turn][lane] = word;
    return all;
  }

  static void count(const Lanes& lanes, size_t words, Cycles& sum) {
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
      sum.cycles += *std::max_element(of_bank.begin(), of_bank.end());
      sum.least += (touched.size() + kBanks - 1) / kBanks;
    }
  }

  Access last_;
  std::unordered_map<uintptr_t, Accesses> accesses_;
  std::unordered_map<uintptr_t, Cycles> cycles_;  // of each instruction
};

}  // namespace effinfer::cuda::host
