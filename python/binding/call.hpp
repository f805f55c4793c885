// One call of the library: an hr_attention that is filled from Python's arguments, kept alive and run.
#ifndef HEADRACE_PYTHON_BINDING_CALL_HPP_
#define HEADRACE_PYTHON_BINDING_CALL_HPP_

#include <cstdint>
#include <memory>
#include <vector>

#include "arrays.hpp"
#include "headrace/headrace.h"
#include "object.hpp"

namespace headrace::python {

// Raises what a status other than HR_OK stands for, with the sentence of hr_last_error.
void check(hr_status status);

// Runs a function of the library, while other threads of Python run.
template <typename Function>
void run_without_gil(Function&& function) {
  PyThreadState* const state = PyEval_SaveThread();
  const hr_status status = function();
  PyEval_RestoreThread(state);
  check(status);
}

std::uint64_t seed_of(PyObject* seed);
double number_of(const char* name, PyObject* number);

// The backend of calls of this thread, by number; returns the one before.
int exchange_backend(int backend);

// Arrays may also be tuples (shape, name of dtype), in a call that is planned and not run.
class Call {
 public:
  // q, k and v; lengths: None or a dict of cu_seqlens_* and seqused_*. heads_first: the arrays are
  // [batch, heads, seqlen, dim], as those of PyTorch's own attention, and so are results.
  Call(PyObject* q, PyObject* k, PyObject* v, PyObject* lengths, bool heads_first);

  // A dict of options, as headrace._options.Options.
  void options(PyObject* options);

  // Adds a tensor. Returns it as the library will read it, maybe a copy.
  PyObject* input(const char* name, PyObject* array, hr_tensor& tensor);

  // New arrays, of the shapes that the caller gets. gradient: of `array`, which was read as `like`.
  Object out();
  Object lse();
  Object gradient(PyObject* array, const hr_tensor& like, hr_tensor& tensor);

  // The tensors that results would have, for a plan.
  void describe_results(hr_pass pass, bool dlse, bool dbias, bool dsinks);

  // Runs; then `result` makes of a new array what the caller gets.
  void run(hr_status (*function)(const hr_attention*));
  Object result(Object array) const { return arrays_->result(std::move(array)); }

  hr_attention attention;
  PyObject *q, *k, *v, *bias = nullptr, *sinks = nullptr;  // as the library will read them

 private:
  PyObject* add(const char* name, PyObject* array, bool rows, hr_tensor& tensor);
  void option(PyObject* name, PyObject* value);
  void check_ranks(bool ragged) const;
  [[nodiscard]] hr_tensor shape_of_out() const;
  [[nodiscard]] hr_tensor shape_of_lse() const;

  std::unique_ptr<Arrays> arrays_;
  bool heads_first_;
  std::vector<Object> kept_;
};

}  // namespace headrace::python

#endif  // HEADRACE_PYTHON_BINDING_CALL_HPP_
