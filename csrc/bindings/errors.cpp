// C++ exceptions become Python exceptions that also derive from the natural builtin.
#include <cstring>
#include <exception>
#include <new>

#include "bindings/module.h"
#include "effinfer/error.h"
#include "effinfer/techniques.h"

namespace effinfer::bindings {
namespace {

PyObject* define(py::module_& m, const char* name, PyObject* base, PyObject* builtin) {
  const py::object bases = builtin == nullptr
                               ? py::reinterpret_borrow<py::object>(base)
                               : py::object(py::make_tuple(py::handle(base), py::handle(builtin)));
  const std::string qualified = std::string("effinfer.") + name;
  PyObject* type = PyErr_NewException(qualified.c_str(), bases.ptr(), nullptr);
  if (type == nullptr) throw py::error_already_set();
  m.add_object(name, py::handle(type));
  return type;
}

struct Types {
  PyObject* error;
  PyObject* invalid_argument;
  PyObject* conflict;
  PyObject* file;
  PyObject* format;
  PyObject* unsupported;
  PyObject* out_of_memory;
  PyObject* device;
  PyObject* cancelled;
  PyObject* internal;
};
Types types;

// Messages may quote bytes of a file that are not UTF-8.
void raise(PyObject* type, const char* message) {
  const auto length = static_cast<Py_ssize_t>(std::strlen(message));
  PyObject* text = PyUnicode_DecodeUTF8(message, length, "backslashreplace");
  if (text == nullptr) return;
  PyErr_SetObject(type, text);
  Py_DECREF(text);
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const ConflictError& e) {
    raise(types.conflict, e.what());
  } catch (const InvalidArgument& e) {
    raise(types.invalid_argument, e.what());
  } catch (const FileError& e) {
    raise(types.file, e.what());
  } catch (const FormatError& e) {
    raise(types.format, e.what());
  } catch (const Unsupported& e) {
    raise(types.unsupported, e.what());
  } catch (const OutOfMemory& e) {
    raise(types.out_of_memory, e.what());
  } catch (const DeviceError& e) {
    raise(types.device, e.what());
  } catch (const Cancelled& e) {
    raise(types.cancelled, e.what());
  } catch (const InternalError& e) {
    raise(types.internal, e.what());
  } catch (const Error& e) {
    raise(types.error, e.what());
  } catch (const std::bad_alloc&) {
    raise(types.out_of_memory, "out of memory");
  }
}

}  // namespace

void register_errors(py::module_& m) {
  types.error = define(m, "Error", PyExc_Exception, nullptr);
  types.invalid_argument = define(m, "InvalidArgumentError", types.error, PyExc_ValueError);
  types.conflict = define(m, "ConflictError", types.invalid_argument, nullptr);
  types.file = define(m, "FileError", types.error, PyExc_OSError);
  types.format = define(m, "FormatError", types.error, PyExc_ValueError);
  types.unsupported = define(m, "UnsupportedError", types.error, PyExc_RuntimeError);
  types.out_of_memory = define(m, "OutOfMemoryError", types.error, PyExc_MemoryError);
  types.device = define(m, "DeviceError", types.error, PyExc_RuntimeError);
  types.cancelled = define(m, "CancelledError", types.error, nullptr);
  types.internal = define(m, "InternalError", types.error, PyExc_RuntimeError);
  py::register_exception_translator(translate);
}

}  // namespace effinfer::bindings
