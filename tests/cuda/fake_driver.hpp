// What fake_driver.cpp tells of itself, besides what a driver does; for the tests that load it as libcuda.so.1.
#pragma once

#include <dlfcn.h>

#include <string>
#include <vector>

#include "cuda/driver/abi.hpp"
#include "cuda/kernels/pack_rows_params.hpp"

namespace headrace::cuda {

struct FakeLaunch {
  CUlaunchConfig config;
  CUfunction function;
  std::string kernel;
  PackRowsParams packed;          // of pack_rows
  std::vector<CUdeviceptr> maps;  // the addresses of its tensor maps
};

template <typename Function, typename... Arguments>
auto ask_fake_driver(const char* name, Arguments... arguments) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<Function*>(dlsym(library, name))(arguments...);
}

namespace fake {

inline int module_loads() { return ask_fake_driver<int()>("fake_module_loads"); }
// A context that is not a primary one.
inline CUcontext new_context(CUdevice device) {
  return ask_fake_driver<CUcontext(CUdevice)>("fake_new_context", device);
}
// Allocations that have not been freed.
inline int allocations() { return ask_fake_driver<int()>("fake_allocations"); }
inline int launches() { return ask_fake_driver<int()>("fake_launches"); }
// The launch that came n-th before the last.
inline FakeLaunch launch(int n = 0) {
  FakeLaunch result{};
  ask_fake_driver<void(int, FakeLaunch*)>("fake_launch", n, &result);
  return result;
}
// The functions of the driver that this thread has called since it last asked.
inline std::vector<std::string> take_calls() {
  std::vector<std::string> calls;
  ask_fake_driver<void(std::vector<std::string>*)>("fake_take_calls", &calls);
  return calls;
}

}  // namespace fake
}  // namespace headrace::cuda
