#include "arrays.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

namespace headrace::python {
namespace {

constexpr std::array<const char*, 7> dtype_names = {"float32", "float16", "bfloat16", "float64",
                                                    "bool",    "int32",   "int64"};
constexpr std::array<std::int64_t, 7> item_bytes = {4, 2, 2, 8, 1, 4, 8};
constexpr const char* allowed = "float32, float16, bfloat16, float64, bool or int32";

void check_dimensions(const char* name, Py_ssize_t ndim) {
  if (ndim < 1 || ndim > 4) raise(PyExc_ValueError, "%s: has %zd dimensions; it must have 1 to 4", name, ndim);
}

std::int64_t integer(PyObject* number) {
  const long long value = PyLong_AsLongLong(number);
  if (value == -1 && PyErr_Occurred() != nullptr) throw ErrorIsSet();
  return value;
}

Object tuple_of(Shape shape) {
  Object tuple = Object::take(PyTuple_New(static_cast<Py_ssize_t>(shape.size())));
  for (std::size_t i = 0; i < shape.size(); ++i) {
    Object size = Object::take(PyLong_FromLongLong(shape[i]));
    PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), size.release());
  }
  return tuple;
}

hr_dtype dtype_of(const char* argument, PyObject* name) {
  for (std::size_t i = 0; i < dtype_names.size(); ++i)
    if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, dtype_names[i]) == 0)
      return static_cast<hr_dtype>(i);
  raise(PyExc_TypeError, "%s: dtype is %S; it must be %s", argument, name, allowed);
}

// The objects that stand for dtypes, in the order of hr_dtype.
using Dtypes = std::array<PyObject*, dtype_names.size()>;

int index_of(const Dtypes& dtypes, PyObject* dtype) {
  return static_cast<int>(std::find(dtypes.begin(), dtypes.end(), dtype) - dtypes.begin());
}

// The beginning of an array of NumPy: PyArrayObject_fields of numpy/ndarraytypes.h. Every extension that was compiled
// against NumPy, 1 or 2, reads these fields where they lie, so they cannot move.
struct NumpyFields {
  PyObject_HEAD char* data;
  int ndim;
  Py_ssize_t* shape;
  Py_ssize_t* strides;  // bytes
  PyObject* base;
  PyObject* dtype;
  int flags;
};
constexpr int numpy_aligned = 0x100;

struct Numpy {
  PyTypeObject* array;
  PyObject *empty, *asarray;
  Dtypes dtypes{};  // bfloat16, that of ml_dtypes, is known from its first use on
};

Numpy& numpy() {
  static Numpy numpy = [] {
    const Object module = import("numpy");
    const Object dtype = attribute(module.get(), "dtype");
    Numpy found{reinterpret_cast<PyTypeObject*>(attribute(module.get(), "ndarray").release()),
                attribute(module.get(), "empty").release(), attribute(module.get(), "asarray").release()};
    for (std::size_t i = 0; i < dtype_names.size(); ++i) {
      if (i == HR_BFLOAT16) continue;
      const Object name = Object::take(PyUnicode_FromString(dtype_names[i]));
      found.dtypes[i] = call(dtype.get(), name.get()).release();
    }
    return found;
  }();
  return numpy;
}

// A dtype that is none of the objects that NumPy's own arrays have: an equal one, bfloat16, or an error.
int foreign_dtype(const char* name, PyObject* dtype) {
  Dtypes& dtypes = numpy().dtypes;
  for (std::size_t i = 0; i < dtypes.size(); ++i) {
    const int equal = dtypes[i] == nullptr ? 0 : PyObject_RichCompareBool(dtype, dtypes[i], Py_EQ);
    if (equal < 0) throw ErrorIsSet();
    if (equal > 0) return static_cast<int>(i);
  }
  const Object own = attribute(dtype, "name");
  if (PyUnicode_CompareWithASCIIString(own.get(), "bfloat16") != 0)
    raise(PyExc_TypeError, "%s: dtype is %S; it must be %s, in native byte order", name, dtype, allowed);
  if (dtypes[HR_BFLOAT16] == nullptr) dtypes[HR_BFLOAT16] = Object::borrow(dtype).release();
  return HR_BFLOAT16;
}

