// How the tokens of a sequence move within the pages of a pool: on the host token by token, on
// another device by kernels, a launch for all layers that it has, which the host waits for.
#include <algorithm>
#include <memory>
#include <vector>

#include "kv/page_pool.h"
#include "kv/token_rows.h"
#include "ops/move_tokens.h"
#include "ops/registry.h"
#include "ops/upload_block.h"

namespace effinfer::kv {
namespace {

using ops::TokenPlace;

TokenPlace place_of(std::span<const int32_t> pages, int64_t slot) {
  return {pages[static_cast<size_t>(slot / ops::kPageSize)],
          static_cast<int32_t>(slot % ops::kPageSize)};
}

// A head's pages of any memory as pages 0, 1, ... of the host's, of a layer that has no others.
class HostPages {
 public:
  HostPages(const Memory& memory, const ops::KvLayer& kv, std::span<const int32_t> pages,
            int32_t head)
      : memory_(memory),
        kv_(kv),
        pages_(pages),
        head_(head),
        bytes_(2 * pages.size() * kv.head_bytes()),
        scales_(kv.k_scale == nullptr ? 0 : 2 * pages.size() * ops::kPageSize) {
    layer_ = kv;
    layer_.num_kv_heads = 1;
    layer_.num_pages = static_cast<int32_t>(pages.size());
    layer_.k = bytes_.data();
    layer_.v = bytes_.data() + bytes_.size() / 2;
    if (kv.k_scale != nullptr) {
      layer_.k_scale = scales_.data();
      layer_.v_scale = scales_.data() + scales_.size() / 2;
    }
    for_parts([&](void* here, void* there, size_t bytes) { memory_.copy(here, there, bytes); });
  }
  const ops::KvLayer& layer() const { return layer_; }
  void store() {
    for_parts([&](void* here, void* there, size_t bytes) { memory_.copy(there, here, bytes); });
  }

 private:
  template <class F>
  void for_parts(F&& f) {
    for (size_t i = 0; i < pages_.size(); ++i) {
      const auto own = static_cast<int64_t>(i);
      f(layer_.k_head(own, 0), kv_.k_head(pages_[i], head_), kv_.head_bytes());
      f(layer_.v_head(own, 0), kv_.v_head(pages_[i], head_), kv_.head_bytes());
      if (kv_.k_scale == nullptr) continue;
      const int64_t scales =
          (int64_t{pages_[i]} * int64_t{kv_.num_kv_heads} + head_) * ops::kPageSize;
      const int64_t own_scales = own * ops::kPageSize;
      f(layer_.k_scale + own_scales, kv_.k_scale + scales, ops::kPageSize * sizeof(float));
      f(layer_.v_scale + own_scales, kv_.v_scale + scales, ops::kPageSize * sizeof(float));
    }
  }

  const Memory& memory_;
  const ops::KvLayer& kv_;
  const std::span<const int32_t> pages_;
  const int32_t head_;
  std::vector<uint8_t> bytes_;
  std::vector<float> scales_;
  ops::KvLayer layer_;
};

}  // namespace

std::shared_ptr<std::byte> PagePool::uploaded(const ops::UploadBlock& block, Bank& bank) {
  const std::shared_ptr<void> memory = bank.queue->allocate(block.bytes().size());
  bank.queue->upload(memory.get(), block.bytes().data(), block.bytes().size());
  return std::static_pointer_cast<std::byte>(memory);
}

void PagePool::move(ops::MoveTokensProblem& moves) {
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (bank_of(i).queue) continue;
    for (int64_t head = 0; head < layers_[i].num_kv_heads; ++head) {
      for (int32_t m = 0; m < moves.count; ++m) {
        copy_token({layers_[i], head, moves.from[m]}, {layers_[i], head, moves.to[m]});
      }
    }
  }
  for (Bank& bank : banks_) {
    if (!bank.queue || moves.count == 0) continue;
    moves.layers = bank.layers;
    ops::run_alone(moves, Executor(*bank.queue));
  }
}

void PagePool::wait() {
  for (Bank& bank : banks_) {
    if (bank.queue) bank.queue->wait();
  }
}

void PagePool::close_up(std::span<const int32_t> pages, int64_t first,
                        std::span<const int32_t> rows) {
  size_t next = 0;  // the rows before it lie where they belong
  while (next < rows.size() && rows[next] == static_cast<int64_t>(next)) ++next;
  int32_t changed = -1;
  for (size_t i = next; i < rows.size(); ++i) {
    const int32_t page = place_of(pages, first + static_cast<int64_t>(i)).page;
    if (page != changed) forget_bounds(page);
    changed = page;
  }
  while (next < rows.size()) {
    ops::MoveTokensProblem moves;
    for (; next < rows.size() && moves.count < ops::MoveTokensProblem::kMost; ++next) {
      moves.from[moves.count] = place_of(pages, first + rows[next]);
      moves.to[moves.count] = place_of(pages, first + static_cast<int64_t>(next));
      ++moves.count;
    }
    move(moves);
  }
  wait();
}

