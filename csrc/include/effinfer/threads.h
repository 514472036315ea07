// The thread pool: one parallel region runs a whole step; its members meet at barriers.
//
// A kernel is called by every member of the team with the same problem; the members share its work
// by claiming chunks. Between two barriers a team shares one chunk counter, so a kernel runs at
// most one for_chunks() between barriers. What a chunk computes may not depend on who claims it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "effinfer/export.h"

namespace effinfer {

class TeamShared;

// One member's handle on the parallel region that it is in.
class EFFINFER_API Team {
 public:
  Team(TeamShared& shared, int rank) : shared_(shared), rank_(rank) {}
  int rank() const { return rank_; }
  int size() const;  // 1 for alone()
  // This member as a team of its own: a kernel called with it does all its work here, with this
  // member's scratch, whatever the others do.
  Team alone() const {
    Team team(shared_, rank_);
    team.alone_ = true;
    return team;
  }
  // Waits for all members; what they wrote before is visible after. Resets the chunk counter.
  void barrier();
  int64_t barriers() const { return barriers_; }  // that this member has passed in the region
  // The next unclaimed chunk number of this phase: 0, 1, 2, ...
  int64_t claim();
  // This member's private memory, 64-byte aligned, of the size that ThreadPool::reserve_scratch
  // set.
  void* scratch() const;
  size_t scratch_bytes() const;

  // Calls body(chunk) for each chunk in [0, count) that this member claims.
  template <class Body>
  __attribute__((always_inline)) void for_chunks(int64_t count, Body&& body) {
    for (int64_t chunk = claim(); chunk < count; chunk = claim()) body(chunk);
  }

 private:
  TeamShared& shared_;
  int rank_;
  int64_t barriers_ = 0;
  bool alone_ = false;
  int64_t next_chunk_ = 0;  // alone
};

// Runs `task(context, rank)` for every rank in [0, threads) at the same time, and returns when all
// are done. effinfer's own pool is one; an embedder may pass a wrapper around another.
class EFFINFER_API Dispatcher {
 public:
  virtual ~Dispatcher() = default;
  virtual int threads() const = 0;
  virtual void dispatch(void (*task)(void* context, int rank), void* context) = 0;
};

class EFFINFER_API ThreadPool {
 public:
  // The pool has usable_threads(threads) members, or with `oversubscribe` as many as asked for,
  // whatever the CPUs. Workers spin at most 20 us (under a quota and oversubscribed not at all),
  // then sleep on a futex.
  explicit ThreadPool(int threads = 0, bool oversubscribe = false);
  explicit ThreadPool(std::shared_ptr<Dispatcher> dispatcher);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;
  const std::string& reason() const;  // why it has that size
  // Runs body(team) on every member and returns when all are done; concurrent calls take turns.
  // The first exception that a member throws is rethrown here (a body must not throw between
  // barriers that other members wait at).
  void parallel(const std::function<void(Team&)>& body);
  // Makes each member's scratch at least this large. Throws OutOfMemory.
  void reserve_scratch(size_t bytes);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace effinfer
