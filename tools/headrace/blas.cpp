#include "blas.hpp"

#include <dlfcn.h>

#include <stdexcept>
#include <vector>

#include "fmt/format.h"

namespace headrace::tool {
namespace {

// From cblas.h, an interface that has not changed since 1998.
constexpr int row_major = 101, as_stored = 111, as_transposed = 112;

template <typename Function>
Function find(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

Blas::Blas(const std::string& path) {
  const std::vector<std::string> candidates =
      path.empty() ? std::vector<std::string>{"libopenblas.so.0", "libopenblas.so", "libopenblas.dylib"}
                   : std::vector<std::string>{path};
  void* library = nullptr;
  for (const std::string& candidate : candidates) {
    library = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: its threads may still run
    if (library != nullptr) {
      description_ = candidate;
      break;
    }
  }
  if (library == nullptr)
    throw std::runtime_error(path.empty() ? "OpenBLAS is not installed (Debian: apt-get install libopenblas0), nor was "
                                            "another BLAS named with --blas"
                                          : fmt::format("--blas: {}", dlerror()));
  sgemm_ = find<Sgemm>(library, "cblas_sgemm");
  if (sgemm_ == nullptr) throw std::runtime_error(fmt::format("--blas: {} has no cblas_sgemm", description_));
  for (const char* name : {"openblas_set_num_threads", "MKL_Set_Num_Threads", "bli_thread_set_num_threads"}) {
    set_threads_ = find<void (*)(int)>(library, name);
    if (set_threads_ != nullptr) break;
  }
  // "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH ...": name and version are what a reader wants, and the kernels.
  auto* const config = find<char* (*)()>(library, "openblas_get_config");
  auto* const core = find<char* (*)()>(library, "openblas_get_corename");
  if (config != nullptr && core != nullptr) {
    const std::string text = config();
    description_ = fmt::format("{} ({})", text.substr(0, text.find(' ', text.find(' ') + 1)), core());
  }
}

void Blas::sgemm(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, Matrix a, Matrix b, float* c,
                 std::int64_t c_stride) const {
  const auto narrow = [](std::int64_t value) { return static_cast<int>(value); };
  const auto order = [](const Matrix& matrix) { return matrix.transposed ? as_transposed : as_stored; };
  sgemm_(row_major, order(a), order(b), narrow(m), narrow(n), narrow(k), alpha, a.data, narrow(a.stride), b.data,
         narrow(b.stride), 0.0f, c, narrow(c_stride));
}

void Blas::set_threads(int threads) const {
  if (set_threads_ != nullptr) set_threads_(threads);
}

}  // namespace headrace::tool
