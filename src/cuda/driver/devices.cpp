#include "cuda/driver/devices.hpp"

#include <dlfcn.h>

#include <array>

namespace headrace::cuda {
namespace {

// The part of the driver's ABI that is needed here; its header is not installed where there is no CUDA.
using Result = int;  // CUresult
using Device = int;  // CUdevice
constexpr Result success = 0, no_device = 100;

template <typename Function>
bool load(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

DeviceList list_devices() {
  DeviceList list;
  // Never closed: once initialised, the driver keeps threads and exit handlers of its own.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    list.error = "libcuda.so.1 was not found";
    return list;
  }
  list.driver_found = true;

  Result (*init)(unsigned) = nullptr;
  Result (*count)(int*) = nullptr;
  Result (*device)(Device*, int) = nullptr;
  Result (*name)(char*, int, Device) = nullptr;
  if (!load(library, "cuInit", init) || !load(library, "cuDeviceGetCount", count) ||
      !load(library, "cuDeviceGet", device) || !load(library, "cuDeviceGetName", name)) {
    list.error = "libcuda.so.1 lacks a function of the CUDA driver interface";
    return list;
  }

  const auto failed = [&](const char* call, Result result) {
    if (result == success) return false;
    list.error = result == no_device ? "the CUDA driver sees no device"
                                     : std::string(call) + " failed with CUDA error " + std::to_string(result);
    return true;
  };
  int devices = 0;
  if (failed("cuInit", init(0)) || failed("cuDeviceGetCount", count(&devices))) return list;
  for (int i = 0; i < devices; ++i) {
    Device handle = 0;
    std::array<char, 256> text{};
    if (failed("cuDeviceGet", device(&handle, i)) ||
        failed("cuDeviceGetName", name(text.data(), static_cast<int>(text.size()) - 1, handle)))
      return list;
    list.names.emplace_back(text.data());
  }
  return list;
}

}  // namespace headrace::cuda
