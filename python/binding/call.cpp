#include "call.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>

namespace headrace::python {
namespace {

thread_local int chosen_backend = HR_BACKEND_AUTO;

void exchange_heads_and_rows(hr_tensor& tensor) {
  std::swap(tensor.shape[1], tensor.shape[2]);
  std::swap(tensor.stride[1], tensor.stride[2]);
}

bool is_contiguous(const hr_tensor& tensor) {
  const hr_tensor dense = contiguous(nullptr, shape_of(tensor), static_cast<hr_dtype>(tensor.dtype));
  return std::equal(dense.stride, dense.stride + dense.ndim, tensor.stride);
}

hr_causal causal_of(PyObject* causal) {
  if (PyUnicode_Check(causal)) {
    if (PyUnicode_CompareWithASCIIString(causal, "bottom_right") == 0) return HR_CAUSAL_BOTTOM_RIGHT;
    if (PyUnicode_CompareWithASCIIString(causal, "top_left") == 0) return HR_CAUSAL_TOP_LEFT;
  } else if (PyBool_Check(causal) || PyUnicode_CompareWithASCIIString(type_name(causal).get(), "bool") == 0 ||
             PyUnicode_CompareWithASCIIString(type_name(causal).get(), "bool_") == 0) {  // NumPy's own
    return PyObject_IsTrue(causal) == 1 ? HR_CAUSAL_BOTTOM_RIGHT : HR_CAUSAL_NONE;
  }
  raise(PyExc_ValueError, "causal: is %R; it must be False, True, 'bottom_right' or 'top_left'", causal);
}

Object index_of(const char* name, PyObject* value) {
  if (PyIndex_Check(value) == 0) raise(PyExc_TypeError, "%s: is %R; it must be an integer", name, value);
  return Object::take(PyNumber_Index(value));
}

std::int64_t bound_of(const char* name, PyObject* bound) {
  if (bound == Py_None) return HR_UNBOUNDED;
  const Object index = index_of(name, bound);
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(index.get(), &overflow);
  if (overflow != 0) raise(PyExc_ValueError, "%s: is %R; it must be at least -2^63 and below 2^63", name, index.get());
  if (value == -1 && PyErr_Occurred() != nullptr) throw ErrorIsSet();
  return value;
}

bool truth(PyObject* value) {
  const int result = PyObject_IsTrue(value);
  if (result < 0) throw ErrorIsSet();
  return result != 0;
}

void set_window(hr_attention& attention, PyObject* window) {
  const bool pair = PySequence_Check(window) != 0 && PySequence_Size(window) == 2;
  if (!pair) {
    PyErr_Clear();
    raise(PyExc_ValueError, "window: is %R; it must be a pair (left, right) of integers or None", window);
  }
  attention.window_left = bound_of("window_left", Object::take(PySequence_GetItem(window, 0)).get());
  attention.window_right = bound_of("window_right", Object::take(PySequence_GetItem(window, 1)).get());
}

PyTypeObject* block_mask_type() {
  static PyObject* const type = attribute(import("headrace._block_mask").get(), "BlockMask").release();
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace

void check(hr_status status) {
  switch (status) {
    case HR_OK:
      return;
    case HR_ERROR_TYPE:
      raise(PyExc_TypeError, "%s", hr_last_error());
    case HR_ERROR_VALUE:
      raise(PyExc_ValueError, "%s", hr_last_error());
    case HR_ERROR_UNSUPPORTED:
      raise(PyExc_NotImplementedError, "%s", hr_last_error());
    default:
      raise(PyExc_RuntimeError, "%s", hr_last_error());
  }
}

std::uint64_t seed_of(PyObject* seed) {
  const Object index = index_of("seed", seed);
  const unsigned long long value = PyLong_AsUnsignedLongLong(index.get());
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise(PyExc_ValueError, "seed: is %R; it must be at least 0 and below 2^64", index.get());
  }
  return value;
}

double number_of(const char* name, PyObject* number) {
  const double value = PyFloat_AsDouble(number);
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise(PyExc_TypeError, "%s: is %R; it must be a number", name, number);
  }
  return value;
}

int exchange_backend(int backend) { return std::exchange(chosen_backend, backend); }

Call::Call(PyObject* q_array, PyObject* k_array, PyObject* v_array, PyObject* lengths, bool heads_first)
    : arrays_(arrays_of("q", q_array)), heads_first_(heads_first) {
  hr_attention_init(&attention);
  kept_.reserve(32);
  attention.backend = chosen_backend;
  arrays_->place(attention);
  q = add("q", q_array, true, attention.q);
  k = add("k", k_array, true, attention.k);
  v = add("v", v_array, true, attention.v);
  bool ragged = false;
  if (lengths != Py_None) {
    for (const auto& [name, tensor] : {std::pair<const char*, hr_tensor*>{"cu_seqlens_q", &attention.cu_seqlens_q},
                                       {"cu_seqlens_k", &attention.cu_seqlens_k},
                                       {"seqused_q", &attention.seqused_q},
                                       {"seqused_k", &attention.seqused_k}}) {
      PyObject* const values = PyDict_GetItemString(lengths, name);
      if (values == nullptr) continue;
      kept_.push_back(read_lengths(name, values, *tensor));
      ragged = ragged || tensor == &attention.cu_seqlens_q;
    }
  }
  check_ranks(ragged);
  if (heads_first_)
    for (hr_tensor* tensor : {&attention.q, &attention.k, &attention.v}) exchange_heads_and_rows(*tensor);
}

// rows: the last dimension must be contiguous.
PyObject* Call::add(const char* name, PyObject* array, bool rows, hr_tensor& tensor) {
  if (PyTuple_CheckExact(array)) {
    tensor = described(name, array);
    return array;
  }
  kept_.push_back(arrays_->read(name, array, rows, tensor));
  return kept_.back().get();
}

PyObject* Call::input(const char* name, PyObject* array, hr_tensor& tensor) {
  const bool rows = &tensor == &attention.out || &tensor == &attention.dout;
  PyObject* const kept = add(name, array, rows, tensor);
  if (rows && heads_first_) exchange_heads_and_rows(tensor);
  return kept;
}

void Call::check_ranks(bool ragged) const {
  const int ndim = ragged ? 3 : 4;
  for (const auto& [name, tensor] :
       {std::pair<const char*, const hr_tensor*>{"q", &attention.q}, {"k", &attention.k}, {"v", &attention.v}})
    if (tensor->ndim != ndim)
      raise(PyExc_ValueError, "%s: has %d dimensions; it must have %d: %s", name, tensor->ndim, ndim,
            ragged ? "[total, heads, dim]" : "[batch, seqlen, heads, dim]");
}

void Call::options(PyObject* options) {
  PyObject *name = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(options, &position, &name, &value) != 0) {
    // What is read may run code of Python, which may change the dict.
    const Object kept_name = Object::borrow(name);
    kept_.push_back(Object::borrow(value));
    option(name, value);
  }
}

