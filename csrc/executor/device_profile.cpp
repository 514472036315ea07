// A step on a GPU that is recorded: its calls one after the other between marks in the queue.
#include <algorithm>
#include <string>
#include <vector>

#include "executor/device_step.h"

namespace effinfer::executor {
namespace {

// What may follow the calls of a program.
enum Head : size_t { kHighest, kDrawn };

CallInfo head_info(const std::string& node, const std::string& kernel, const std::string& shapes) {
  CallInfo info;
  info.node = info.what = node;
  info.kernel = kernel;
  info.shapes = shapes;
  info.arithmetic = "f32";
  return info;
}

}  // namespace

std::vector<CallInfo> DeviceStep::prepare_timing(std::span<const Program> programs) {
  std::vector<CallInfo> infos = {head_info("highest logits", top_rows_.name, "")};
  if (draw_rows_ != nullptr) infos.push_back(head_info("drawn tokens", draw_rows_->name, ""));
  size_t most = 0;
  for (const Program& program : programs) most = std::max(most, program.calls.size());
  marks_ = cuda_backend()->make_marks(*queue_, most + infos.size() + 1);
  return infos;
}

void DeviceStep::launch_timed(const Program& program, const Step& step,
                              std::span<const AttentionBuffers> attention, int32_t top_k,
                              std::span<const RowDraw> draws, const Timing& timing) {
  Recorder& recorder = timing.recorder;
  pack_step(step, attention, draws);
  StepRecord& record = recorder.start(step, program.calls.size() + 2, timing.begin_ns);
  size_t count = 0;
  const auto mark = [&](size_t info, const ops::Cost& cost) {
    marks_->put(count);
    record.calls[count++] = {static_cast<int32_t>(info), cost.bytes, cost.ops};
  };
  for (size_t place = 0; place < program.calls.size(); ++place) {
    Call& call = *program.calls[place];
    if (!call.prepare(step)) continue;  // with the host's lists, which costs are counted from
    const ops::Cost cost = call.cost();
    call.prepare(step_);
    mark(recorder.first_info(timing.program) + place, cost);
    call.launch(*queue_);
  }
  const int64_t logits = batch_rows() * limits_.vocab_size * static_cast<int64_t>(sizeof(float));
  if (top_k > 0) {
    mark(recorder.first_more() + kHighest, {logits, 0});
    top_rows_.launch(top_of(top_k), *queue_);
  }
  if (!draws.empty()) {
    mark(recorder.first_more() + kDrawn, {logits, 0});
    draw_rows_->launch(drawn_, *queue_);
  }
  marks_->put(count);
  queue_->wait();
  // The last mark is as late as the host knows it; the clocks have no other moment in common.
  record.end_ns = Recorder::now_ns();
  record.calls.resize(count);
  record.times.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const auto at = [&](size_t index) {
      return std::max(record.begin_ns, record.end_ns - marks_->between(index, count));
    };
    const int64_t end = at(i + 1);
    record.times[i] = {at(i), end, end};
  }
  recorder.keep();
}

}  // namespace effinfer::executor
