// How pages become coded ones: on the host where they lie; those of which a GPU has some layers on
// the host, a page at a time.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "effinfer/error.h"
#include "kv/page_pool.h"
#include "ops/encode_pages.h"
#include "ops/registry.h"

namespace effinfer::kv {
namespace {

// Zeros, which stay where a page says nothing, in memory that vectors of the CPU are loaded from.
std::shared_ptr<uint8_t> host_bytes(size_t count) {
  auto bytes = std::static_pointer_cast<uint8_t>(memory_of({}).allocate(count, Pages::heap));
  if (!bytes) throw OutOfMemory("[kv_cache] coding: no memory to encode a page");
  std::memset(bytes.get(), 0, count);
  return bytes;
}

// A page of all layers in the host's memory, and the coded one that is made of it. `queues`: of
// each layer's device; null: it is the host.
class PageEncoder {
 public:
  PageEncoder(std::span<const ops::KvLayer> layers, const CodedStore& store,
              std::vector<Queue*> queues)
      : from_(layers),
        store_(store),
        queues_(std::move(queues)),
        plane_(layers[0].head_bytes() * static_cast<size_t>(layers[0].num_kv_heads)),
        pages_(host_bytes(2 * plane_ * layers.size())),
        codes_(host_bytes(store.page_bytes())),
        staged_(host_bytes(store.page_bytes())) {
    for (size_t i = 0; i < layers.size(); ++i) {
      ops::KvLayer& layer = layers_.emplace_back(layers[i]);
      layer.num_pages = 1;
      layer.k = pages_.get() + 2 * i * plane_;
      layer.v = layer.k + plane_;
      layer.coded = store.host_layer(i);
      layer.coded.first_page = layer.num_pages;
      layer.coded.data = codes_.get() + i / store.shared_layers() * store.layer_page_bytes();
    }
  }

  // Of the page at a place of its sequence.
  void encode(int32_t page, int32_t place, ThreadPool& pool) {
    for (size_t i = 0; i < layers_.size(); ++i) {
      if (queues_[i] == nullptr) {
        layers_[i].k = from_[i].k_head(page, 0);
        layers_[i].v = from_[i].v_head(page, 0);
        continue;
      }
      queues_[i]->download(layers_[i].k, from_[i].k_head(page, 0), plane_);
      queues_[i]->download(layers_[i].v, from_[i].v_head(page, 0), plane_);
    }
    wait();
    const ops::PageCoding coding = {0, layers_[0].num_pages, place};
    ops::run_alone<ops::EncodePagesProblem>(
        {layers_.data(), static_cast<int64_t>(layers_.size()), &coding, 1}, pool);
  }

  // Heads have their keys and values together on the host.
  void store(int32_t coded) {
    uint8_t* to = staged_.get();
    for (size_t i = 0; i < layers_.size(); i += store_.shared_layers()) {
      const ops::CodedPages& own = layers_[i].coded;
      if (queues_[i] == nullptr) {
        std::memcpy(from_[i].coded.head(coded, 0), own.data, store_.layer_page_bytes());
        continue;
      }
      const auto heads = static_cast<size_t>(own.num_kv_heads);
      uint8_t* const keys = to;
      uint8_t* const values = keys + heads * own.key_bytes();
      for (size_t head = 0; head < heads; ++head) {
        const uint8_t* from = own.data + head * own.head_bytes();
        std::memcpy(keys + head * own.key_bytes(), from, own.key_bytes());
        std::memcpy(values + head * own.behind_keys(), from + own.key_bytes(), own.behind_keys());
      }
      queues_[i]->upload(from_[i].coded.keys_of(coded, 0), keys, heads * own.key_bytes());
      queues_[i]->upload(from_[i].coded.values_of(coded, 0), values, heads * own.behind_keys());
      to += store_.layer_page_bytes();
    }
    wait();
  }

 private:
  // Layers of a device follow each other.
  void wait() {
    for (size_t i = 0; i < queues_.size(); ++i) {
      if (queues_[i] != nullptr && (i == 0 || queues_[i] != queues_[i - 1])) queues_[i]->wait();
    }
  }