void Call::option(PyObject* name, PyObject* value) {
  using Set = void (*)(Call&, PyObject*);
  struct Option {
    PyObject* name;
    Set set;
  };
  static const std::array<Option, 13> known = {{
      {interned("causal"), [](Call& c, PyObject* x) { c.attention.causal = causal_of(x); }},
      {interned("window"), [](Call& c, PyObject* x) { set_window(c.attention, x); }},
      {interned("scale"),
       [](Call& c, PyObject* x) {
         c.attention.has_scale = x != Py_None ? 1 : 0;
         if (x != Py_None) c.attention.scale = number_of("scale", x);
       }},
      {interned("softcap"), [](Call& c, PyObject* x) { c.attention.softcap = number_of("softcap", x); }},
      {interned("bias"),
       [](Call& c, PyObject* x) {
         if (x != Py_None) c.bias = c.input("bias", x, c.attention.bias);
       }},
      {interned("alibi_slopes"),
       [](Call& c, PyObject* x) {
         if (x != Py_None) c.input("alibi_slopes", x, c.attention.alibi_slopes);
       }},
      {interned("mask"),
       [](Call& c, PyObject* x) {
         if (x != Py_None) c.input("mask", x, c.attention.mask);
       }},
      {interned("block_mask"),
       [](Call& c, PyObject* x) {
         if (x == Py_None) return;
         if (!is_instance(x, block_mask_type()))
           raise(PyExc_TypeError, "block_mask: is a %S; it must be a headrace.BlockMask", type_name(x).get());
         c.input("block_mask", attribute(x, "mask").get(), c.attention.block_mask);
         c.attention.block_q = bound_of("block_q", attribute(x, "block_q").get());
         c.attention.block_k = bound_of("block_k", attribute(x, "block_k").get());
       }},
      {interned("sinks"),
       [](Call& c, PyObject* x) {
         if (x != Py_None) c.sinks = c.input("sinks", x, c.attention.sinks);
       }},
      {interned("dropout_p"), [](Call& c, PyObject* x) { c.attention.dropout_p = number_of("dropout_p", x); }},
      {interned("seed"), [](Call& c, PyObject* x) { c.attention.seed = seed_of(x); }},
      {interned("deterministic"), [](Call& c, PyObject* x) { c.attention.deterministic = truth(x) ? 1 : 0; }},
      {interned("batch_invariant"), [](Call& c, PyObject* x) { c.attention.batch_invariant = truth(x) ? 1 : 0; }},
  }};
  auto found = std::find_if(known.begin(), known.end(), [&](const Option& o) { return o.name == name; });
  if (found == known.end())  // a string that is not interned
    found =
        std::find_if(known.begin(), known.end(), [&](const Option& o) { return PyUnicode_Compare(o.name, name) == 0; });
  if (found == known.end()) raise(PyExc_TypeError, "attention got an unexpected keyword argument %R", name);
  found->set(*this, value);
}

