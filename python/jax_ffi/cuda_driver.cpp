#include "cuda_driver.hpp"

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace headrace::xla {
namespace {

// Declared here as in cuda.h, so that building needs no CUDA.
using Result = int;
using Context = void*;
using Stream = void*;
using Address = std::uintptr_t;

struct Driver {
  Result (*stream_context)(Stream, Context*) = nullptr;
  Result (*push)(Context) = nullptr;
  Result (*pop)(Context*) = nullptr;
  Result (*device)(int*) = nullptr;
  Result (*copy)(void*, Address, std::size_t, Stream) = nullptr;
  Result (*synchronize)(Stream) = nullptr;
};

template <typename Function>
void look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(std::string("libcuda.so.1 lacks ") + name);
}

const Driver& driver() {
  static const Driver driver = [] {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error("libcuda.so.1 cannot be opened");
    Driver found;
    look_up(library, "cuStreamGetCtx", found.stream_context);
    look_up(library, "cuCtxPushCurrent_v2", found.push);
    look_up(library, "cuCtxPopCurrent_v2", found.pop);
    look_up(library, "cuCtxGetDevice", found.device);
    look_up(library, "cuMemcpyDtoHAsync_v2", found.copy);
    look_up(library, "cuStreamSynchronize", found.synchronize);
    return found;
  }();
  return driver;
}

void check(Result result, const char* what) {
  if (result != 0) throw std::runtime_error(std::string(what) + " failed with CUDA error " + std::to_string(result));
}

// The context of a stream, current while this lives.
class Current {
 public:
  explicit Current(Stream stream) {
    Context context = nullptr;
    check(driver().stream_context(stream, &context), "cuStreamGetCtx");
    check(driver().push(context), "cuCtxPushCurrent");
  }
  ~Current() {
    Context context = nullptr;
    driver().pop(&context);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

}  // namespace

int device_of(void* stream) {
  const Current current(stream);
  int device = 0;
  check(driver().device(&device), "cuCtxGetDevice");
  return device;
}

void copy_to_host(void* to, const void* from, std::size_t bytes, void* stream) {
  if (bytes == 0) return;
  const Current current(stream);
  check(driver().copy(to, reinterpret_cast<Address>(from), bytes, stream), "cuMemcpyDtoHAsync");
  check(driver().synchronize(stream), "cuStreamSynchronize");
}

}  // namespace headrace::xla
