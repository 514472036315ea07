// What a block of ternary.h multiplies, by bulk copies on Hopper: rounds of some blocks of 256 k,
// which lie in places of shared memory as they do in memory.
//
//   barriers
//   sums      [warp][token][32]
//   place     [group] the round's blocks; [token] 256 bytes a block, and 16 so that eight tokens'
//             dwords lie in all banks
//
// A round is asked for by one warp. All weights that places have room for are under way before the
// kernel before has ended.
#pragma once

#include <cstdint>

#include "cuda/bodies/ternary_place.h"
#include "cuda/bodies/ternary_products.h"
#include "cuda/unit.h"

namespace effinfer::cuda {

inline constexpr int kTernaryBarrierBytes = 128;
inline constexpr int kMostTernaryPlaces = kTernaryBarrierBytes / 8;

constexpr int ternary_sum_bytes(int tokens) {
  return tokens * kWarp * static_cast<int>(sizeof(int32_t));
}

// The halves of blocks that a lane reads of a round, or of four blocks of it: the lines of half i
// are `lines` + i `line_step` bytes behind the first ones, and so are tokens. Eight lanes meet half
// of the banks twice, which takes less than what would spread them.
struct TernaryHalves {
  int most;   // how many
  int block;  // of the first one
  int block_step;
  int odd;  // whether it is its block's second half
  int odd_step;
  int lines;
  int line_step;
  int tokens;
  int token_step;

  // A quarter of all, or both halves of one of four blocks.
  template <int kBlockBytes, class Unit>
  EFFINFER_DEVICE static TernaryHalves of(const Unit& unit, const TernaryRounds& rounds, bool any) {
    const int block = any ? unit.warp / 2 : unit.warp;
    const int block_step = any ? kTernaryWarps / 2 : 0;
    const int odd = any ? unit.warp % 2 : 0;
    const int odd_step = any ? 0 : 1;
    const int lane_lines =
        unit.lane / 16 * rounds.group_bytes + unit.lane % 4 * 64 + unit.lane / 4 % 4 * 16;
    return {any ? 2 * rounds.blocks : 2,
            block,
            block_step,
            odd,
            odd_step,
            lane_lines + block * kBlockBytes + odd * 512,
            block_step * kBlockBytes + odd_step * 512,
            unit.lane % 4 * 4 + block * 256 + odd * 32,
            block_step * 256 + odd_step * 32};
  }
};

template <ops::QuantBits kBits>
class TernaryBulk {
 public:
  static constexpr int kBlockBytes = static_cast<int>(ops::ternary_lines(kBits, 64)) * 64;

  // Of the host.
  static constexpr TernaryRounds rounds_of(int blocks, int places, int tokens) {
    const int group = blocks * kBlockBytes;
    const int stride = blocks * 256 + 16;
    return {blocks, places, group, stride, 2 * group + tokens * stride};
  }
  static constexpr int shared_bytes(const TernaryRounds& rounds, int tokens) {
    return kTernaryBarrierBytes + kTernaryWarps * ternary_sum_bytes(tokens) +
           rounds.places * rounds.place_bytes;
  }

  EFFINFER_DEVICE TernaryBulk(const TernaryParams& p, const TernaryPlace& place,
                              TernaryShared& shared)
      : p_(p),
        rounds_(p.rounds),
        place_(place),
        memory_(reinterpret_cast<uint8_t*>(&shared)),
        weights_(place_at(0)) {}

  // For others after a barrier.
  template <class Unit>
  EFFINFER_DEVICE void start_weights(Unit& unit) {
    EFFINFER_NO_UNROLL
    for (int i = unit.warp; i < rounds_.places; i += kTernaryWarps) {
      if (unit.lane == 0) unit.barrier_init(full(i), 1);
    }
    unit.fence_async();
    unit.sync_warp();
    EFFINFER_NO_UNROLL
    for (int i = unit.warp; i < rounds_.places; i += kTernaryWarps) ask_weights(unit, i, i);
  }
  // After wait_for_inputs().
  template <class Unit>
  EFFINFER_DEVICE void start_tokens(Unit& unit) {
    EFFINFER_NO_UNROLL
    for (int i = unit.warp; i < rounds_.places; i += kTernaryWarps) ask_tokens(unit, i, i);
  }