hr_tensor Call::shape_of_out() const {
  hr_tensor out = attention.q;
  out.shape[out.ndim - 1] = attention.v.shape[attention.v.ndim - 1];
  return contiguous(nullptr, shape_of(out), static_cast<hr_dtype>(out.dtype));
}

hr_tensor Call::shape_of_lse() const {
  hr_tensor lse = attention.q;
  --lse.ndim;
  std::swap(lse.shape[lse.ndim - 2], lse.shape[lse.ndim - 1]);
  return contiguous(nullptr, shape_of(lse), lse.dtype == HR_FLOAT64 ? HR_FLOAT64 : HR_FLOAT32);
}

Object Call::out() {
  const hr_tensor& like = attention.q;
  const hr_tensor shape = shape_of_out();
  if (std::equal(shape.shape, shape.shape + shape.ndim, like.shape) && is_contiguous(like))
    return arrays_->empty_like(q, like, attention.out);
  Object out = arrays_->empty(shape_of(shape), static_cast<hr_dtype>(shape.dtype), attention.out);
  if (!heads_first_) return out;
  static PyObject* const transpose = interned("transpose");
  static PyObject* const one = Object::take(PyLong_FromLong(1)).release();
  static PyObject* const two = Object::take(PyLong_FromLong(2)).release();
  return call_method(out.get(), transpose, one, two);
}

Object Call::lse() {
  const hr_tensor shape = shape_of_lse();
  return arrays_->empty(shape_of(shape), static_cast<hr_dtype>(shape.dtype), attention.lse);
}

Object Call::gradient(PyObject* array, const hr_tensor& like, hr_tensor& tensor) {
  if (is_contiguous(like)) return arrays_->empty_like(array, like, tensor);
  hr_tensor given = like;
  const bool exchanged = heads_first_ && (array == q || array == k || array == v);
  if (exchanged) exchange_heads_and_rows(given);  // as the caller has it
  Object result = arrays_->empty(shape_of(given), static_cast<hr_dtype>(given.dtype), tensor);
  if (exchanged) exchange_heads_and_rows(tensor);
  return result;
}

void Call::describe_results(hr_pass pass, bool dlse, bool dbias, bool dsinks) {
  const auto like = [](hr_tensor& tensor, const hr_tensor& of) {
    tensor = contiguous(nullptr, shape_of(of), static_cast<hr_dtype>(of.dtype));
  };
  attention.out = shape_of_out();
  attention.lse = shape_of_lse();
  if (pass == HR_FORWARD) return;
  like(attention.dout, attention.out);
  like(attention.dq, attention.q);
  like(attention.dk, attention.k);
  like(attention.dv, attention.v);
  if (dlse) like(attention.dlse, attention.lse);
  if (dbias) like(attention.dbias, attention.bias);
  if (dsinks) like(attention.dsinks, attention.sinks);
}

void Call::run(hr_status (*function)(const hr_attention*)) {
  run_without_gil([&] { return function(&attention); });
}

}  // namespace headrace::python