class NumpyArrays : public Arrays {
 public:
  Object read(const char* name, PyObject* array, bool rows, hr_tensor& tensor) const override {
    if (!is_instance(array, numpy().array))
      raise(PyExc_TypeError, "%s: is a %S; it must be a NumPy array, as the first argument is", name,
            type_name(array).get());
    Object kept = Object::borrow(array);
    if (!fill(name, kept.get(), rows, tensor)) {
      static PyObject* const copy = interned("copy");
      kept = call_method(array, copy);
      fill(name, kept.get(), rows, tensor);
    }
    return kept;
  }

  Object empty(Shape shape, hr_dtype dtype, hr_tensor& tensor) const override {
    Object array = call(numpy().empty, tuple_of(shape).get(), numpy().dtypes[dtype]);
    tensor = contiguous(reinterpret_cast<NumpyFields*>(array.get())->data, shape, dtype);
    return array;
  }

 private:
  // False where the layout is none that the library reads.
  static bool fill(const char* name, PyObject* array, bool rows, hr_tensor& tensor) {
    const auto& fields = *reinterpret_cast<const NumpyFields*>(array);
    int dtype = index_of(numpy().dtypes, fields.dtype);
    if (dtype == static_cast<int>(dtype_names.size())) dtype = foreign_dtype(name, fields.dtype);
    check_dimensions(name, fields.ndim);
    const int last = fields.ndim - 1;
    const std::int64_t bytes = item_bytes[static_cast<std::size_t>(dtype)];
    tensor = {fields.data, {}, {}, fields.ndim, dtype};
    bool readable = (fields.flags & numpy_aligned) != 0;
    for (int i = 0; i < fields.ndim; ++i) {
      tensor.shape[i] = fields.shape[i];
      tensor.stride[i] = fields.strides[i] / bytes;
      if (fields.strides[i] % bytes != 0 && fields.shape[i] > 1) readable = false;  // a field of a structured array
    }
    if (rows && tensor.stride[last] != 1 && tensor.shape[last] > 1) readable = false;
    return readable;
  }
};

class ForeignArrays : public NumpyArrays {
 public:
  explicit ForeignArrays(Object first) {
    static PyObject* const namespace_of = interned("__array_namespace__");
    namespace_ = call_method(first.get(), namespace_of);
  }

  Object read(const char* name, PyObject* array, bool rows, hr_tensor& tensor) const override {
    static PyObject* const device = interned("__dlpack_device__");
    if (PyObject_HasAttr(array, device) == 0)
      raise(PyExc_TypeError, "%s: is a %S; it must be an array of the kind of the first argument", name,
            type_name(array).get());
    const Object where = call_method(array, device), cpu = Object::take(PyLong_FromLong(1));
    const Object kind = Object::take(PySequence_GetItem(where.get(), 0));
    const int same = PyObject_RichCompareBool(kind.get(), cpu.get(), Py_EQ);
    if (same < 0) throw ErrorIsSet();
    if (same == 0) raise(PyExc_ValueError, "%s: is not in the memory of the CPU, where the first argument is", name);
    return NumpyArrays::read(name, call(numpy().asarray, array).get(), rows, tensor);
  }

  Object result(Object array) const override {
    static PyObject* const asarray = interned("asarray");
    return call_method(namespace_.get(), asarray, array.get());
  }

 private:
  Object namespace_;
};

struct Torch {
  PyTypeObject* tensor;
  PyObject *threads, *stream, *empty_like, *contiguous_format;
  Dtypes dtypes{};
  Dtypes with_dtype{};  // {"dtype": ...}, the keyword arguments of new_empty
};

// Null as long as nobody has imported PyTorch, and so has no tensor.
const Torch* torch() {
  static const Torch* torch = nullptr;
  if (torch != nullptr) return torch;
  static PyObject* const name = interned("torch");
  const Object module = [] {
    PyObject* const found = PyImport_GetModule(name);
    if (found == nullptr && PyErr_Occurred() != nullptr) throw ErrorIsSet();
    return found == nullptr ? Object::borrow(Py_None) : Object::take(found);
  }();
  if (PyObject_HasAttrString(module.get(), "Tensor") == 0) return nullptr;  // also while it is being imported
  auto found = std::make_unique<Torch>();
  const Object native = attribute(module.get(), "_C");
  found->tensor = reinterpret_cast<PyTypeObject*>(attribute(module.get(), "Tensor").release());
  found->threads = attribute(module.get(), "get_num_threads").release();
  // What torch.cuda.current_stream wraps, ten times as fast; a PyTorch without CUDA has none.
  found->stream = PyObject_GetAttrString(native.get(), "_cuda_getCurrentRawStream");
  if (found->stream == nullptr) PyErr_Clear();
  found->empty_like = attribute(module.get(), "empty_like").release();
  found->contiguous_format = attribute(module.get(), "contiguous_format").release();
  for (std::size_t i = 0; i < dtype_names.size(); ++i) {
    found->dtypes[i] = attribute(module.get(), dtype_names[i]).release();
    found->with_dtype[i] = Object::take(Py_BuildValue("{sO}", "dtype", found->dtypes[i])).release();
  }
  torch = found.release();
  return torch;
}

