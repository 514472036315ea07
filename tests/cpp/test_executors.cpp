// Parts of the machine: texts of placements, pinned pools, executors and their tickets, and how a
// step is cancelled between its kernels.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "effinfer/error.h"
#include "effinfer/job_executor.h"
#include "executor/call.h"

using namespace effinfer;

namespace {

std::string core_text(int core) {
  return "cpu:" + std::to_string(core);
}

// Whether this thread runs on these cores and no others.
bool is_pinned_to(const std::vector<int>& cores) {
  return usable_cores() == cores;
}

// Adds up what members ran; in its `cancels` call the member of that rank utters the wish.
class CountingCall final : public executor::Call {
 public:
  CountingCall(int members, const CancelToken* token, int rank)
      : ran(static_cast<size_t>(members)), token_(token), rank_(rank) {}
  bool prepare(const executor::Step&) override { return true; }
  void run(const executor::Step&, Team& team) const override {
    ++ran[static_cast<size_t>(team.rank())];
    if (token_ != nullptr && team.rank() == rank_) token_->cancel();
  }
  void launch(Queue&) const override {}
  ops::Cost cost() const override { return {}; }

  mutable std::vector<std::atomic<int>> ran;

 private:
  const CancelToken* token_;
  int rank_;
};

struct Calls {
  // Call `at` utters the wish (-1: none does).
  Calls(int count, int members, const CancelToken& token, int at, int rank) {
    for (int i = 0; i < count; ++i) {
      all.push_back(std::make_unique<CountingCall>(members, i == at ? &token : nullptr, rank));
      calls.push_back(all.back().get());
    }
  }
  // How many calls ran; each on all members or on none.
  int count(size_t members) const {
    int ran = 0;
    bool ended = false;
    for (const auto& call : all) {
      const int first = call->ran[0];
      for (size_t m = 0; m < members; ++m) CHECK_EQ(call->ran[m].load(), first);
      CHECK(!ended || first == 0);
      ended = first == 0;
      ran += first;
    }
    return ran;
  }
  std::vector<std::unique_ptr<CountingCall>> all;
  std::vector<const executor::Call*> calls;
};

}  // namespace

TEST("placement: texts, and what they are refused for") {
  const std::vector<int> usable = usable_cores();
  const std::string first = core_text(usable.front());
  CHECK(parse_placement("cpu") == Placement{});
  CHECK(parse_placement(first).cores == std::vector<int>{usable.front()});
  CHECK_EQ(name(parse_placement(first + "," + std::to_string(usable.front()))), first);
  CHECK_EQ(name(Placement{{}, {0, 1, 2, 5, 7, 8}}), std::string("cpu:0-2,5,7-8"));
  CHECK_EQ(name(Placement{}), std::string("cpu"));
  for (const char* text : {"cpu:", "cpu:x", "cpu:1-", "cpu:3-1", "cpu:1,", "cpu:-1", "cpu:1;2",
                           "cpu: 1", "cpu:99999999999999"}) {
    CHECK_THROWS(InvalidArgument, "expected cores as in", parse_placement(text));
  }
  CHECK_THROWS(InvalidArgument, "[LLM] device: expected cores of ",
               parse_placement("cpu:1000000", "[LLM] device"));
  CHECK_THROWS(InvalidArgument, "; the machine has ", parse_placement("cpu:0-1000000"));
  CHECK_THROWS(InvalidArgument, "expected \"cpu\"", parse_placement("gpu:0"));
  if (available_devices().size() == 1) {
    CHECK_THROWS(InvalidArgument, "CUDA: ", parse_placement("cuda:0"));
  }
}

TEST("placement: cores that the process may not use") {
  cpu_set_t before;
  CHECK_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  const std::vector<int> usable = usable_cores();
  if (usable.size() < 2) return;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<size_t>(usable[0]), &one);
  CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  CHECK_THROWS(InvalidArgument, " is not this process's", parse_placement(core_text(usable[1])));
  CHECK_THROWS(InvalidArgument, "expected some of", pinned_pool({usable[1]}));
  CHECK_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

TEST("placement: what is to run at the same time shares no core") {
  const auto named = [](const std::vector<Placement>& placements) {
    std::string text;
    for (const Placement& each : placements) text += name(each) + " ";
    return text;
  };
  const Placement zero{{}, {0}};
  const Placement one{{}, {1}};
  const Placement both{{}, {0, 1}};
  CHECK_EQ(named(place_apart({zero, one})), std::string("cpu:0 cpu:1 "));
  CHECK_EQ(named(place_apart({Placement{}})), std::string("cpu "));
  CHECK_THROWS(InvalidArgument, "got \"cpu:0-1\" and \"cpu:1\"", place_apart({both, one}));
  CHECK_THROWS(InvalidArgument, "got \"cpu\" and \"cpu\"", place_apart({Placement{}, Placement{}}));
  const std::vector<int> usable = usable_cores();
  CHECK_THROWS(InvalidArgument, "which leaves no core", place_apart({Placement{}, {{}, usable}}));
  if (usable.size() < 2) return;
  // "cpu" is what the other leaves.
  const std::vector<int> rest(usable.begin() + 1, usable.end());
  const std::vector<Placement> placed = place_apart({Placement{}, {{}, {usable[0]}}});
  CHECK(placed[0].cores == rest);
}

