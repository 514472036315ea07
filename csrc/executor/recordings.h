// The kernels of steps that were recorded, by what a recording depends on. A step is recorded when
// its like has run before: what runs once need not be, and kernels are loaded when they first run.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "core/backend.h"

namespace effinfer::executor {

class Recordings {
 public:
  using Key = std::vector<int64_t>;

  // Puts what put() puts into the queue there: as a recording of the same key did, if there is one.
  template <class Put>
  void run(const Key& key, Queue& queue, const Put& put) {
    for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
      if (entry->key != key) continue;
      entries_.splice(entries_.begin(), entries_, entry);
      if (!entry->recording) entry->recording = queue.record(put);
      return queue.replay(*entry->recording);
    }
    put();
    if (entries_.size() == kMost) entries_.pop_back();
    entries_.push_front({key, nullptr});
  }

 private:
  // Each holds some hundred KB of the device: as many batch sizes as there are, at the few lengths
  // of context that differ while they run.
  static constexpr size_t kMost = 64;
  struct Entry {
    Key key;
    std::unique_ptr<Recording> recording;  // null: its like has run once
  };
  std::list<Entry> entries_;  // the latest first
};

}  // namespace effinfer::executor