void PagePool::copy_tokens(int32_t from, int32_t to, int32_t begin, int32_t end) {
  ops::MoveTokensProblem moves;
  for (int32_t token = begin; token < end; ++token) {
    moves.from[moves.count] = {from, token};
    moves.to[moves.count] = {to, token};
    ++moves.count;
  }
  move(moves);
  wait();
}

void PagePool::retain(std::span<const int32_t> pages, int64_t first,
                      std::span<const std::vector<int32_t>> lists) {
  const auto count = static_cast<int64_t>(lists[0].size());
  const auto heads = static_cast<size_t>(config_.num_kv_heads);
  const auto list_of = [&](size_t layer, size_t head) -> const std::vector<int32_t>& {
    return lists[lists.size() == 1 ? 0 : layer * heads + head];
  };
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (bank_of(i).queue) continue;
    for (size_t head = 0; head < heads; ++head) {
      const std::vector<int32_t>& list = list_of(i, head);
      for (int64_t slot = first; slot < count; ++slot) {
        const int64_t from = list[static_cast<size_t>(slot)];
        if (from == slot) continue;
        const auto own = static_cast<int64_t>(head);
        copy_token({layers_[i], own, place_of(pages, from)},
                   {layers_[i], own, place_of(pages, slot)});
      }
    }
  }
  for (size_t bank = 0; bank < banks_.size(); ++bank) {
    if (banks_[bank].queue) retain_on_device(bank, pages, first, lists);
  }
}

void PagePool::retain_on_device(size_t number, std::span<const int32_t> pages, int64_t first,
                                std::span<const std::vector<int32_t>> lists) {
  const auto heads = static_cast<size_t>(config_.num_kv_heads);
  std::vector<int32_t> slots;
  for (size_t i = 0; i < lists.size(); ++i) {
    if (lists.size() > 1 && bank_of_[i / heads] != number) continue;
    slots.insert(slots.end(), lists[i].begin(), lists[i].end());
  }
  Bank& bank = banks_[number];
  ops::UploadBlock block;
  const size_t pages_at = block.add(pages.data(), pages.size(), pages.size());
  const size_t slots_at = block.add(slots);
  const auto memory = uploaded(block, bank);
  ops::RetainSlotsProblem problem;
  problem.layers = bank.layers;
  problem.pages = reinterpret_cast<const int32_t*>(memory.get() + pages_at);
  problem.slots = reinterpret_cast<const int32_t*>(memory.get() + slots_at);
  problem.list_stride = lists.size() == 1 ? 0 : static_cast<int64_t>(lists[0].size());
  problem.first = static_cast<int32_t>(first);
  problem.count = static_cast<int32_t>(lists[0].size());
  ops::run_alone(problem, Executor(*bank.queue));
  wait();
}

void PagePool::reorder(std::span<const int32_t> pages, int64_t first, int64_t end,
                       std::span<const std::vector<int32_t>> lists) {
  const auto heads = static_cast<size_t>(config_.num_kv_heads);
  const auto begin = static_cast<size_t>(first / ops::kPageSize);
  const auto changed = pages.subspan(begin, KvCache::pages_for(static_cast<size_t>(end)) - begin);
  // Of the changed pages.
  const auto place = [&](int64_t slot) {
    const int64_t own = slot - static_cast<int64_t>(begin) * ops::kPageSize;
    return TokenPlace{static_cast<int32_t>(own / ops::kPageSize),
                      static_cast<int32_t>(own % ops::kPageSize)};
  };
  for (size_t i = 0; i < layers_.size(); ++i) {
    for (size_t head = 0; head < heads; ++head) {
      const auto number = static_cast<int32_t>(head);
      const HostPages before(bank_of(i).memory, layers_[i], changed, number);
      HostPages after(bank_of(i).memory, layers_[i], changed, number);
      const std::vector<int32_t>& list = lists[lists.size() == 1 ? 0 : i * heads + head];
      for (int64_t slot = first; slot < end; ++slot) {
        const int64_t from = list[static_cast<size_t>(slot)];
        if (from == slot) continue;
        copy_token({before.layer(), 0, place(from)}, {after.layer(), 0, place(slot)});
      }
      after.store();
    }
  }
}

void PagePool::rotate(std::span<const int32_t> pages, int64_t first, int64_t end,
                      std::span<const KvTurn> turns) {
  std::vector<float> key(static_cast<size_t>(config_.head_dim));
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (bank_of(i).queue || turns[i].cos.empty()) continue;
    for (int32_t head = 0; head < config_.num_kv_heads; ++head) {
      for (int64_t slot = first; slot < end; ++slot) {
        read_key(layers_[i], head, place_of(pages, slot), key.data());
        turns[i].apply(key.data());
        write_key(layers_[i], head, key.data(), place_of(pages, slot));
      }
    }
  }
  for (size_t bank = 0; bank < banks_.size(); ++bank) {
    if (banks_[bank].queue && first < end) rotate_on_device(bank, pages, first, end, turns);
  }
}