class TorchArrays : public Arrays {
 public:
  TorchArrays(const char* name, PyObject* first) : first_(Object::borrow(first)) {
    static PyObject* const is_cuda = interned("is_cuda");
    static PyObject* const get_device = interned("get_device");
    if (!is_on_cpu(first)) {
      if (attribute(first, is_cuda).get() != Py_True)
        raise(PyExc_ValueError, "%s: is on device %S; it must be on cpu or cuda", name, device_of(first).get());
      device_ = device_of(first);
      index_ = static_cast<int>(integer(call_method(first, get_device).get()));
    }
    static PyObject* const dtype = interned("dtype");
    dtype_ = index_of(torch()->dtypes, attribute(first, dtype).get());
  }

  Object read(const char* name, PyObject* array, bool rows, hr_tensor& tensor) const override {
    static PyObject* const dtype_name = interned("dtype");
    if (!is_instance(array, torch()->tensor))
      raise(PyExc_TypeError, "%s: is a %S; it must be a torch.Tensor, as the first argument is", name,
            type_name(array).get());
    const Object dtype = attribute(array, dtype_name);
    tensor.dtype = index_of(torch()->dtypes, dtype.get());
    if (tensor.dtype == static_cast<int>(dtype_names.size()))
      raise(PyExc_TypeError, "%s: dtype is %S; it must be %s", name, dtype.get(), allowed);
    if (!is_beside_first(array))
      raise(PyExc_ValueError, "%s: is on device %S, the first argument on %S; they must be equal", name,
            device_of(array).get(), device_of(first_.get()).get());
    fill(name, array, tensor);
    const int last = tensor.ndim - 1;
    if (!rows || tensor.stride[last] == 1 || tensor.shape[last] <= 1) return Object::borrow(array);
    // contiguous() would leave the strides of a tensor without elements as they are.
    static PyObject* const clone = interned("clone");
    const Object method = attribute(array, clone), arguments = Object::take(PyTuple_New(0));
    const Object keywords = Object::take(Py_BuildValue("{sO}", "memory_format", torch()->contiguous_format));
    Object copy = Object::take(PyObject_Call(method.get(), arguments.get(), keywords.get()));
    fill(name, copy.get(), tensor);
    return copy;
  }

  Object empty(Shape shape, hr_dtype dtype, hr_tensor& tensor) const override {
    static PyObject* const new_empty = interned("new_empty");
    const Object sizes = tuple_of(shape);
    Object array = [&] {
      if (dtype == dtype_) return call_method(first_.get(), new_empty, sizes.get());  // the faster of the two
      const Object method = attribute(first_.get(), new_empty);
      const Object arguments = Object::take(PyTuple_Pack(1, sizes.get()));
      return Object::take(PyObject_Call(method.get(), arguments.get(), torch()->with_dtype[dtype]));
    }();
    tensor = contiguous(address(array.get()), shape, dtype);
    return array;
  }

  Object empty_like(PyObject* array, const hr_tensor& like, hr_tensor& tensor) const override {
    Object result = call(torch()->empty_like, array);  // keeps the strides of a tensor that is dense
    tensor = contiguous(address(result.get()), shape_of(like), static_cast<hr_dtype>(like.dtype));
    return result;
  }

  void place(hr_attention& attention) const override {
    if (index_ < 0) {
      attention.threads =
          static_cast<std::int32_t>(std::min<std::int64_t>(integer(call(torch()->threads).get()), 1024));
      return;
    }
    attention.device = HR_DEVICE_CUDA;
    attention.device_index = index_;
    const Object index = Object::take(PyLong_FromLong(index_));
    attention.stream = PyLong_AsVoidPtr(call(torch()->stream, index.get()).get());
    if (PyErr_Occurred() != nullptr) throw ErrorIsSet();
  }

  static bool is_on_cpu(PyObject* array) {
    static PyObject* const is_cpu = interned("is_cpu");
    return attribute(array, is_cpu).get() == Py_True;
  }

