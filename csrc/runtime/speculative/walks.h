// How verifiers that sample walk a tree of drafts: what they accept, and what follows it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "effinfer/speculative.h"
#include "runtime/speculative/residual.h"

namespace effinfer::runtime {

// Where a walk leaves something to chance: tests enumerate what may happen.
class Chance {
 public:
  virtual ~Chance() = default;
  virtual bool happens(double probability) = 0;
  // An index, with the probability of its weight among all.
  virtual int32_t draw(std::span<const double> weights) = 0;
};

// The target's distribution [vocab] behind a row's path, which may be changed; until the next call.
using TargetRows = std::function<std::span<double>(int32_t row)>;

// Accepted nodes from the root on, and the token behind them; -1: the target's own, of the last
// one's row, undisturbed.
struct Path {
  std::vector<int32_t> nodes;
  int32_t token = -1;
};

// From the root: the first child that is accepted is followed.
class RejectionWalk {
 public:
  void run(const Draft& draft, const TargetRows& target, Chance& chance, Path& path);

 private:
  Residual residual_;
  std::vector<int32_t> children_;
};

// From the leaves: a node is accepted with what its path is worth when all below it was refused.
class TraversalWalk {
 public:
  void run(const Draft& draft, const TargetRows& target, Chance& chance, Path& path);

 private:
  struct Level {
    Residual residual;
    std::vector<int32_t> children;
  };
  bool visit(int32_t node, size_t depth, double worth);

  const Draft* draft_ = nullptr;
  const TargetRows* target_ = nullptr;
  Chance* chance_ = nullptr;
  Path* path_ = nullptr;
  std::vector<Level> levels_ = std::vector<Level>(Draft::kMostNodes + 1);  // by depth
};

// Along tokens of which each is likely enough by itself.
class TypicalWalk {
 public:
  TypicalWalk(double epsilon, double delta) : epsilon_(epsilon), delta_(delta) {}
  void run(const Draft& draft, const TargetRows& target, Path& path);

 private:
  double epsilon_;
  double delta_;
};

}  // namespace effinfer::runtime
