#include "cuda/driver/driver.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <type_traits>

#include "describe/problem.hpp"

namespace headrace::cuda {
namespace {

// "CUDA error 700 (CUDA_ERROR_ILLEGAL_ADDRESS, an illegal memory access was encountered)". The table may be half
// filled: cuInit fails before everything has been looked up.
std::string error_text(const Driver& table, CUresult result) {
  const char *name = nullptr, *text = nullptr;
  if (table.cuGetErrorName != nullptr) table.cuGetErrorName(result, &name);
  if (table.cuGetErrorString != nullptr) table.cuGetErrorString(result, &text);
  if (name == nullptr || text == nullptr) return fmt::format("CUDA error {}", static_cast<int>(result));
  return fmt::format("CUDA error {} ({}, {})", static_cast<int>(result), name, text);
}

DriverStatus open_driver() {
  DriverStatus status;
  // Never closed: once initialised, the driver keeps threads and exit handlers of its own.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    const std::string text = reason == nullptr ? "" : reason;
    const bool absent = text.empty() || text.find("No such file") != std::string::npos;
    status.error = absent ? "libcuda.so.1 was not found" : "libcuda.so.1 cannot be loaded: " + text;
    return status;
  }
  status.found = true;

  std::string missing;
  const auto require = [&](auto*& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
    if (function == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(symbol);
  };
#define HEADRACE_LOOK_UP(name, symbol, parameters) require(status.table.name, symbol);
  HEADRACE_DRIVER_FUNCTIONS(HEADRACE_LOOK_UP)
#undef HEADRACE_LOOK_UP

  // The version needs no initialised driver.
  if (status.table.cuDriverGetVersion == nullptr || status.table.cuDriverGetVersion(&status.version) != CUDA_SUCCESS)
    status.version = 0;
  if (!missing.empty()) {
    status.error = fmt::format("the CUDA driver ({}) is too old: it lacks {}; CUDA 12.0 or newer is needed",
                               status.version == 0 ? "of unknown version" : version_text(status.version), missing);
    return status;
  }
  const CUresult result = status.table.cuInit(0);
  if (result == CUDA_ERROR_NO_DEVICE)
    status.error = "the CUDA driver sees no device";
  else if (result == CUDA_ERROR_STUB_LIBRARY)
    status.error = "the libcuda.so.1 that was found is a stub for linking, not a driver";
  else if (result != CUDA_SUCCESS)
    status.error = "cuInit failed: " + error_text(status.table, result);
  return status;
}

}  // namespace

const DriverStatus& driver_status() {
  static const DriverStatus status = open_driver();
  return status;
}

const Driver& driver() {
  const DriverStatus& status = driver_status();
  if (!status.error.empty()) [[unlikely]]
    throw Failure(HR_ERROR_RUNTIME, "GPU: " + status.error);
  return status.table;
}

void throw_driver_error(CUresult result, const char* function) {
  throw Failure(HR_ERROR_RUNTIME, fmt::format("{} failed: {}", function, error_text(driver_status().table, result)));
}

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

}  // namespace headrace::cuda
