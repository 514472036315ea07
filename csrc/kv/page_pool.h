// The memory of the KV cache: pages with reference counts. A page id names the same slot in every
// layer's K and V, so one id stands for 64 tokens of the whole model, on whichever devices its
// layers are. Where pages are encoded (KvCacheConfig::coding) there are more ids, of coded pages;
// pages of both kinds together take at most the bytes of num_pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/memory.h"
#include "effinfer/kv_cache.h"
#include "kv/coded_store.h"
#include "ops/kv_layers.h"
#include "ops/kv_layout.h"
#include "ops/move_tokens.h"
#include "ops/upload_block.h"

namespace effinfer::kv {

// Bytes of one page over all layers; throws InvalidArgument for an invalid config (num_pages is
// not looked at).
size_t page_bytes(const KvCacheConfig& config);
// How many ids pages of both kinds have.
int64_t num_page_ids(const KvCacheConfig& config);

// A head of a layer of a pool.
struct HeadPlace {
  int32_t layer;
  int32_t head;
};

// Angles by which a layer's keys are turned, pair by pair; none: they are not rotated.
struct KvTurn {
  std::vector<float> cos;
  std::vector<float> sin;
  bool interleaved = false;

  KvTurn(const KvRope& rope, int64_t positions);
  void apply(float* key) const;
};

// What is kept of units of keys for an index, for messages.
std::string index_kind(const KvCacheConfig& config);

class PagePool {
 public:
  explicit PagePool(const KvCacheConfig& config);
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // A free page with one reference. Its V (and scales) are finite: zeros, so that kernels may
  // multiply the unused end of a page by a zero probability. There must be one free.
  int32_t allocate();
  // A free page that holds a copy of `page` in every layer.
  int32_t allocate_copy(int32_t page);
  // These change the tokens of a sequence on `pages` in every layer, on whichever device it is
  // (page_moves.cpp). Nobody else reads the pages that are changed.

  // Moves the tokens first + rows[i] to first + i. `rows` strictly increases.
  void close_up(std::span<const int32_t> pages, int64_t first, std::span<const int32_t> rows);
  // Copies these tokens of one page to the same places of another.
  void copy_tokens(int32_t from, int32_t to, int32_t begin, int32_t end);
  // Slot i of a (layer, KV head) becomes what slot lists[head][i] was, for i >= first; one list is
  // for all heads. Lists strictly increase.
  void retain(std::span<const int32_t> pages, int64_t first,
              std::span<const std::vector<int32_t>> lists);
  // The same where lists are slots [first, end) in another order, within these pages; it goes
  // through the host.
  void reorder(std::span<const int32_t> pages, int64_t first, int64_t end,
               std::span<const std::vector<int32_t>> lists);
  // Turns the keys of slots [first, end), those of each layer by its angles.
  void rotate(std::span<const int32_t> pages, int64_t first, int64_t end,
              std::span<const KvTurn> turns);
  // Keys and values of the slots of a layer's head as floats [slots][head_dim]; null: not wanted.
  void read(std::span<const int32_t> pages, int64_t num_slots, HeadPlace head, float* keys,
            float* values) const;
  // Of a layer's head: the slot `into` becomes the weighted sums.
  void merge(std::span<const int32_t> pages, HeadPlace head, const KvMerge& merge);
  // Puts coded pages in the place of these, whose holder does not need them any more
  // (page_codes.cpp). The first is page `place` of its sequence. On the host the memory of free
  // pages goes back to the system; pages of a GPU, and of both, are encoded on the host.
  void encode(std::span<int32_t> pages, ThreadPool& pool, size_t place);
  // Its numbers change: what was made of it is not its coded form any more.
  void forget_coding(int32_t page) {
    if (coded_) coded_->unlink(page);
  }
  // A coded page to be written, and what was made of a page, or -1.
  int32_t allocate_coded();
  int32_t coding_of(int32_t page) const { return coded_ ? coded_->coding_of(page) : -1; }
  bool is_coded(int32_t page) const { return page >= config_.num_pages; }
  // A page of every layer as bytes in the host's memory, page_bytes(page) of them: of each layer K,
  // V and the scales of both.
  size_t page_bytes() const { return kv::page_bytes(config_); }
  size_t page_bytes(int32_t page) const {
    return is_coded(page) ? coded_page_bytes() : page_bytes();
  }
  size_t coded_page_bytes() const { return coded_ ? coded_->page_bytes() : 0; }
  void read_page(int32_t page, std::byte* out) const;
  void write_page(int32_t page, const std::byte* from);
  // The page's keys are others than they were: what is known of them is void.
  void forget_bounds(int32_t page);
  // Tokens are appended to a page that is not full, but may have been before tokens were dropped,
  // and encoded for another sequence; it is full. Between the two nobody learns of it, and what is
  // known of it is forgotten once.
  void begin_to_fill(int32_t page) {
    uint8_t& filling = is_filling_[static_cast<size_t>(page)];
    if (filling == 0) {
      forget_bounds(page);
      forget_coding(page);
    }
    filling = 1;
  }
  void end_filling(int32_t page) { is_filling_[static_cast<size_t>(page)] = 0; }
  void retain(int32_t page) { ++references_[static_cast<size_t>(page)]; }
  void release(int32_t page);

