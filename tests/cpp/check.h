// A unit-test harness of one header: TEST("name") { CHECK(x == y); } and a main that runs them all,
// or those whose name contains the first argument. A test that cannot run on this machine calls
// skip(reason): it counts as skipped, never as passed.
#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*body)();
};

// What main returns when nothing failed and nothing ran: SKIP_RETURN_CODE in CMakeLists.txt.
constexpr int kAllSkipped = 77;

// AddressSanitizer takes ten times as long: of random walks and draws there is a part there.
#if defined(__SANITIZE_ADDRESS__)
constexpr int kShare = 3;
#else
constexpr int kShare = 1;
#endif

// No std::exception, so that neither a test nor CHECK_THROWS takes it for an error of the library.
struct Skipped {
  std::string reason;
};

[[noreturn]] inline void skip(std::string reason) {
  throw Skipped{std::move(reason)};
}

inline std::vector<Test>& tests() {
  static std::vector<Test> list;
  return list;
}

inline int& failures() {
  static int count = 0;
  return count;
}

struct Register {
  Register(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  ++failures();
}

template <class A, class B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream what;
  what << "CHECK_EQ(" << text << "): " << a << " != " << b;
  fail(file, line, what.str());
}

// Runs `body`, which must throw an E whose message contains `part`.
template <class E>
void throws(const std::function<void()>& body, std::string_view part, const char* file, int line) {
  try {
    body();
  } catch (const E& error) {
    if (std::string_view(error.what()).find(part) == std::string_view::npos) {
      fail(file, line,
           "message \"" + std::string(error.what()) + "\" lacks \"" + std::string(part) + "\"");
    }
    return;
  } catch (const std::exception& error) {
    fail(file, line, std::string("another exception: ") + error.what());
    return;
  }
  fail(file, line, "no exception");
}

enum class Outcome { passed, failed, skipped };

inline Outcome run(const Test& test) {
  const int before = failures();
  try {
    test.body();
  } catch (const Skipped& skipped) {
    if (failures() == before) {
      std::printf("skipped: %s: %s\n", test.name, skipped.reason.c_str());
      return Outcome::skipped;
    }
  } catch (const std::exception& error) {
    fail(test.name, 0, std::string("uncaught: ") + error.what());
  }
  if (failures() == before) return Outcome::passed;
  std::printf("failed: %s\n", test.name);
  return Outcome::failed;
}

// Runs the tests whose name contains `filter`; the exit status.
inline int run(const std::vector<Test>& list, std::string_view filter) {
  int counts[3] = {};
  for (const Test& test : list) {
    if (std::string_view(test.name).find(filter) == std::string_view::npos) continue;
    ++counts[static_cast<int>(run(test))];
  }
  const auto [passed, failed, skipped] = counts;
  std::printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
  if (failed > 0 || passed + skipped == 0) return 1;
  return passed > 0 ? 0 : kAllSkipped;
}

}  // namespace check

#define CHECK_JOIN2(a, b) a##b
#define CHECK_JOIN(a, b) CHECK_JOIN2(a, b)
#define TEST(name)                                                \
  static void CHECK_JOIN(test_body_, __LINE__)();                 \
  static const check::Register CHECK_JOIN(test_entry_, __LINE__)( \
      name, CHECK_JOIN(test_body_, __LINE__));                    \
  static void CHECK_JOIN(test_body_, __LINE__)()
#define CHECK(condition) \
  if (!(condition)) check::fail(__FILE__, __LINE__, "CHECK(" #condition ")")
#define CHECK_EQ(a, b) check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_THROWS(type, part, ...) \
  check::throws<type>([&] { __VA_ARGS__; }, part, __FILE__, __LINE__)
#define CHECK_MAIN()                                            \
  int main(int argc, char** argv) {                             \
    return check::run(check::tests(), argc > 1 ? argv[1] : ""); \
  }
