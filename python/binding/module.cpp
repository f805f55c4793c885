// headrace._binding: the C interface (headrace.h) for the functions of the package, which check and document it.
// _binding.pyi has the signatures.
#include <cstddef>
#include <exception>
#include <new>

#include "arrays.hpp"
#include "call.hpp"
#include "headrace/headrace.h"
#include "object.hpp"

namespace headrace::python {
namespace {

using Arguments = PyObject* const*;

bool is_true(PyObject* value) {
  const int result = PyObject_IsTrue(value);
  if (result < 0) throw ErrorIsSet();
  return result != 0;
}

Object forward(Arguments a) {
  Call call(a[0], a[1], a[2], a[3], is_true(a[6]));
  call.options(a[5]);
  Object out = call.out();
  if (!is_true(a[4])) {
    call.run(hr_forward);
    return call.result(std::move(out));
  }
  Object lse = call.lse();
  call.run(hr_forward);
  out = call.result(std::move(out));
  lse = call.result(std::move(lse));
  return Object::take(PyTuple_Pack(2, out.get(), lse.get()));
}

Object backward(Arguments a) {
  Call call(a[1], a[2], a[3], a[6], is_true(a[11]));
  hr_attention& attention = call.attention;
  call.options(a[10]);
  call.input("out", a[4], attention.out);
  call.input("lse", a[5], attention.lse);
  call.input("dout", a[0], attention.dout);
  if (a[7] != Py_None) call.input("dlse", a[7], attention.dlse);
  if (is_true(a[8]) && call.bias == nullptr) raise(PyExc_ValueError, "need_dbias: is True, but there is no bias");
  if (is_true(a[9]) && call.sinks == nullptr) raise(PyExc_ValueError, "need_dsinks: is True, but there is no sinks");
  struct Gradient {
    const char* name;
    bool wanted;
    PyObject* of;
    const hr_tensor& like;
    hr_tensor& tensor;
    Object array;
  } gradients[] = {
      {"dq", true, call.q, attention.q, attention.dq, {}},
      {"dk", true, call.k, attention.k, attention.dk, {}},
      {"dv", true, call.v, attention.v, attention.dv, {}},
      {"dbias", is_true(a[8]), call.bias, attention.bias, attention.dbias, {}},
      {"dsinks", is_true(a[9]), call.sinks, attention.sinks, attention.dsinks, {}},
  };
  for (Gradient& gradient : gradients)
    if (gradient.wanted) gradient.array = call.gradient(gradient.of, gradient.like, gradient.tensor);
  call.run(hr_backward);
  Object result = Object::take(PyDict_New());
  for (Gradient& gradient : gradients) {
    if (!gradient.wanted) continue;
    const Object array = call.result(std::move(gradient.array));
    if (PyDict_SetItemString(result.get(), gradient.name, array.get()) != 0) throw ErrorIsSet();
  }
  return result;
}

Object merge_states(Arguments a) {
  const std::unique_ptr<Arrays> arrays = arrays_of("out_a", a[0]);
  hr_tensor out_a, lse_a, out_b, lse_b, out, lse;
  const Object kept[] = {arrays->read("out_a", a[0], true, out_a), arrays->read("lse_a", a[1], false, lse_a),
                         arrays->read("out_b", a[2], true, out_b), arrays->read("lse_b", a[3], false, lse_b)};
  Object out_array = arrays->empty(shape_of(out_a), static_cast<hr_dtype>(out_a.dtype), out);
  Object lse_array = arrays->empty(shape_of(lse_a), static_cast<hr_dtype>(lse_a.dtype), lse);
  run_without_gil([&] { return hr_merge_states(&out_a, &lse_a, &out_b, &lse_b, &out, &lse); });
  out_array = arrays->result(std::move(out_array));
  lse_array = arrays->result(std::move(lse_array));
  return Object::take(PyTuple_Pack(2, out_array.get(), lse_array.get()));
}

Object dropout_mask(Arguments a) {
  hr_tensor keep;
  Object array = empty_mask(a[0], keep);
  const double dropout_p = number_of("dropout_p", a[1]);
  const std::uint64_t seed = seed_of(a[2]);
  run_without_gil([&] { return hr_dropout_mask(&keep, dropout_p, seed); });
  return array;
}

struct Plan {
  hr_plan* handle = nullptr;
  ~Plan() { hr_plan_destroy(handle); }
};

Object plan(Arguments a) {
  Call call(a[0], a[1], a[2], a[3], false);
  call.options(a[4]);
  const hr_pass pass = is_true(a[5]) ? HR_BACKWARD : HR_FORWARD;
  if (a[6] != Py_None) {
    int device = 0, index = 0;
    if (PyArg_ParseTuple(a[6], "ii", &device, &index) == 0) throw ErrorIsSet();
    call.attention.device = device;
    call.attention.device_index = index;
  }
  call.describe_results(pass, is_true(a[7]), is_true(a[8]), is_true(a[9]));
  Plan plan;
  check(hr_plan_create(&call.attention, pass, &plan.handle));
  return Object::take(Py_BuildValue("ssny#", hr_plan_explain(plan.handle), hr_plan_explain_json(plan.handle),
                                    static_cast<Py_ssize_t>(hr_plan_workspace_bytes(plan.handle)),
                                    reinterpret_cast<const char*>(&call.attention),
                                    static_cast<Py_ssize_t>(sizeof call.attention)));
}

Object info(Arguments /*none*/) { return Object::take(PyUnicode_FromString(hr_info())); }

Object exchange_backend(Arguments a) {
  const long number = PyLong_AsLong(a[0]);
  if (number == -1 && PyErr_Occurred() != nullptr) throw ErrorIsSet();
  return Object::take(PyLong_FromLong(python::exchange_backend(static_cast<int>(number))));
}

// What Python calls: as many arguments as the function reads, and errors in place of exceptions.
template <Object (*function)(Arguments), Py_ssize_t count>
PyObject* guarded(PyObject* /*module*/, Arguments arguments, Py_ssize_t given) {
  try {
    if (given != count) raise(PyExc_TypeError, "takes %zd arguments, got %zd", count, given);
    return function(arguments).release();
  } catch (const ErrorIsSet&) {
    return nullptr;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

template <Object (*function)(Arguments), Py_ssize_t count>
PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&guarded<function, count>)), METH_FASTCALL,
          nullptr};
}

