#include "ops/device_plans.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "ops/latent_tile.h"
#include "ops/upload_block.h"
#include "ops/validate.h"

namespace effinfer::ops {
namespace {

AttentionShape on_gpus(AttentionShape shape) {
  const bool latent = shape.head_dim > kGpuMostHeadDim;
  shape.most_rows = latent ? kGpuLatentRows : kGpuTileRows;
  shape.shares = kGpuShares;
  shape.most_partials = latent ? kGpuPartials / 4 : kGpuPartials;
  return shape;
}

AttentionWork work_of(const AttentionShape& shape, const PlanLists& lists) {
  AttentionWork work;
  if (lists.blocks != nullptr) {
    plan_attention(on_gpus(shape), lists.batch, *lists.blocks, work);
  } else {
    plan_attention(on_gpus(shape), lists.batch, work);
  }
  return work;
}

size_t width_of(size_t dims) {
  return (dims + 15) / 16 * 16;
}

// Room for all plans of that many rows and sequences.
PlanRoom most_room(const AttentionShape& given, int64_t rows, int64_t sequences, int64_t listed,
                   int32_t page_size, int64_t mask_bytes) {
  const AttentionShape shape = on_gpus(given);
  AttentionWork work;
  // Rows of keys may be any number.
  const int64_t most_keys = listed > 0 ? listed * page_size : 1 << 30;
  const int64_t partials = work.reserve(shape, rows, sequences, most_keys);
  PlanRoom room;
  room.tiles = work.tiles.capacity();
  room.merges = work.merges.capacity();
  // A tile is divided at its share of the chunks: into at most two items more, of its sinks and of
  // what remains, beside those of a full share, of which there are less than twice the shares.
  room.items = std::min(work.items.capacity(), 2 * room.tiles + 2 * size_t{kGpuShares});
  room.sequences = static_cast<size_t>(sequences);
  room.listed = static_cast<size_t>(listed);
  room.mask_bytes = static_cast<size_t>(mask_bytes);
  room.partials = static_cast<size_t>(partials);
  room.dims = static_cast<size_t>(shape.head_dim);
  return room;
}

}  // namespace

PlanRoom PlanRoom::of(const AttentionWork& work, const PlanLists& lists, int32_t dims) {
  return {work.spans.size(),
          work.tiles.size(),
          work.items.size(),
          work.merges.size(),
          static_cast<size_t>(lists.batch.num_sequences),
          static_cast<size_t>(lists.num_listed),
          lists.mask->size(),
          static_cast<size_t>(work.num_partials),
          static_cast<size_t>(dims)};
}

PlanMemory::PlanMemory(const PlanRoom& room, Queue& queue,
                       std::shared_ptr<void> (*allocate)(Queue&, size_t))
    : room_(room) {
  UploadBlock block;
  const auto ints = [&](size_t count) { return block.add<int32_t>(nullptr, 0, count); };
  const size_t spans = block.add<TokenSpan>(nullptr, 0, room.spans);
  const size_t tiles = block.add<AttentionTile>(nullptr, 0, room.tiles);
  const size_t items = block.add<AttentionItem>(nullptr, 0, room.items);
  const size_t merges = block.add<AttentionMerge>(nullptr, 0, room.merges);
  const size_t qo_indptr = ints(room.sequences + 1);
  const size_t kv_indptr = ints(room.sequences + 1);
  const size_t kv_len = ints(room.sequences);
  const size_t starts = block.add<int64_t>(nullptr, 0, room.sequences + 1);
  const size_t strides = block.add<int64_t>(nullptr, 0, room.sequences);
  const size_t mask = block.add<uint8_t>(nullptr, 0, room.mask_bytes);
  const size_t kv_indices = ints(room.listed);
  done_ = ints(room.merges);
  const size_t partials = ints(0);
  const size_t width = width_of(room.dims);
  const size_t bytes = partials + room.partials * (width + 2) * sizeof(float);
  memory_ = allocate(queue, std::max<size_t>(bytes, 1));
  auto* const first = static_cast<std::byte*>(memory_.get());
  if (room.merges > 0) queue.zero(first + done_, room.merges * sizeof(int32_t));
  const auto at = [&]<class T>(size_t place, T*) { return reinterpret_cast<T*>(first + place); };
  constexpr int32_t* kInts = nullptr;
  constexpr int64_t* kLongs = nullptr;
  AttentionProblem& p = problem_;
  p.work.spans = at(spans, static_cast<TokenSpan*>(nullptr));
  p.work.tiles = at(tiles, static_cast<AttentionTile*>(nullptr));
  p.work.items = at(items, static_cast<AttentionItem*>(nullptr));
  p.work.merges = at(merges, static_cast<AttentionMerge*>(nullptr));
  p.batch.qo_indptr = at(qo_indptr, kInts);
  p.batch.kv_indptr = at(kv_indptr, kInts);
  p.batch.kv_indices = at(kv_indices, kInts);
  p.batch.kv_len = at(kv_len, kInts);
  p.mask = at(mask, static_cast<uint8_t*>(nullptr));
  p.mask_starts = at(starts, kLongs);
  p.mask_row_strides = at(strides, kLongs);
  p.done = at(done_, kInts);
  p.partial_out = at(partials, static_cast<float*>(nullptr));
  p.partial_ms = p.partial_out + room.partials * width;
}

void PlanMemory::put(const AttentionWork& work, const PlanLists& lists, Queue& queue) {
  const BatchLayout& batch = lists.batch;
  const auto sequences = static_cast<size_t>(batch.num_sequences);
  // In the order of the constructor.
  UploadBlock block;
  block.add(work.spans, room_.spans);
  block.add(work.tiles, room_.tiles);
  block.add(work.items, room_.items, {-1, 0, 0, -1, -1});
  block.add(work.merges, room_.merges);
  block.add(batch.qo_indptr, sequences + 1, sequences + 1);
  block.add(batch.kv_indptr, sequences + 1, sequences + 1);
  block.add(batch.kv_len, sequences, sequences);
  block.add(*lists.mask_starts, room_.sequences + 1);
  block.add(*lists.mask_row_strides, room_.sequences);
  block.add(*lists.mask, room_.mask_bytes);
  const auto listed = static_cast<size_t>(lists.num_listed);
  block.add(batch.kv_indices, listed, listed);
  queue.upload(memory_.get(), block.bytes().data(), block.bytes().size());
  const int32_t* kv_indices = batch.kv_indices == nullptr ? nullptr : problem_.batch.kv_indices;
  const BatchLayout there = problem_.batch;
  problem_.batch = batch;
  problem_.batch.qo_indptr = there.qo_indptr;
  problem_.batch.kv_indptr = there.kv_indptr;
  problem_.batch.kv_indices = kv_indices;
  problem_.batch.kv_len = there.kv_len;
  const AttentionWorkView pointers = problem_.work;
  problem_.work = work;
  problem_.work.spans = pointers.spans;
  problem_.work.tiles = pointers.tiles;
  problem_.work.items = pointers.items;
  problem_.work.merges = pointers.merges;
  problem_.work.num_items = static_cast<int64_t>(room_.items);
  problem_.work.num_merges = static_cast<int64_t>(room_.merges);
  if (!lists.mask->empty()) return;
  problem_.mask = nullptr;
  problem_.mask_starts = nullptr;
  problem_.mask_row_strides = nullptr;
}

void PlanMemory::point(AttentionProblem& problem) const {
  problem.batch = problem_.batch;
  problem.work = problem_.work;
  problem.mask = problem_.mask;
  if (problem_.mask != nullptr) problem.mask_bytes = static_cast<int64_t>(room_.mask_bytes);
  problem.mask_starts = problem_.mask_starts;
  problem.mask_row_strides = problem_.mask_row_strides;
  problem.partial_out = problem_.partial_out;
  problem.partial_ms = problem_.partial_ms;
  problem.done = problem_.done;
}

void DevicePlans::place(AttentionProblem& problem, const AttentionShape& shape,
                        const PlanLists& lists, Queue& queue) {
  const std::lock_guard lock(mutex_);
  if (fixed_ != nullptr) {
    const std::lock_guard fixed_lock(fixed_->mutex);
    if (fixed_->owner == this && fixed_->device == queue.device()) {
      return fixed_->memory->point(problem);
    }
  }
  for (const Placed& each : placed_) {
    if (each.device == queue.device() && each.stream == queue.stream()) {
      return each.memory.point(problem);
    }
  }
  const AttentionWork work = work_of(shape, lists);
  PlanMemory memory(PlanRoom::of(work, lists, shape.head_dim), queue,
                    [](Queue& from, size_t bytes) { return from.allocate(bytes); });
  memory.put(work, lists, queue);
  placed_.push_back({queue.device(), queue.stream(), std::move(memory)});
  placed_.back().memory.point(problem);
}

void FixedPlans::Impl::put(const DevicePlans* plans, const AttentionGeometry& given,
                           const AttentionShape& shape, const PlanLists& lists, Queue& queue) {
  const Validator check("attention plan", queue.device());
  const std::lock_guard lock(mutex);
  const auto count = static_cast<size_t>(lists.batch.num_sequences);
  const auto at_most = [&](const char* argument, size_t value, size_t most) {
    check.expect(value <= most, argument, "at most " + std::to_string(most) + ", for which is room",
                 std::to_string(value));
  };
  at_most("kv_indices", static_cast<size_t>(lists.num_listed), most_listed);
  at_most("mask", lists.mask->size(), most_mask_bytes);
  check.expect(lists.mask->empty() == (most_mask_bytes == 0), "mask",
               most_mask_bytes == 0 ? "none" : "one, as there is room for it",
               most_mask_bytes == 0 ? "one" : "none");
  if (!memory) {
    device = queue.device();
    geometry = given;
    sequences = count;
    rows = lists.batch.num_tokens;
    memory.emplace(
        most_room(shape, rows, lists.batch.num_sequences, static_cast<int64_t>(most_listed),
                  given.page_size, static_cast<int64_t>(most_mask_bytes)),
        queue, [](Queue& from, size_t bytes) { return allocate_memory(from.device(), bytes); });
  }
  check.expect(device == queue.device(), "queue", "one of " + name(device),
               "one of " + name(queue.device()));
  check.expect(geometry == given, "geometry", "that of the first plan of this memory", "another");
  check.expect(sequences == count, "kv_len", std::to_string(sequences) + " sequences",
               std::to_string(count));
  at_most("qo_indptr", static_cast<size_t>(lists.batch.num_tokens), static_cast<size_t>(rows));
  const AttentionWork work = work_of(shape, lists);
  const PlanRoom& room = memory->room();
  at_most("tiles", work.tiles.size(), room.tiles);
  at_most("items", work.items.size(), room.items);
  at_most("merges", work.merges.size(), room.merges);
  at_most("partial results", static_cast<size_t>(work.num_partials), room.partials);
  memory->put(work, lists, queue);
  owner = plans;
}

}  // namespace effinfer::ops