  int32_t references(int32_t page) const { return references_[static_cast<size_t>(page)]; }
  int32_t num_pages() const { return config_.num_pages; }
  int32_t num_ids() const { return static_cast<int32_t>(references_.size()); }
  // Whole pages that there is memory for. Below 0 only on the host, between encode() and the
  // release of what it made superfluous.
  int32_t free_pages() const;
  // That so many pages of both kinds take.
  size_t pages_of(size_t plain, size_t coded) const;
  size_t used_bytes() const;
  size_t num_bytes() const { return num_bytes_; }
  const KvCacheConfig& config() const { return config_; }
  std::span<const ops::KvLayer> layers() const { return layers_; }

  // Throws InternalError unless the counts are `expected` and the free list is their zeros.
  void check(std::span<const int32_t> expected) const;

 private:
  // The layers of a device, one after the other.
  struct Bank {
    const Memory& memory;
    size_t num_layers = 0;
    std::unique_ptr<Queue> queue = nullptr;  // null: the CPU's memory
    std::shared_ptr<void> region = nullptr;
    ops::KvLayers layers = {};
    // ops::PageBounds of the layers; null: none are kept.
    std::shared_ptr<void> bounds = nullptr;
    std::shared_ptr<int32_t> known = nullptr;
    size_t known_of_page = 0;  // numbers of `known`
  };

  // Of a page: zeros, numbers, or these but where the system has taken the host's memory back.
  enum class Written : uint8_t { never, everywhere, on_devices };

  // Free pages whose memory stays, for the tokens that come next.
  static constexpr size_t kWarmPages = 1;

  size_t capacity_bytes() const;  // of all pages
  int32_t take_coded();
  void encode_on_host(std::span<int32_t> pages, ThreadPool& pool, size_t place);
  void encode_on_device(std::span<int32_t> pages, ThreadPool& pool, size_t place);
  bool is_on_host(size_t layer) const { return bank_of(layer).queue == nullptr; }
  void give_memory_back();
  int32_t num_coded() const { return coded_ ? coded_->in_use() : 0; }
  int32_t take();
  void move(ops::MoveTokensProblem& moves);  // of which the layers are set here
  void wait();                               // until devices have done what they were told
  std::shared_ptr<std::byte> uploaded(const ops::UploadBlock& block, Bank& bank);
  void retain_on_device(size_t bank, std::span<const int32_t> pages, int64_t first,
                        std::span<const std::vector<int32_t>> lists);
  void rotate_on_device(size_t bank, std::span<const int32_t> pages, int64_t first, int64_t end,
                        std::span<const KvTurn> turns);
  template <class F>
  void with_slot(std::span<const int32_t> pages, HeadPlace head, int64_t slot, bool changes,
                 F&& f) const;
  // Calls with the memory, the address and the size of each part of a page.
  template <class F>
  void for_parts(int32_t page, F&& f) const;
  template <class F>
  void for_coded_parts(int32_t page, F&& f) const;
  Bank& bank_on(Device device);
  void allocate(Bank& bank);
  ops::KvLayer next_layer(Bank& bank);
  void check_index() const;
  void allocate_bounds();
  void allocate_bounds(Bank& bank, size_t plane);
  const Bank& bank_of(size_t layer) const { return banks_[bank_of_[layer]]; }

  KvCacheConfig config_;
  std::vector<Bank> banks_;
  std::vector<size_t> bank_of_;  // by layer
  size_t num_bytes_ = 0;
  size_t head_bytes_ = 0;   // bytes of K (or of V) of a page for one head
  size_t plane_bytes_ = 0;  // bytes of K (or of V) of a layer
  size_t scale_bytes_ = 0;  // i8: bytes of the K (or V) scales of a layer
  std::vector<ops::KvLayer> layers_;
  std::unique_ptr<CodedStore> coded_;  // null: pages stay as they are
  std::vector<int32_t> references_;
  std::vector<Written> written_;
  std::vector<uint8_t> is_filling_;
  std::vector<int32_t> free_;  // a stack: the page freed last is the one whose memory is warm
};

}  // namespace effinfer::kv
