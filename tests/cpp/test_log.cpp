// The log: who hears what, from which thread, and that a callback cannot break the work.
#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/log.h"

using namespace effinfer;

namespace {

struct Silence {
  ~Silence() { set_log_callback(nullptr); }
};

}  // namespace

TEST("messages of the level and above are heard") {
  const Silence silence;
  CHECK(!logs(LogLevel::warning));
  log(LogLevel::warning, "nobody hears it");
  std::vector<std::string> heard;
  set_log_callback([&](LogLevel, std::string_view text) { heard.emplace_back(text); });
  CHECK(!logs(LogLevel::debug));
  CHECK(logs(LogLevel::info));
  log(LogLevel::debug, "a");
  log(LogLevel::info, "b");
  log(LogLevel::warning, "c");
  CHECK_EQ(heard.size(), 2u);
  CHECK_EQ(heard[0], std::string("b"));
  CHECK_EQ(heard[1], std::string("c"));
  set_log_callback(nullptr);
  log(LogLevel::warning, "d");
  CHECK_EQ(heard.size(), 2u);
}

TEST("what a callback throws is dropped") {
  const Silence silence;
  int calls = 0;
  set_log_callback([&](LogLevel, std::string_view) {
    ++calls;
    throw std::runtime_error("no");
  });
  log(LogLevel::info, "x");
  log(LogLevel::info, "y");
  CHECK_EQ(calls, 2);
}

TEST("a callback may be changed while others log, and by itself") {
  const Silence silence;
  std::atomic<int> heard{0};
  const auto count = [&](LogLevel, std::string_view) { ++heard; };
  set_log_callback(count);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 1000; ++n) {
        log(LogLevel::info, "x");
        if (n % 100 == 0) set_log_callback(count);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(heard.load(), 4000);
  set_log_callback([&](LogLevel, std::string_view) { set_log_callback(nullptr); });
  log(LogLevel::info, "the last");
  CHECK(!logs(LogLevel::warning));
}

CHECK_MAIN()
