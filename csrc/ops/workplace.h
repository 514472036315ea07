// Memory of an operator's own where it runs: the host's, or a GPU's in the order of its queue.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "effinfer/executor.h"

namespace effinfer::ops {

class Workplace {
 public:
  explicit Workplace(const Executor& executor) : queue_(executor.queue()) {}

  // Uninitialised, while the handle lives.
  std::shared_ptr<void> allocate(size_t bytes) const {
    if (queue_ != nullptr) return queue_->allocate(std::max<size_t>(bytes, 1));
    return std::shared_ptr<std::byte[]>(new std::byte[bytes]);
  }
  void zero(void* to, size_t bytes) const {
    if (bytes == 0) return;
    if (queue_ != nullptr) return queue_->zero(to, bytes);
    std::memset(to, 0, bytes);
  }
  // The same numbers there: those of the host's vector, or a copy that lives as long as this.
  template <class T>
  const T* place(const std::vector<T>& values) {
    if (queue_ == nullptr) return values.data();
    const size_t bytes = values.size() * sizeof(T);
    held_.push_back(allocate(bytes));
    if (bytes > 0) queue_->upload(held_.back().get(), values.data(), bytes);
    return static_cast<const T*>(held_.back().get());
  }
  // Numbers of there, once they have been made.
  template <class T>
  std::vector<T> values(const void* from, size_t count) const {
    std::vector<T> out(count);
    if (count == 0) return out;
    if (queue_ != nullptr) {
      queue_->download(out.data(), from, count * sizeof(T));
      queue_->wait();
    } else {
      std::memcpy(out.data(), from, count * sizeof(T));
    }
    return out;
  }

 private:
  Queue* queue_;
  std::vector<std::shared_ptr<void>> held_;
};

}  // namespace effinfer::ops
