// The matrix product of whatever BLAS the machine has, opened at run time: the command line needs none to
// be built or run, and can be pointed at another.
#pragma once

#include <cstdint>
#include <string>

namespace headrace::tool {

// A row-major matrix inside a larger one.
struct Matrix {
  const float* data = nullptr;
  std::int64_t stride = 0;  // elements from a row to the next
  bool transposed = false;
};

class Blas {
 public:
  // path: a shared library with cblas_sgemm, or "" for OpenBLAS where the system keeps it. Throws
  // std::runtime_error. Loading may start threads, so a process that wants to fork must do that first.
  explicit Blas(const std::string& path);

  // c[m][n] = alpha * a[m][k] b[k][n]
  void sgemm(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, Matrix a, Matrix b, float* c,
             std::int64_t c_stride) const;
  // Threads that one product uses. A library that does not offer the choice ignores it.
  void set_threads(int threads) const;
  [[nodiscard]] const std::string& description() const { return description_; }

 private:
  using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
  Sgemm sgemm_ = nullptr;
  void (*set_threads_)(int) = nullptr;
  std::string description_;
};

}  // namespace headrace::tool