void PagePool::rotate_on_device(size_t number, std::span<const int32_t> pages, int64_t first,
                                int64_t end, std::span<const KvTurn> turns) {
  const int64_t page = first / ops::kPageSize;
  const auto own =
      pages.subspan(static_cast<size_t>(page),
                    KvCache::pages_for(static_cast<size_t>(end)) - static_cast<size_t>(page));
  ops::UploadBlock block;
  const size_t pages_at = block.add(own.data(), own.size(), own.size());
  std::vector<ops::KeyRotation> rotations;
  std::vector<size_t> angles_at;
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (bank_of_[i] != number) continue;
    std::vector<float> angles = turns[i].cos;
    angles.insert(angles.end(), turns[i].sin.begin(), turns[i].sin.end());
    angles_at.push_back(block.add(angles));
    rotations.push_back({nullptr, static_cast<int32_t>(turns[i].cos.size()), turns[i].interleaved});
  }
  Bank& bank = banks_[number];
  const std::shared_ptr<std::byte> angles = uploaded(block, bank);
  for (size_t i = 0; i < rotations.size(); ++i) {
    rotations[i].cos = reinterpret_cast<const float*>(angles.get() + angles_at[i]);
  }
  ops::UploadBlock table;
  table.add(rotations);
  const std::shared_ptr<std::byte> memory = uploaded(table, bank);
  ops::RotateKeysProblem problem;
  problem.layers = bank.layers;
  problem.rotations = reinterpret_cast<const ops::KeyRotation*>(memory.get());
  problem.pages = reinterpret_cast<const int32_t*>(angles.get() + pages_at);
  problem.num_pages = static_cast<int32_t>(own.size());
  problem.first = static_cast<int32_t>(first - page * ops::kPageSize);
  problem.end = static_cast<int32_t>(end - page * ops::kPageSize);
  ops::run_alone(problem, Executor(*bank.queue));
  wait();
}

// Calls with a layer of the host's that has the head, its number there, and where the slot is.
template <class F>
void PagePool::with_slot(std::span<const int32_t> pages, HeadPlace head, int64_t slot, bool changes,
                         F&& f) const {
  const TokenPlace place = place_of(pages, slot);
  const ops::KvLayer& kv = layers_[static_cast<size_t>(head.layer)];
  const Bank& bank = bank_of(static_cast<size_t>(head.layer));
  if (!bank.queue) return f(kv, head.head, place);
  HostPages page(bank.memory, kv, {&place.page, 1}, head.head);
  f(page.layer(), 0, TokenPlace{0, place.token});
  if (changes) page.store();
}

void PagePool::read(std::span<const int32_t> pages, int64_t num_slots, HeadPlace head, float* keys,
                    float* values) const {
  const auto dim = static_cast<int64_t>(config_.head_dim);
  for (int64_t first = 0; first < num_slots; first += ops::kPageSize) {
    const int64_t end = std::min(num_slots, first + ops::kPageSize);
    const auto read = [&](const ops::KvLayer& kv, int64_t own, TokenPlace place) {
      for (int64_t slot = first; slot < end; ++slot, ++place.token) {
        if (keys != nullptr) read_key(kv, own, place, keys + slot * dim);
        if (values != nullptr) read_value(kv, own, place, values + slot * dim);
      }
    };
    with_slot(pages, head, first, false, read);
  }
}

void PagePool::merge(std::span<const int32_t> pages, HeadPlace head, const KvMerge& merge) {
  const auto dim = static_cast<size_t>(config_.head_dim);
  std::vector<float> row(dim);
  std::vector<float> key(dim, 0.0f);
  std::vector<float> value(dim, 0.0f);
  for (size_t i = 0; i < merge.slots.size(); ++i) {
    const auto add = [&](const ops::KvLayer& kv, int64_t own, TokenPlace from) {
      read_key(kv, own, from, row.data());
      for (size_t d = 0; d < dim; ++d) key[d] += merge.weights[i] * row[d];
      read_value(kv, own, from, row.data());
      for (size_t d = 0; d < dim; ++d) value[d] += merge.weights[i] * row[d];
    };
    with_slot(pages, head, merge.slots[i], false, add);
  }
  const auto write = [&](const ops::KvLayer& kv, int64_t own, TokenPlace to) {
    write_key(kv, own, key.data(), to);
    write_value(kv, own, value.data(), to);
  };
  with_slot(pages, head, merge.into, true, write);
}

}  // namespace effinfer::kv
