#include "core/log.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

namespace effinfer {
namespace {

constexpr int kSilent = 1 << 8;  // above all levels

struct Listener {
  std::mutex mutex;
  std::shared_ptr<const LogCallback> callback;
  std::atomic<int> least{kSilent};
};

// Never destroyed: threads may log while the process ends.
Listener& listener() {
  static auto* const only = new Listener;
  return *only;
}

}  // namespace

void set_log_callback(LogCallback callback, LogLevel least) {
  const bool hears = static_cast<bool>(callback);
  auto next = hears ? std::make_shared<const LogCallback>(std::move(callback)) : nullptr;
  Listener& to = listener();
  {
    const std::lock_guard lock(to.mutex);
    to.callback.swap(next);
    to.least = hears ? static_cast<int>(least) : kSilent;
  }
  // The callback before it goes here, without the lock: it may be of any kind.
}

bool logs(LogLevel level) {
  return static_cast<int>(level) >= listener().least.load(std::memory_order_relaxed);
}

void log(LogLevel level, const std::string& text) {
  if (!logs(level)) return;
  Listener& to = listener();
  std::shared_ptr<const LogCallback> callback;
  {
    const std::lock_guard lock(to.mutex);
    if (static_cast<int>(level) >= to.least) callback = to.callback;
  }
  if (!callback) return;
  try {
    (*callback)(level, text);
  } catch (...) {  // work goes on whatever becomes of the message
  }
}

}  // namespace effinfer
