// A libcuda.so.1 without a GPU: contexts, modules and functions as the driver keeps them, and nothing that computes.
// The tests of the driver layer load it in place of the real one. Two devices of compute capability 9.0, unless
// HEADRACE_FAKE_DRIVER says otherwise: "no device", "ampere" (capability 8.0), "old" (a driver that lacks a function),
// "refuse" (takes no module).
#include "fake_driver.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/driver/abi.hpp"

namespace headrace::cuda {

struct CUctx_st {
  CUdevice device = 0;
  unsigned long long id = 0;
};

struct CUfunc_st {
  int dynamic_shared = 0;
  std::string name;
};

struct CUmod_st {
  CUfunc_st function;
};

namespace {

std::atomic<unsigned long long> next_id = 1;
std::atomic<int> loads = 0;
std::mutex mutex;  // of what lives as long as the process:
std::deque<CUctx_st> contexts;
std::deque<CUmod_st> modules;
std::map<CUdeviceptr, std::size_t> allocations;
std::vector<FakeLaunch> launches;
thread_local std::vector<CUcontext> stack;
thread_local std::vector<std::string> calls;  // of this thread, in order
thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

void called(const char* function) { calls.emplace_back(function); }

// A map knows its address, and nothing else.
CUresult describe(CUtensorMap* map, void* address) {
  if (reinterpret_cast<std::uintptr_t>(address) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  *map = {};
  map->opaque[0] = reinterpret_cast<CUdeviceptr>(address);
  return CUDA_SUCCESS;
}

// The maps come first among the arguments of a kernel; how many there are.
std::size_t maps_of(const std::string& kernel) {
  static const std::map<std::string, std::size_t> known = {{"hopper_forward", 4},
                                                           {"hopper_split_forward", 3},
                                                           {"hopper_backward", 6},
                                                           {"hopper_backward_keys", 6},
                                                           {"hopper_backward_queries", 5}};
  const auto found = known.find(kernel);
  return found == known.end() ? 0 : found->second;
}

bool behaves(std::string_view how) {
  const char* wanted = std::getenv("HEADRACE_FAKE_DRIVER");
  return wanted != nullptr && wanted == how;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT CUresult cuInit(unsigned) {
  called(__func__);
  return behaves("no device") ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}
EXPORT CUresult cuDriverGetVersion(int* version) {
  called(__func__);
  *version = 13000;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult, const char** text) {
  called(__func__);
  *text = "CUDA_ERROR_FAKE";
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorString(CUresult, const char** text) {
  called(__func__);
  *text = "a fake error";
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetCount(int* count) {
  called(__func__);
  *count = 2;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  called(__func__);
  if (ordinal < 0 || ordinal > 1) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetName(char* name, int, CUdevice device) {
  called(__func__);
  std::strcpy(name, device == 0 ? "Fake 0" : "Fake 1");
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  called(__func__);
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 132;
      break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      *value = 50 << 20;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = behaves("ampere") ? 8 : 9;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = 0;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = 227 << 10;
      break;
  }
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceTotalMem_v2(std::size_t* bytes, CUdevice) {
  called(__func__);
  *bytes = std::size_t{80} << 30;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  called(__func__);
  static CUctx_st primary[2] = {{0, next_id++}, {1, next_id++}};
  *context = &primary[device];
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  called(__func__);
  *context = stack.empty() ? nullptr : stack.back();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
  called(__func__);
  stack.push_back(context);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  called(__func__);
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = stack.back();
  stack.pop_back();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  called(__func__);
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *device = stack.back()->device;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetId(CUcontext context, unsigned long long* id) {
  called(__func__);
  *id = context->id;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  called(__func__);
  std::swap(*mode, capture_mode);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  called(__func__);
  // As while another thread captures a stream: unsafe calls are refused unless the thread has said otherwise.
  if (capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  if (behaves("refuse") || std::memcmp(image, "\177ELF", 4) != 0) return CUDA_ERROR_INVALID_IMAGE;
  ++loads;
  const std::lock_guard lock(mutex);
  *module = &modules.emplace_back();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  called(__func__);
  module->function.name = name;
  *function = &module->function;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  called(__func__);
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ? function->dynamic_shared
           : attribute == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES           ? 0
                                                                        : 16;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute, int value) {
  called(__func__);
  function->dynamic_shared = value;
  return CUDA_SUCCESS;
}

// Memory "of the device" is the host's, and known as allocated here.
EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* address, std::size_t bytes) {
  called(__func__);
  constexpr std::size_t alignment = 256;
  void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(memory);
  const std::lock_guard lock(mutex);
  allocations[*address] = bytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
  called(__func__);
  const std::lock_guard lock(mutex);
  if (allocations.erase(address) == 0) return CUDA_ERROR_INVALID_VALUE;
  std::free(reinterpret_cast<void*>(address));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAllocAsync(CUdeviceptr* address, std::size_t bytes, CUstream) {
  called(__func__);
  return cuMemAlloc_v2(address, bytes);
}
EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream) {
  called(__func__);
  return cuMemFree_v2(address);
}
EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, std::size_t bytes) {
  called(__func__);
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, std::size_t bytes) {
  called(__func__);
  std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  return CUDA_SUCCESS;
}

// Whatever is queued is done.
EXPORT CUresult cuCtxSynchronize() {
  called(__func__);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned) {
  called(__func__);
  static int any = 0;
  *stream = reinterpret_cast<CUstream>(&any);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamDestroy_v2(CUstream) {
  called(__func__);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamSynchronize(CUstream) {
  called(__func__);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventCreate(CUevent* event, unsigned) {
  called(__func__);
  *event = nullptr;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventDestroy_v2(CUevent) {
  called(__func__);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventRecord(CUevent, CUstream) {
  called(__func__);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventSynchronize(CUevent) {
  called(__func__);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventElapsedTime(float* milliseconds, CUevent, CUevent) {
  called(__func__);
  *milliseconds = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute, CUdeviceptr address) {
  called(__func__);
  const std::lock_guard lock(mutex);
  auto after = allocations.upper_bound(address);
  if (after == allocations.begin()) return CUDA_ERROR_INVALID_VALUE;
  const auto& [begin, bytes] = *--after;
  if (address >= begin + bytes) return CUDA_ERROR_INVALID_VALUE;
  const unsigned type = CU_MEMORYTYPE_DEVICE;
  std::memcpy(value, &type, sizeof(type));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  called(__func__);
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
  called(__func__);
  const std::lock_guard lock(mutex);
  launches.push_back({*config, function, function->name, {}, {}});
  for (std::size_t n = 0; n < maps_of(function->name); ++n)
    launches.back().maps.push_back(static_cast<const CUtensorMap*>(arguments[n])->opaque[0]);
  if (function->name == "pack_rows") std::memcpy(&launches.back().packed, arguments[0], sizeof(PackRowsParams));
  return CUDA_SUCCESS;
}
#ifndef HEADRACE_OLD_DRIVER
// Refuses what the real one refuses.
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, std::uint32_t rank, void* address,
                                       const std::uint64_t* sizes, const std::uint64_t* strides, const std::uint32_t*,
                                       const std::uint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  called(__func__);
  bool valid = true;
  for (std::uint32_t i = 0; i < rank; ++i) valid = valid && sizes[i] >= 1 && sizes[i] <= std::uint64_t{1} << 32;
  for (std::uint32_t i = 0; i + 1 < rank; ++i)
    valid = valid && strides[i] % 16 == 0 && strides[i] < std::uint64_t{1} << 40;
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  return describe(map, address);
}
#endif
EXPORT CUresult cuTensorMapReplaceAddress(CUtensorMap* map, void* address) {
  called(__func__);
  return map->opaque[0] == 0 ? CUDA_ERROR_INVALID_VALUE : describe(map, address);
}

// NVRTC asks the driver, if there is one, for a table of functions that it may use in its place. The first word of a
// table is its size: this one has none.
EXPORT CUresult cuGetExportTable(const void** table, const void*) {
  called(__func__);
  static const std::size_t empty = sizeof(std::size_t);
  *table = &empty;
  return CUDA_SUCCESS;
}

// What no test here calls. They must be there: a driver that lacks a function is refused.
#define UNUSED(name) \
  EXPORT CUresult name() { return CUDA_ERROR_NOT_FOUND; }
UNUSED(cuModuleUnload)
UNUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
UNUSED(cuMemsetD8Async)
UNUSED(cuMemsetD32Async)
UNUSED(cuMemcpyHtoDAsync_v2)
UNUSED(cuMemcpyDtoHAsync_v2)
UNUSED(cuMemcpyDtoDAsync_v2)
UNUSED(cuStreamBeginCapture_v2)
UNUSED(cuStreamEndCapture)
UNUSED(cuGraphInstantiateWithFlags)
UNUSED(cuGraphLaunch)
UNUSED(cuGraphExecDestroy)
UNUSED(cuGraphDestroy)

// For the tests: see fake_driver.hpp.
EXPORT int fake_module_loads() { return loads; }
EXPORT int fake_launches() {
  const std::lock_guard lock(mutex);
  return static_cast<int>(launches.size());
}
EXPORT void fake_launch(int n, FakeLaunch* launch) {
  const std::lock_guard lock(mutex);
  *launch = launches[launches.size() - 1 - static_cast<std::size_t>(n)];
}
EXPORT int fake_allocations() {
  const std::lock_guard lock(mutex);
  return static_cast<int>(allocations.size());
}
EXPORT void fake_take_calls(std::vector<std::string>* taken) { *taken = std::exchange(calls, {}); }
EXPORT CUcontext fake_new_context(CUdevice device) {
  const std::lock_guard lock(mutex);
  return &contexts.emplace_back(CUctx_st{device, next_id++});
}

}  // namespace headrace::cuda
