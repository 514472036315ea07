// Code whose end is part of the question, in processes of its own.
#pragma once

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>

#include "cpp/check.h"

namespace effinfer {

// How `body` ended: what it wrote to stderr, with the message of an exception, and the process's
// status as waitpid() has it.
struct Child {
  std::string text;
  int status = 0;

  bool succeeded() const { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }
  // That killed it, or 0.
  int signal() const { return WIFSIGNALED(status) ? WTERMSIG(status) : 0; }
};

// Succeeds if `body` returns true and no CHECK in it fails. A minute later it is killed.
inline Child run_child(const std::function<bool()>& body) {
  constexpr unsigned kMostSeconds = 60;
  int ends[2];
  if (pipe(ends) != 0) return {"no pipe", 1};
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    std::signal(SIGSEGV, SIG_DFL);  // sanitizers have handlers of their own
    alarm(kMostSeconds);
    const int before = check::failures();
    bool right = false;
    try {
      right = body() && check::failures() == before;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    _exit(right ? 0 : 1);
  }
  close(ends[1]);
  Child out;
  std::array<char, 4096> some;
  for (ssize_t n; (n = read(ends[0], some.data(), some.size())) > 0;) {
    out.text.append(some.data(), static_cast<size_t>(n));
  }
  close(ends[0]);
  waitpid(child, &out.status, 0);
  return out;
}

}  // namespace effinfer
