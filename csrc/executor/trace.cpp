// A profile in Chrome's trace-event format ("Trace Event Format", The Chromium Authors): complete
// events ("X") with microseconds since the first step. A profile is a process. On the track of
// thread 0 an event of the step encloses all others of it; an event of a call is followed by the
// thread's wait for the rest.
#include <algorithm>
#include <cstdio>
#include <limits>
#include <string>
#include <string_view>

#include "effinfer/profile.h"

namespace effinfer {
namespace {

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

// The text is exact: a rounded end could pass the end of the event around it.
std::string microseconds(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%lld.%03d", static_cast<long long>(ns / 1000),
                static_cast<int>(ns % 1000));
  return text;
}

class Writer {
 public:
  explicit Writer(int64_t origin_ns) : origin_ns_(origin_ns) {}

  void begin_process() { ++process_; }
  void name_process(std::string_view name) {
    begin("M", 0);
    text_ += R"(,"name":"process_name","args":{"name":)" + quoted(name) + "}}";
  }
  void name_track(int thread, std::string_view name) {
    begin("M", thread);
    text_ += R"(,"name":"thread_name","args":{"name":)" + quoted(name) + "}}";
  }
  // `args` is a JSON object, or empty.
  void event(int thread, std::string_view name, std::string_view category, int64_t begin_ns,
             int64_t end_ns, const std::string& args = {}) {
    begin("X", thread);
    text_ += ",\"name\":" + quoted(name) + ",\"cat\":" + quoted(category) +
             ",\"ts\":" + microseconds(begin_ns - origin_ns_) +
             ",\"dur\":" + microseconds(end_ns - begin_ns);
    if (!args.empty()) text_ += ",\"args\":" + args;
    text_ += '}';
  }
  std::string finish() { return std::move(text_) + "\n]}\n"; }

 private:
  void begin(const char* type, int thread) {
    text_ += is_first_ ? "\n" : ",\n";
    is_first_ = false;
    text_ += std::string(R"({"ph":")") + type + R"(","pid":)" + std::to_string(process_) +
             R"(,"tid":)" + std::to_string(thread);
  }

  int64_t origin_ns_;
  int process_ = 0;
  bool is_first_ = true;
  std::string text_ = R"({"displayTimeUnit":"ns","traceEvents":[)";
};

void write_step(Writer& writer, const StepRecord& step) {
  const std::string phase = step.phase == Phase::decode ? "decode" : "prefill";
  const std::string name = (step.cancelled ? "cancelled " : "") + phase;
  const std::string sizes = R"({"tokens":)" + std::to_string(step.tokens) + R"(,"sequences":)" +
                            std::to_string(step.sequences) + R"(,"barriers":)" +
                            std::to_string(step.barriers) + "}";
  writer.event(0, name + " step", "step", step.begin_ns, step.end_ns, sizes);
  const int64_t start = step.calls.empty() ? step.end_ns : step.time(0, 0).begin_ns;
  writer.event(0, "plan", "host", step.begin_ns, start);
}

void write_calls(Writer& writer, const Profile& profile, const StepRecord& step, int thread) {
  for (size_t i = 0; i < step.calls.size(); ++i) {
    const CallRecord& call = step.calls[i];
    const CallInfo& info = profile.calls[static_cast<size_t>(call.info)];
    const CallTimes& times = step.time(thread, i);
    if (step.cancelled && times.begin_ns == step.end_ns) break;  // nor did those behind it run
    const std::string args = R"({"node":)" + quoted(info.node) + R"(,"bytes":)" +
                             std::to_string(call.bytes) + R"(,"ops":)" + std::to_string(call.ops) +
                             "}";
    writer.event(thread, info.kernel + " " + info.what, "kernel", times.begin_ns, times.done_ns,
                 args);
    if (times.end_ns > times.done_ns) {
      writer.event(thread, "wait", "wait", times.done_ns, times.end_ns);
    }
  }
}

void write_profile(Writer& writer, const Profile& profile) {
  writer.begin_process();
  const bool is_cpu = profile.device == "cpu";
  for (int thread = 0; thread < profile.threads; ++thread) {
    writer.name_track(thread, is_cpu ? "thread " + std::to_string(thread) : profile.device);
    for (const StepRecord& step : profile.steps) {
      if (thread == 0) write_step(writer, step);
      write_calls(writer, profile, step, thread);
    }
  }
}

}  // namespace

std::string trace_json(const Profile& profile) {
  Writer writer(profile.steps.empty() ? 0 : profile.steps.front().begin_ns);
  write_profile(writer, profile);
  return writer.finish();
}

std::string trace_json(std::span<const NamedProfile> profiles) {
  int64_t origin_ns = std::numeric_limits<int64_t>::max();
  for (const NamedProfile& each : profiles) {
    if (each.profile.steps.empty()) continue;
    origin_ns = std::min(origin_ns, each.profile.steps.front().begin_ns);
  }
  Writer writer(origin_ns);
  for (const NamedProfile& each : profiles) {
    write_profile(writer, each.profile);
    writer.name_process(each.name);
  }
  return writer.finish();
}

}  // namespace effinfer
