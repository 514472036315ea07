// Parts of an engine that are written in Python.
#pragma once

#include <string>
#include <utility>

#include "bindings/module.h"
#include "effinfer/error.h"

namespace effinfer::bindings {

// A Python object that the engine holds, from whichever thread it lets it go.
class Held {
 public:
  explicit Held(py::object object) : object_(std::move(object)) {
    name_ = py::hasattr(object_, "name")
                ? py::str(object_.attr("name")).cast<std::string>()
                : py::str(py::type::of(object_).attr("__name__")).cast<std::string>();
  }
  ~Held() {
    const py::gil_scoped_acquire gil;
    object_ = py::object();
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  const std::string& name() const { return name_; }

  // Calls a method if the object has it. What Python raises becomes an Error, so that no Python
  // object outlives the lock. Ctrl-C is the caller's of the step: it is raised again there.
  template <class Use>
  void with(const char* method, const Use& use) const {
    const py::gil_scoped_acquire gil;
    if (!py::hasattr(object_, method)) return;
    try {
      use(object_.attr(method));
    } catch (const py::error_already_set& raised) {
      if (!raised.matches(PyExc_KeyboardInterrupt)) throw Error(raised.what());
      PyErr_SetInterrupt();
    } catch (const py::cast_error& wrong) {
      throw Error(name_ + "." + method + ": " + wrong.what());
    }
  }

 private:
  py::object object_;
  std::string name_;
};

}  // namespace effinfer::bindings