  template <class Unit>
  EFFINFER_DEVICE void wait(Unit& unit) {
    unit.barrier_wait(full(at_), parity_);
  }
  // The round at hand has been read by all.
  template <class Unit>
  EFFINFER_DEVICE void ask_again(Unit& unit, int round) {
    if (unit.warp != round % kTernaryWarps) return;
    ask_weights(unit, round, at_);
    ask_tokens(unit, round, at_);
  }
  EFFINFER_DEVICE void advance() {
    weights_ += rounds_.place_bytes;
    if (++at_ < rounds_.places) return;
    at_ = 0;
    parity_ ^= 1;
    weights_ = place_at(0);
  }

  // Of a round.
  EFFINFER_DEVICE int blocks_of(int round) const {
    const int left = p_.blocks - round * rounds_.blocks;
    return left < rounds_.blocks ? left : rounds_.blocks;
  }
  // Weights and tokens of the round at hand.
  EFFINFER_DEVICE const uint8_t* weights() const { return weights_; }
  EFFINFER_DEVICE const uint8_t* tokens() const { return weights_ + 2 * rounds_.group_bytes; }

  using SumRow = int32_t[kWarp];
  EFFINFER_DEVICE SumRow* sums_at(int warp) const {
    return reinterpret_cast<SumRow*>(memory_ + kTernaryBarrierBytes +
                                     warp * ternary_sum_bytes(p_.block_tokens));
  }

 private:
  EFFINFER_DEVICE Mbarrier& full(int place) const {
    return reinterpret_cast<Mbarrier*>(memory_)[place];
  }
  EFFINFER_DEVICE uint8_t* place_at(int place) const {
    return memory_ + kTernaryBarrierBytes + kTernaryWarps * ternary_sum_bytes(p_.block_tokens) +
           place * rounds_.place_bytes;
  }
  // Of a round's row.
  EFFINFER_DEVICE int token_bytes_of(int round) const {
    const int most = rounds_.blocks * 256;
    const int left = p_.padded - round * most;
    return left < most ? left : most;
  }

  template <class Unit>
  EFFINFER_DEVICE void ask_weights(Unit& unit, int round, int to) {
    if (unit.lane >= 2) return;
    const int last = blocks_of(round) - 1;
    const int bytes =
        last * kBlockBytes + ternary_lines_of<kBits>(p_, round * rounds_.blocks + last) * 64;
    if (unit.lane == 0) {
      unit.barrier_arrive_expect(full(to), 2 * bytes + place_.num_tokens * token_bytes_of(round));
    }
    const uint8_t* from =
        ternary_group(p_, place_, unit.lane) + p_.header_bytes + round * rounds_.group_bytes;
    unit.copy_bulk(place_at(to) + unit.lane * rounds_.group_bytes, from, bytes, full(to));
  }
  template <class Unit>
  EFFINFER_DEVICE void ask_tokens(Unit& unit, int round, int to) {
    if (unit.lane >= place_.num_tokens) return;
    const uint8_t* from = p_.x + (place_.first_token + unit.lane) * p_.x_row_bytes;
    unit.copy_bulk(place_at(to) + 2 * rounds_.group_bytes + unit.lane * rounds_.token_stride,
                   from + round * rounds_.blocks * 256, token_bytes_of(round), full(to));
  }

  const TernaryParams& p_;
  const TernaryRounds& rounds_;
  const TernaryPlace& place_;
  uint8_t* const memory_;
  const uint8_t* weights_;
  int at_ = 0;
  int parity_ = 0;
};

}  // namespace effinfer::cuda
