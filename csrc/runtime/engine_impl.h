// The inside of an Engine.
#pragma once

#include <memory>
#include <vector>

#include "effinfer/engine.h"
#include "runtime/engine_core.h"

namespace effinfer {

struct Engine::Impl {
  std::shared_ptr<const Model> model;
  std::shared_ptr<ThreadPool> pool;
  std::shared_ptr<Executable> executable;
  std::vector<std::shared_ptr<Proposer>> proposers;
  std::unique_ptr<runtime::EngineCore> core;
};

}  // namespace effinfer
