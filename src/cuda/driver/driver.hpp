// The CUDA driver: libcuda, opened at run time. A machine without it is no error until a GPU is asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/driver/abi.hpp"

namespace headrace::cuda {

// Name, exported symbol, parameters. The symbol carries the version of the binary interface, as in cuda.h.
#define HEADRACE_DRIVER_FUNCTIONS(X)                                                                                   \
  X(cuInit, "cuInit", (unsigned flags))                                                                                \
  X(cuDriverGetVersion, "cuDriverGetVersion", (int* version))                                                          \
  X(cuGetErrorName, "cuGetErrorName", (CUresult error, const char** text))                                             \
  X(cuGetErrorString, "cuGetErrorString", (CUresult error, const char** text))                                         \
  X(cuDeviceGetCount, "cuDeviceGetCount", (int* count))                                                                \
  X(cuDeviceGet, "cuDeviceGet", (CUdevice * device, int ordinal))                                                      \
  X(cuDeviceGetName, "cuDeviceGetName", (char* name, int bytes, CUdevice device))                                      \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int* value, CUdevice_attribute attribute, CUdevice device))         \
  X(cuDeviceTotalMem, "cuDeviceTotalMem_v2", (std::size_t * bytes, CUdevice device))                                   \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext * context, CUdevice device))                      \
  X(cuCtxGetCurrent, "cuCtxGetCurrent", (CUcontext * context))                                                         \
  X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext context))                                                      \
  X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext * context))                                                      \
  X(cuCtxGetDevice, "cuCtxGetDevice", (CUdevice * device))                                                             \
  X(cuCtxGetId, "cuCtxGetId", (CUcontext context, unsigned long long* id))                                             \
  X(cuCtxSynchronize, "cuCtxSynchronize", ())                                                                          \
  X(cuModuleLoadData, "cuModuleLoadData", (CUmodule * module, const void* image))                                      \
  X(cuModuleUnload, "cuModuleUnload", (CUmodule module))                                                               \
  X(cuModuleGetFunction, "cuModuleGetFunction", (CUfunction * function, CUmodule module, const char* name))            \
  X(cuFuncGetAttribute, "cuFuncGetAttribute", (int* value, CUfunction_attribute attribute, CUfunction function))       \
  X(cuFuncSetAttribute, "cuFuncSetAttribute", (CUfunction function, CUfunction_attribute attribute, int value))        \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, "cuOccupancyMaxActiveBlocksPerMultiprocessor",                        \
    (int* blocks, CUfunction function, int threads, std::size_t dynamic_shared))                                       \
  X(cuLaunchKernelEx, "cuLaunchKernelEx",                                                                              \
    (const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra))                              \
  X(cuMemAlloc, "cuMemAlloc_v2", (CUdeviceptr * address, std::size_t bytes))                                           \
  X(cuMemFree, "cuMemFree_v2", (CUdeviceptr address))                                                                  \
  X(cuMemAllocAsync, "cuMemAllocAsync", (CUdeviceptr * address, std::size_t bytes, CUstream stream))                   \
  X(cuMemFreeAsync, "cuMemFreeAsync", (CUdeviceptr address, CUstream stream))                                          \
  X(cuMemsetD8Async, "cuMemsetD8Async",                                                                                \
    (CUdeviceptr address, unsigned char value, std::size_t count, CUstream stream))                                    \
  X(cuMemsetD32Async, "cuMemsetD32Async", (CUdeviceptr address, unsigned value, std::size_t count, CUstream stream))   \
  X(cuMemcpyHtoD, "cuMemcpyHtoD_v2", (CUdeviceptr to, const void* from, std::size_t bytes))                            \
  X(cuMemcpyDtoH, "cuMemcpyDtoH_v2", (void* to, CUdeviceptr from, std::size_t bytes))                                  \
  X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (CUdeviceptr to, const void* from, std::size_t bytes, CUstream stream)) \
  X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void* to, CUdeviceptr from, std::size_t bytes, CUstream stream))       \
  X(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", (CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream)) \
  X(cuPointerGetAttribute, "cuPointerGetAttribute", (void* value, CUpointer_attribute attribute, CUdeviceptr address)) \
  X(cuStreamCreate, "cuStreamCreate", (CUstream * stream, unsigned flags))                                             \
  X(cuStreamDestroy, "cuStreamDestroy_v2", (CUstream stream))                                                          \
  X(cuStreamSynchronize, "cuStreamSynchronize", (CUstream stream))                                                     \
  X(cuStreamIsCapturing, "cuStreamIsCapturing", (CUstream stream, CUstreamCaptureStatus * status))                     \
  X(cuStreamBeginCapture, "cuStreamBeginCapture_v2", (CUstream stream, CUstreamCaptureMode mode))                      \
  X(cuStreamEndCapture, "cuStreamEndCapture", (CUstream stream, CUgraph * graph))                                      \
  X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (CUstreamCaptureMode * mode))              \
  X(cuGraphInstantiate, "cuGraphInstantiateWithFlags",                                                                 \
    (CUgraphExec * executable, CUgraph graph, unsigned long long flags))                                               \
  X(cuGraphLaunch, "cuGraphLaunch", (CUgraphExec executable, CUstream stream))                                         \
  X(cuGraphExecDestroy, "cuGraphExecDestroy", (CUgraphExec executable))                                                \
  X(cuGraphDestroy, "cuGraphDestroy", (CUgraph graph))                                                                 \
  X(cuEventCreate, "cuEventCreate", (CUevent * event, unsigned flags))                                                 \
  X(cuEventDestroy, "cuEventDestroy_v2", (CUevent event))                                                              \
  X(cuEventRecord, "cuEventRecord", (CUevent event, CUstream stream))                                                  \
  X(cuEventSynchronize, "cuEventSynchronize", (CUevent event))                                                         \
  X(cuEventElapsedTime, "cuEventElapsedTime", (float* milliseconds, CUevent start, CUevent end))                       \
  X(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled",                                                                  \
    (CUtensorMap * map, CUtensorMapDataType type, std::uint32_t rank, void* address, const std::uint64_t* sizes,       \
     const std::uint64_t* strides, const std::uint32_t* box, const std::uint32_t* element_strides,                     \
     CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,                   \
     CUtensorMapFloatOOBfill fill))                                                                                    \
  X(cuTensorMapReplaceAddress, "cuTensorMapReplaceAddress", (CUtensorMap * map, void* address))

