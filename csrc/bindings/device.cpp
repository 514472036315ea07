#include "effinfer/device.h"

#include <malloc.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings/module.h"
#include "effinfer/placement.h"
#include "effinfer/version.h"

namespace effinfer::bindings {

ThreadPool& default_pool() {
  static std::mutex mutex;
  static ThreadPool* pool = nullptr;  // never destroyed: workers may outlive the interpreter
  static pid_t owner = 0;
  const std::lock_guard lock(mutex);
  // Threads do not survive fork(): the parent's pool is of no use to a child.
  if (pool == nullptr || owner != getpid()) {
    pool = new ThreadPool();
    owner = getpid();
  }
  return *pool;
}

namespace {

void register_pool(py::module_& m) {
  py::class_<ThreadPool, std::shared_ptr<ThreadPool>>(m, "ThreadPool")
      .def(py::init<int, bool>(), py::arg("threads") = 0, py::kw_only(),
           py::arg("oversubscribe") = false,
           "`threads` members (0: as info() says), but no more than CPUs unless `oversubscribe`.")
      .def_static("pinned", &pinned_pool, py::arg("cores"), py::arg("threads") = 0,
                  "A member for each of these cores, or for the first `threads`, pinned to it.")
      .def_property_readonly("size", &ThreadPool::size)
      .def_property_readonly("reason", &ThreadPool::reason, "Why it has that size.");
}

void register_placements(py::module_& m) {
  m.def(
      "parse_placement",
      [](const std::string& text, const std::string& argument) {
        const Placement placement = parse_placement(text, argument);
        return std::make_pair(name(placement.device), placement.cores);
      },
      py::arg("text"), py::arg("argument"),
      "(device, cores) of \"cpu:0-3\" and the like; cores are [] where all may be used. Raises\n"
      "InvalidArgumentError, about `argument`.");
  m.def(
      "place_apart",
      [](const std::vector<std::string>& texts) {
        std::vector<Placement> placements;
        for (const std::string& text : texts) placements.push_back(parse_placement(text));
        std::vector<std::string> names;
        for (const Placement& each : place_apart(std::move(placements))) {
          names.push_back(name(each));
        }
        return names;
      },
      py::arg("devices"),
      "Devices that are to work at the same time: one \"cpu\" becomes the cores that the others\n"
      "leave. Raises InvalidArgumentError for cores that two of them name.");
}

}  // namespace

void register_device(py::module_& m) {
  m.def("version", &version);
  m.def("cpu_status", &cpu_status, "Whether this build lacks kernels for some CPUs.");
  m.def("cuda_status", &cuda_status, "Whether this build has CUDA kernels, and if not, why.");
  m.def("cpu_model", [] { return cpu_features().model_name; });
  m.def("has_avx512_bf16", [] { return cpu_features().avx512_bf16; });
  m.def("has_fast_bf16", [] { return cpu_features().fast_bf16; });
  m.def(
      "describe_bf16", [] { return describe_bf16(current_isa()); },
      "Which products of bfloat16 are chosen at the current level, and why not more.");
  m.def("current_isa", [] { return std::string(name(current_isa())); });
  m.def("isa_reason", &isa_reason);
  m.def(
      "set_isa", [](const std::string& level) { set_isa(parse_isa(level)); }, py::arg("level"),
      "Caps the instruction-set level of kernels selected from now on.");
  m.def("available_devices", [] {
    std::vector<std::string> names;
    for (const Device device : available_devices()) names.push_back(name(device));
    return names;
  });
  m.def(
      "check_device",
      [](const std::string& text, const std::string& argument) { parse_device(text, argument); },
      py::arg("text"), py::arg("argument"),
      "Raises InvalidArgumentError, about `argument`, for a device that this build lacks.");
  m.def("available_isas", [] {
    std::vector<std::string> names;
    for (const Isa isa : available_isas()) names.emplace_back(name(isa));
    return names;
  });
  m.def("default_threads", [] {
    const ThreadChoice choice = default_threads();
    return py::make_tuple(choice.threads, choice.reason);
  });
  m.def(
      "trim_heap",
      [] {
#if defined(__GLIBC__)  // other libraries give back by themselves, or have no way to
        const py::gil_scoped_release release;
        malloc_trim(0);
#endif
      },
      "Gives freed memory of the C heap back to the system: after work that took much of it.");
  m.def(
      "memory_features",
      [] {
        const MemoryFeatures& features = memory_features();
        return py::make_tuple(features.huge_pages, features.numa_nodes);
      },
      "(transparent huge pages: \"always\", \"madvise\", \"never\" or \"unavailable\"; NUMA "
      "nodes)");
  register_placements(m);
  register_pool(m);
}

}  // namespace effinfer::bindings
