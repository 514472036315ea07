// The coded pages of a step on a GPU (ops/coded_pages.h): which ones its sequences hold, and memory
// for one layer of them as attention reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "executor/batch_check.h"
#include "ops/kv_layout.h"

namespace effinfer::executor {

class StepCoding {
 public:
  // Memory of so many bytes, for what a message says; throws OutOfMemory.
  using Allocate = std::function<std::shared_ptr<void>(size_t bytes, const char* what)>;

  explicit StepCoding(Allocate allocate) : allocate_(std::move(allocate)) {}

  // The most that a step may hold: arrays of `numbers` have room for them.
  static size_t most_pages(const BatchLimits& limits);
  // Memory for any step with a cache of such layers, which have coded pages. It is taken when their
  // first step comes.
  void reserve(const ops::KvLayer& layer, const BatchLimits& limits);
  // Of a step's pages the same, but coded ones by their places among all that it holds.
  std::span<const int32_t> find(std::span<const int32_t> pages);
  // Of those that were found last.
  std::span<const int32_t> numbers() const { return numbers_; }
  size_t room() const { return room_; }
  uint8_t* keys() const { return static_cast<uint8_t*>(keys_.get()); }
  uint8_t* values() const { return static_cast<uint8_t*>(values_.get()); }

 private:
  Allocate allocate_;
  int32_t first_page_ = 0;
  size_t room_ = 0;  // pages
  size_t bytes_ = 0;
  std::shared_ptr<void> keys_;
  std::shared_ptr<void> values_;
  std::vector<int32_t> numbers_;
  std::vector<int32_t> place_of_;  // by number; -1: not of the step
  std::vector<int32_t> pages_;
};

}  // namespace effinfer::executor
