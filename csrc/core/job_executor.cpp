#include "effinfer/job_executor.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "core/affinity.h"

namespace effinfer {

struct Ticket::State {
  JobExecutor::Job job;
  CancelToken cancel;
  std::mutex mutex;
  std::condition_variable ended;
  bool has_ended = false;
  std::exception_ptr error;

  void run() {
    std::exception_ptr thrown;
    try {
      cancel.check();
      job(cancel);
    } catch (...) {
      thrown = std::current_exception();
    }
    job = nullptr;  // what it holds goes before its submitter goes on
    const std::lock_guard lock(mutex);
    error = thrown;
    has_ended = true;
    ended.notify_all();
  }
};

bool Ticket::has_ended() const {
  if (state_ == nullptr) return true;
  const std::lock_guard lock(state_->mutex);
  return state_->has_ended;
}

void Ticket::wait() const {
  if (state_ == nullptr) return;
  std::unique_lock lock(state_->mutex);
  state_->ended.wait(lock, [&] { return state_->has_ended; });
  if (state_->error) std::rethrow_exception(state_->error);
}

void Ticket::cancel() const {
  if (state_ != nullptr) state_->cancel.cancel();
}

struct JobExecutor::Impl {
  Placement placement;
  std::shared_ptr<ThreadPool> pool;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Ticket::State>> queue;
  std::shared_ptr<Ticket::State> running;
  bool stopping = false;
  std::thread thread;

  void work() {
    if (!placement.cores.empty()) core::pin_thread(placement.cores);
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return stopping || !queue.empty(); });
      if (queue.empty()) return;
      running = std::move(queue.front());
      queue.pop_front();
      if (stopping) running->cancel.cancel();
      lock.unlock();
      running->run();
      lock.lock();
      running = nullptr;
    }
  }
};

JobExecutor::JobExecutor(const Placement& placement) : impl_(std::make_unique<Impl>()) {
  check_device(placement.device, "[executor] device");
  impl_->placement = placement;
  impl_->pool =
      placement.cores.empty() ? std::make_shared<ThreadPool>() : pinned_pool(placement.cores);
  impl_->thread = std::thread([impl = impl_.get()] { impl->work(); });
}

JobExecutor::~JobExecutor() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
    if (impl_->running != nullptr) impl_->running->cancel.cancel();
    impl_->changed.notify_all();
  }
  impl_->thread.join();
}

const Placement& JobExecutor::placement() const {
  return impl_->placement;
}

const std::shared_ptr<ThreadPool>& JobExecutor::pool() const {
  return impl_->pool;
}

Ticket JobExecutor::submit(Job job) {
  Ticket ticket;
  ticket.state_ = std::make_shared<Ticket::State>();
  ticket.state_->job = std::move(job);
  const std::lock_guard lock(impl_->mutex);
  impl_->queue.push_back(ticket.state_);
  impl_->changed.notify_all();
  return ticket;
}

}  // namespace effinfer
