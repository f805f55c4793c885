// Python objects in C++: references that count themselves, and errors as exceptions. Only the limited API of Python is
// used, so that one extension serves every version from 3.10 on.
#ifndef HEADRACE_PYTHON_BINDING_OBJECT_HPP_
#define HEADRACE_PYTHON_BINDING_OBJECT_HPP_

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <utility>

#ifndef Py_LIMITED_API
#error "the binding is to be compiled with Py_LIMITED_API"
#endif

namespace headrace::python {

// Thrown where Python's error indicator is set.
struct ErrorIsSet {};

// One reference, or none.
class Object {
 public:
  Object() = default;
  // A new reference that a function of Python returned; throws if it is null.
  static Object take(PyObject* reference) {
    if (reference == nullptr) throw ErrorIsSet();
    return Object(reference);
  }
  // One more reference to an object that somebody else holds.
  static Object borrow(PyObject* reference) {
    Py_INCREF(reference);
    return Object(reference);
  }
  Object(Object&& other) noexcept : reference_(std::exchange(other.reference_, nullptr)) {}
  Object& operator=(Object&& other) noexcept {
    std::swap(reference_, other.reference_);
    return *this;
  }
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  ~Object() { Py_XDECREF(reference_); }

  [[nodiscard]] PyObject* get() const { return reference_; }
  [[nodiscard]] PyObject* release() { return std::exchange(reference_, nullptr); }

 private:
  explicit Object(PyObject* reference) : reference_(reference) {}
  PyObject* reference_ = nullptr;
};

// Raises: the format is that of PyErr_Format (%s, %zd, %S = str(object), %R = repr(object)).
template <typename... Arguments>
[[noreturn]] void raise(PyObject* type, const char* format, Arguments... arguments) {
  PyErr_Format(type, format, arguments...);
  throw ErrorIsSet();
}

inline Object attribute(PyObject* object, PyObject* name) { return Object::take(PyObject_GetAttr(object, name)); }
inline Object attribute(PyObject* object, const char* name) {
  return Object::take(PyObject_GetAttrString(object, name));
}

template <typename... Arguments>
Object call(PyObject* function, Arguments... arguments) {
  return Object::take(PyObject_CallFunctionObjArgs(function, arguments..., nullptr));
}

template <typename... Arguments>
Object call_method(PyObject* object, PyObject* name, Arguments... arguments) {
  return Object::take(PyObject_CallMethodObjArgs(object, name, arguments..., nullptr));
}

inline Object import(const char* module) { return Object::take(PyImport_ImportModule(module)); }

inline bool is_instance(PyObject* object, PyTypeObject* type) {
  return Py_TYPE(object) == type || PyType_IsSubtype(Py_TYPE(object), type) != 0;
}

inline Object type_name(PyObject* object) {
  return attribute(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__name__");
}

// A string that lives as long as the process, made once for each place that asks for it: `static PyObject* const`.
inline PyObject* interned(const char* text) {
  PyObject* const name = PyUnicode_InternFromString(text);
  if (name == nullptr) throw ErrorIsSet();
  return name;
}

}  // namespace headrace::python

#endif  // HEADRACE_PYTHON_BINDING_OBJECT_HPP_
