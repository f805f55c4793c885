// Kernels that are loaded and ready to be launched.
#pragma once

#include "cuda/driver/driver.hpp"
#include "cuda/driver/kernel_source.hpp"

namespace headrace::cuda {

enum class KernelOrigin { precompiled, disk_cache, compiled };

struct LoadedKernel {
  CUfunction function = nullptr;
  int registers = 0;           // of a thread
  int local_bytes = 0;         // of a thread; more than 0 means spilled registers
  int static_shared = 0;       // bytes of a block
  int dynamic_shared = 0;      // bytes of a block that a launch must ask for: the kernel's dynamic_shared_bytes
  int max_dynamic_shared = 0;  // that a launch may ask for; raised to all that the device has
  int max_threads = 0;         // of a block
  KernelOrigin origin = KernelOrigin::compiled;
};

// The kernel in the calling thread's current context (see ContextScope), for that context's device. It is loaded once
// for a context, from the first of: the precompiled set, the disk cache, NVRTC; meanwhile threads that ask for the
// same kernel wait, and others do not. The reference holds as long as the process lives, the function as long as the
// context does. Throws Failure (HR_ERROR_RUNTIME) that says what is missing; the next call tries again. Allowed during
// stream capture.
const LoadedKernel& load_kernel(const KernelSource& source);

}  // namespace headrace::cuda