struct Driver {
// A name and a list of parameters have no parentheses of their own. NOLINTNEXTLINE(bugprone-macro-parentheses)
#define HEADRACE_DECLARE(name, symbol, parameters) CUresult(*name) parameters = nullptr;
  HEADRACE_DRIVER_FUNCTIONS(HEADRACE_DECLARE)
#undef HEADRACE_DECLARE
};

// What became of opening and initialising the driver; decided once in a process.
struct DriverStatus {
  Driver table;
  bool found = false;  // libcuda is there
  int version = 0;     // of the CUDA interface that it offers, 1000 * major + 10 * minor; 0 if unknown
  std::string error;   // why it cannot be used; empty if it can
};
const DriverStatus& driver_status();

// The functions of an initialised driver. Throws Failure with the status's error if there is none.
const Driver& driver();

// Throws Failure, HR_ERROR_RUNTIME: "cuLaunchKernelEx failed: CUDA error 700 (CUDA_ERROR_..., an illegal ...)".
[[noreturn]] void throw_driver_error(CUresult result, const char* function);
inline void check(CUresult result, const char* function) {
  if (result != CUDA_SUCCESS) [[unlikely]]
    throw_driver_error(result, function);
}

// "13.0" of 13000.
std::string version_text(int version);

}  // namespace headrace::cuda
