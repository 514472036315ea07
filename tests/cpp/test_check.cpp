// The harness of these tests: what fails, what is skipped, and what main returns.
#include <stdexcept>

#include "check.h"

using check::Outcome;
using check::Test;

namespace {

void pass() {}
void fail() {
  CHECK_EQ(1 + 1, 3);
}
void fail_twice() {
  CHECK(false);
  CHECK_THROWS(std::logic_error, "word", throw std::logic_error("another"));
}
void fail_by_silence() {
  CHECK_THROWS(std::logic_error, "", pass());
}
void fail_by_another_type() {
  CHECK_THROWS(std::logic_error, "", throw std::runtime_error("of another type"));
}
void fail_uncaught() {
  throw std::runtime_error("uncaught");
}
void skip() {
  check::skip("for a test");
}
void skip_inside_a_check() {
  CHECK_THROWS(std::logic_error, "", skip());
}
void fail_then_skip() {
  fail();
  skip();
}

// Without the failures that it counts.
template <class Call>
auto unaccounted(Call&& call) {
  const int before = check::failures();
  const auto result = call();
  check::failures() = before;
  return result;
}

int status(const std::vector<Test>& list, std::string_view filter = "") {
  return unaccounted([&] { return check::run(list, filter); });
}

}  // namespace

TEST("outcomes") {
  const auto outcome = [](void (*body)()) {
    return unaccounted([body] { return check::run({"of the harness", body}); });
  };
  CHECK(outcome(pass) == Outcome::passed);
  for (const auto body :
       {fail, fail_twice, fail_by_silence, fail_by_another_type, fail_uncaught, fail_then_skip}) {
    CHECK(outcome(body) == Outcome::failed);
  }
  CHECK(outcome(skip) == Outcome::skipped);
  CHECK(outcome(skip_inside_a_check) == Outcome::skipped);
}

TEST("exit statuses") {
  CHECK_EQ(status({{"a", pass}, {"b", skip}}), 0);
  CHECK_EQ(status({{"a", pass}, {"b", skip}}, "b"), check::kAllSkipped);
  CHECK_EQ(status({{"a", skip}, {"b", skip}}), check::kAllSkipped);
  CHECK_EQ(status({{"a", pass}, {"b", fail}, {"c", skip}}), 1);
  CHECK_EQ(status({{"a", skip}, {"b", fail_twice}}), 1);
  CHECK_EQ(status({{"a", pass}}, "no such name"), 1);
}

CHECK_MAIN()