 private:
  static Object device_of(PyObject* array) {
    static PyObject* const device = interned("device");
    return attribute(array, device);
  }

  bool is_beside_first(PyObject* array) const {
    if (index_ < 0) return is_on_cpu(array);
    const int same = PyObject_RichCompareBool(device_of(array).get(), device_.get(), Py_EQ);
    if (same < 0) throw ErrorIsSet();
    return same > 0;
  }

  static void* address(PyObject* array) {
    static PyObject* const data_ptr = interned("data_ptr");
    void* const data = PyLong_AsVoidPtr(call_method(array, data_ptr).get());
    if (data == nullptr && PyErr_Occurred() != nullptr) throw ErrorIsSet();
    return data;
  }

  // All but the dtype.
  static void fill(const char* name, PyObject* array, hr_tensor& tensor) {
    static PyObject* const shape_name = interned("shape");
    static PyObject* const stride_name = interned("stride");
    const Object shape = attribute(array, shape_name), stride = call_method(array, stride_name);
    const Py_ssize_t ndim = PyTuple_Size(shape.get());
    check_dimensions(name, ndim);
    tensor.ndim = static_cast<std::int32_t>(ndim);
    for (Py_ssize_t i = 0; i < ndim; ++i) {
      tensor.shape[i] = integer(PyTuple_GetItem(shape.get(), i));
      tensor.stride[i] = integer(PyTuple_GetItem(stride.get(), i));
    }
    tensor.data = address(array);
  }

  Object first_, device_;
  int index_ = -1;  // of the CUDA device; -1 is the CPU
  int dtype_;       // of the first
};

}  // namespace

hr_tensor described(const char* name, PyObject* description) {
  PyObject *shape = nullptr, *dtype = nullptr;
  if (PyArg_ParseTuple(description, "OO", &shape, &dtype) == 0) throw ErrorIsSet();
  const Object sizes = Object::take(PySequence_Tuple(shape));
  const Py_ssize_t ndim = PyTuple_Size(sizes.get());
  check_dimensions(name, ndim);
  std::array<std::int64_t, 4> values{};
  for (Py_ssize_t i = 0; i < ndim; ++i) values[static_cast<std::size_t>(i)] = integer(PyTuple_GetItem(sizes.get(), i));
  return contiguous(nullptr, Shape(values.data(), static_cast<std::size_t>(ndim)), dtype_of(name, dtype));
}

std::unique_ptr<Arrays> arrays_of(const char* name, PyObject* first) {
  if (is_instance(first, numpy().array) || PyTuple_CheckExact(first)) return std::make_unique<NumpyArrays>();
  if (torch() != nullptr && is_instance(first, torch()->tensor)) return std::make_unique<TorchArrays>(name, first);
  if (PyObject_HasAttrString(first, "__dlpack__") != 0 && PyObject_HasAttrString(first, "__array_namespace__") != 0)
    return std::make_unique<ForeignArrays>(Object::borrow(first));
  raise(PyExc_TypeError, "%s: is a %S; it must be a NumPy array, a torch.Tensor or another array with DLPack", name,
        type_name(first).get());
}

Object empty_mask(PyObject* shape, hr_tensor& tensor) {
  const Object array = call(numpy().empty, shape, numpy().dtypes[HR_BOOL]);
  return NumpyArrays().read("keep", array.get(), false, tensor);
}

Object read_lengths(const char* name, PyObject* values, hr_tensor& tensor) {
  static PyObject* const dtype = interned("dtype");
  if (torch() != nullptr && is_instance(values, torch()->tensor)) {
    if (TorchArrays::is_on_cpu(values) && attribute(values, dtype).get() == torch()->dtypes[HR_INT32]) {
      Object kept = TorchArrays(name, values).read(name, values, true, tensor);
      if (tensor.ndim == 1) return kept;
    }
  } else if (is_instance(values, numpy().array) && attribute(values, dtype).get() == numpy().dtypes[HR_INT32]) {
    Object kept = NumpyArrays().read(name, values, true, tensor);
    if (tensor.ndim == 1) return kept;
  }
  const Object text = Object::take(PyUnicode_FromString(name));
  const Object on_host = attribute(import("headrace._lengths").get(), "on_host");
  return NumpyArrays().read(name, call(on_host.get(), text.get(), values).get(), true, tensor);
}

}  // namespace headrace::python