  const std::span<const ops::KvLayer> from_;
  const CodedStore& store_;
  const std::vector<Queue*> queues_;
  const size_t plane_;  // bytes of a layer's keys, or values
  const std::shared_ptr<uint8_t> pages_;
  const std::shared_ptr<uint8_t> codes_;
  const std::shared_ptr<uint8_t> staged_;
  std::vector<ops::KvLayer> layers_;
};

}  // namespace

// On a GPU as a part of a page, which may have to be taken for that.
int32_t PagePool::take_coded() {
  if (coded_->in_pages() && !coded_->has_free()) {
    const int32_t page = take();
    references_[static_cast<size_t>(page)] = 0;
    Written& written = written_[static_cast<size_t>(page)];
    if (written == Written::never) written = Written::on_devices;
    coded_->add_parts(page);
  }
  return coded_->take();
}

int32_t PagePool::allocate_coded() {
  const int32_t page = take_coded();
  references_[static_cast<size_t>(page)] = 1;
  return page;
}

void PagePool::encode(std::span<int32_t> pages, ThreadPool& pool, size_t place) {
  if (coded_->in_pages()) {
    encode_on_device(pages, pool, place);
  } else {
    encode_on_host(pages, pool, place);
  }
  give_memory_back();
}

void PagePool::encode_on_host(std::span<int32_t> pages, ThreadPool& pool, size_t place) {
  std::vector<ops::PageCoding> codings;
  for (size_t i = 0; i < pages.size(); ++i) {
    if (coding_of(pages[i]) >= 0) continue;
    codings.push_back({pages[i], coded_->take(), static_cast<int32_t>(place + i)});
    coded_->link(pages[i], codings.back().to);
  }
  if (!codings.empty()) {
    ops::run_alone<ops::EncodePagesProblem>({layers_.data(), static_cast<int64_t>(layers_.size()),
                                             codings.data(), static_cast<int64_t>(codings.size())},
                                            pool);
  }
  for (int32_t& page : pages) {
    const int32_t plain = page;
    page = coding_of(plain);
    retain(page);
    release(plain);
  }
}

// A page that nobody else has makes room for what is made of it.
void PagePool::encode_on_device(std::span<int32_t> pages, ThreadPool& pool, size_t place) {
  std::vector<Queue*> queues;
  for (size_t i = 0; i < layers_.size(); ++i) queues.push_back(bank_of(i).queue.get());
  PageEncoder encoder(layers_, *coded_, std::move(queues));
  for (size_t i = 0; i < pages.size(); ++i) {
    const int32_t plain = pages[i];
    int32_t coded = coding_of(plain);
    if (coded >= 0) {
      retain(coded);
      release(plain);
    } else {
      encoder.encode(plain, static_cast<int32_t>(place + i), pool);
      const bool stays = references(plain) > 1;
      release(plain);
      coded = allocate_coded();
      if (stays) coded_->link(plain, coded);
      encoder.store(coded);
    }
    pages[i] = coded;
  }
}

// The host's, of pages that are free or parts of which a GPU has.
void PagePool::give_memory_back() {
  const auto on_host = [](const Bank& bank) { return bank.queue == nullptr; };
  if (std::ranges::none_of(banks_, on_host)) return;
  const Written after = std::ranges::all_of(banks_, on_host) ? Written::never : Written::on_devices;
  std::vector<int32_t> pages;
  const auto add = [&](int32_t page) {
    if (written_[static_cast<size_t>(page)] == Written::everywhere) pages.push_back(page);
  };
  for (int32_t page = 0; page < num_pages(); ++page) {
    if (coded_->is_parts(page)) add(page);
  }
  std::ranges::for_each(free_, add);
  if (pages.size() <= kWarmPages) return;
  pages.resize(pages.size() - kWarmPages);
  std::sort(pages.begin(), pages.end());
  const size_t bytes = static_cast<size_t>(config_.num_kv_heads) * head_bytes_;
  for (size_t first = 0, end = 0; first < pages.size(); first = end) {
    while (end < pages.size() && pages[end] - pages[first] == static_cast<int32_t>(end - first)) {
      written_[static_cast<size_t>(pages[end++])] = after;
    }
    for (size_t i = 0; i < layers_.size(); ++i) {
      if (!is_on_host(i)) continue;
      zero_lazily(layers_[i].k_head(pages[first], 0), (end - first) * bytes);
      zero_lazily(layers_[i].v_head(pages[first], 0), (end - first) * bytes);
    }
  }
}

}  // namespace effinfer::kv