TEST("pool: members are pinned to cores, the caller while it is one") {
  const std::vector<int> usable = usable_cores();
  for (const int threads : {0, 1}) {
    const std::shared_ptr<ThreadPool> pinned_to = pinned_pool(usable, threads);
    ThreadPool& pool = *pinned_to;
    const size_t members = threads == 1 ? 1 : usable.size();
    CHECK_EQ(static_cast<size_t>(pool.size()), members);
    CHECK(cores_of(pool) ==
          std::vector<int>(usable.begin(), usable.begin() + static_cast<ptrdiff_t>(members)));
    CHECK(pool.reason().find("one for each of the cores ") == 0);
    std::atomic<int> pinned{0};
    for (int i = 0; i < 3; ++i) {
      pool.parallel([&](Team& team) {
        team.barrier();
        if (is_pinned_to({usable[static_cast<size_t>(team.rank())]})) ++pinned;
      });
    }
    CHECK_EQ(pinned.load(), 3 * static_cast<int>(members));
    CHECK(usable_cores() == usable);
  }
  ThreadPool anywhere(2);
  CHECK(cores_of(anywhere) == usable);
  CHECK_THROWS(InvalidArgument, "got none", pinned_pool({}));
  CHECK_THROWS(InvalidArgument, "each once", pinned_pool({usable[0], usable[0]}));
  CHECK_THROWS(InvalidArgument, "got -1", pinned_pool(usable, -1));
}

TEST("executor: jobs run in order on its cores, and tickets say how they ended") {
  const int core = usable_cores().back();
  JobExecutor executor(Placement{{}, {core}});
  CHECK_EQ(executor.pool()->size(), 1);
  std::vector<int> order;
  std::vector<Ticket> tickets;
  const std::thread::id caller = std::this_thread::get_id();
  for (int i = 0; i < 20; ++i) {
    tickets.push_back(executor.submit([&, i](const CancelToken&) {
      CHECK(std::this_thread::get_id() != caller);
      CHECK(is_pinned_to({core}));
      order.push_back(i);
      if (i == 7) throw InvalidArgument("seven");
    }));
  }
  tickets.back().wait();
  for (int i = 0; i < 20; ++i) {
    CHECK(tickets[static_cast<size_t>(i)].has_ended());
    CHECK_EQ(order[static_cast<size_t>(i)], i);
  }
  CHECK_THROWS(InvalidArgument, "seven", tickets[7].wait());
  CHECK_THROWS(InvalidArgument, "seven", tickets[7].wait());
  CHECK(Ticket().has_ended());
  Ticket().wait();
  Ticket().cancel();
}

TEST("executor: a cancelled job ends, and one that did not begin never does") {
  std::atomic<int> ran{0};
  Ticket left;
  {
    JobExecutor executor(Placement{});
    std::atomic<bool> began{false};
    const Ticket running = executor.submit([&](const CancelToken& cancel) {
      began = true;
      while (true) cancel.check();
    });
    const Ticket waiting = executor.submit([&](const CancelToken&) { ++ran; });
    waiting.cancel();
    while (!began) std::this_thread::yield();
    running.cancel();
    CHECK_THROWS(Cancelled, "cancelled", running.wait());
    CHECK_THROWS(Cancelled, "cancelled", waiting.wait());
    // What is there when it goes is cancelled.
    left = executor.submit([&](const CancelToken& cancel) {
      while (true) cancel.check();
    });
    executor.submit([&](const CancelToken&) { ++ran; });
  }
  CHECK_THROWS(Cancelled, "cancelled", left.wait());
  CHECK_EQ(ran.load(), 0);
}

TEST("executor: two of them work at the same time") {
  const std::vector<int> usable = usable_cores();
  JobExecutor first(Placement{{}, {usable.front()}});
  JobExecutor second(Placement{{}, {usable.back()}});
  std::atomic<int> here{0};
  // Each waits for the other: one after the other they would never end.
  const auto meet = [&](const CancelToken&) {
    ++here;
    while (here < 2) std::this_thread::yield();
  };
  const Ticket a = first.submit(meet);
  const Ticket b = second.submit(meet);
  a.wait();
  b.wait();
  CHECK_EQ(here.load(), 2);
}

TEST("region: all members leave after the kernel in which it was cancelled") {
  constexpr int kCount = 12;
  for (const int members : {1, 2, 3}) {
    ThreadPool pool(members, true);
    for (int rank = 0; rank < members; ++rank) {
      for (int at = -1; at < kCount; ++at) {
        const CancelToken token;
        const Calls calls(kCount, members, token, at, rank);
        const executor::Step step;
        executor::Region region{step, calls.calls};
        region.cancel = &token;
        pool.parallel([&](Team& team) { region.run(team, executor::NoTimer()); });
        const int ran = calls.count(static_cast<size_t>(members));
        CHECK_EQ(static_cast<size_t>(ran), region.num_run());
        // The first member looks after its share of a kernel: another's wish may come later.
        CHECK(at < 0 ? ran == kCount
                     : ran == at + 1 || (rank > 0 && ran == std::min(at + 2, kCount)));
      }
    }
  }
}

TEST("region: wishes at any time leave no member behind") {
  std::mt19937 random(5);
  ThreadPool pool(2, true);
  int stopped = 0;
  for (int round = 0; round < 300; ++round) {
    const CancelToken token;
    const Calls calls(400, 2, token, -1, 0);
    const executor::Step step;
    executor::Region region{step, calls.calls};
    region.cancel = &token;
    std::thread other([&, wait = random() % 60] {
      std::this_thread::sleep_for(std::chrono::microseconds(wait));
      token.cancel();
    });
    pool.parallel([&](Team& team) { region.run(team, executor::NoTimer()); });
    other.join();
    CHECK_EQ(static_cast<size_t>(calls.count(2)), region.num_run());
    stopped += region.num_run() < 400 ? 1 : 0;
  }
  CHECK(stopped > 0);
}

CHECK_MAIN()