// Where each tensor, and the seed, lies in an hr_attention, in bytes.
Object offsets() {
#define HEADRACE_OFFSET(field) \
  { #field, offsetof(hr_attention, field) }
  constexpr std::pair<const char*, std::size_t> fields[] = {HEADRACE_OFFSET(q),
                                                            HEADRACE_OFFSET(k),
                                                            HEADRACE_OFFSET(v),
                                                            HEADRACE_OFFSET(out),
                                                            HEADRACE_OFFSET(lse),
                                                            HEADRACE_OFFSET(bias),
                                                            HEADRACE_OFFSET(mask),
                                                            HEADRACE_OFFSET(sinks),
                                                            HEADRACE_OFFSET(alibi_slopes),
                                                            HEADRACE_OFFSET(block_mask),
                                                            HEADRACE_OFFSET(seed),
                                                            HEADRACE_OFFSET(cu_seqlens_q),
                                                            HEADRACE_OFFSET(cu_seqlens_k),
                                                            HEADRACE_OFFSET(seqused_q),
                                                            HEADRACE_OFFSET(seqused_k),
                                                            HEADRACE_OFFSET(dout),
                                                            HEADRACE_OFFSET(dlse),
                                                            HEADRACE_OFFSET(dq),
                                                            HEADRACE_OFFSET(dk),
                                                            HEADRACE_OFFSET(dv),
                                                            HEADRACE_OFFSET(dbias),
                                                            HEADRACE_OFFSET(dsinks)};
#undef HEADRACE_OFFSET
  Object dict = Object::take(PyDict_New());
  for (const auto& [name, offset] : fields) {
    const Object number = Object::take(PyLong_FromSize_t(offset));
    if (PyDict_SetItemString(dict.get(), name, number.get()) != 0) throw ErrorIsSet();
  }
  return dict;
}

PyMethodDef methods[] = {method<forward, 7>("forward"),
                         method<backward, 12>("backward"),
                         method<merge_states, 4>("merge_states"),
                         method<dropout_mask, 3>("dropout_mask"),
                         method<plan, 10>("plan"),
                         method<info, 0>("info"),
                         method<exchange_backend, 1>("exchange_backend"),
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "headrace._binding", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace headrace::python

// The name is Python's choice. NOLINTNEXTLINE(bugprone-reserved-identifier)
PyMODINIT_FUNC PyInit__binding() {
  using namespace headrace::python;
  try {
    Object module = Object::take(PyModule_Create(&definition));
    Object where = offsets();
    if (PyModule_AddObjectRef(module.get(), "OFFSETS", where.get()) != 0) throw ErrorIsSet();
    if (PyModule_AddStringConstant(module.get(), "version", hr_version()) != 0) throw ErrorIsSet();
    hr_attention attention;
    hr_attention_init(&attention);
    if (attention.struct_size != sizeof attention)
      raise(PyExc_ImportError, "libheadrace.so: hr_attention has %zd bytes, this extension expects %zd",
            static_cast<Py_ssize_t>(attention.struct_size), static_cast<Py_ssize_t>(sizeof attention));
    return module.release();
  } catch (const ErrorIsSet&) {
    return nullptr;
  }
}
