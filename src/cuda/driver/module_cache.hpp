// Kernels that are loaded and ready to be launched.
#pragma once

#include <atomic>

#include "cuda/driver/context.hpp"
#include "cuda/driver/kernel_source.hpp"

namespace headrace::cuda {

enum class KernelOrigin { precompiled, disk_cache, compiled };

struct LoadedKernel {
  CUfunction function = nullptr;
  ContextId context = 0;       // that it is loaded in
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

// A kernel of a plan. It is looked up when planning; an execution in the same context finds it without asking anybody,
// whichever the thread.
class PlannedKernel {
 public:
  explicit PlannedKernel(KernelSource source) : source_(std::move(source)) {}
  // Loads it into the current context: compiled now, if it must be.
  const LoadedKernel& load() const {
    const LoadedKernel& kernel = load_kernel(source_);
    last_.store(&kernel, std::memory_order_release);
    return kernel;
  }
  // The kernel in a context, which is current.
  [[nodiscard]] const LoadedKernel& in(const ContextScope& context) const {
    const LoadedKernel* last = last_.load(std::memory_order_acquire);
    return last != nullptr && last->context == context.id() ? *last : load();
  }

 private:
  KernelSource source_;
  mutable std::atomic<const LoadedKernel*> last_ = nullptr;
};

}  // namespace headrace::cuda
