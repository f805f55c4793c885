#include "cuda/driver/module_cache.hpp"

#include <fmt/format.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>

#include "cuda/driver/cubin.hpp"
#include "cuda/driver/devices.hpp"
#include "cuda/driver/disk_cache.hpp"
#include "cuda/driver/precompiled.hpp"
#include "describe/problem.hpp"

namespace headrace::cuda {
namespace {

int attribute_of(CUfunction function, CUfunction_attribute attribute) {
  int value = 0;
  check(driver().cuFuncGetAttribute(&value, attribute, function), "cuFuncGetAttribute");
  return value;
}

struct CurrentDevice {
  std::string architecture;
  int shared_bytes = 0;
};

CurrentDevice current_device() {
  CUdevice device = 0;
  check(driver().cuCtxGetDevice(&device), "cuCtxGetDevice");
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    check(driver().cuDeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
    return value;
  };
  return {architecture(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                       attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)),
          attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)};
}

// Loads a cubin into the current context. The module is never unloaded: kernels of it may still run.
LoadedKernel load_cubin(const std::string& cubin, const KernelSource& source, int shared_bytes, KernelOrigin origin) {
  const CubinReport report = inspect_cubin(cubin, source.entry);
  const CaptureTolerance tolerance;
  CUmodule module = nullptr;
  LoadedKernel kernel;
  check(driver().cuModuleLoadData(&module, cubin.data()), "cuModuleLoadData");
  check(driver().cuModuleGetFunction(&kernel.function, module, source.entry.c_str()), "cuModuleGetFunction");
  kernel.origin = origin;
  kernel.registers = attribute_of(kernel.function, CU_FUNC_ATTRIBUTE_NUM_REGS);
  kernel.local_bytes = attribute_of(kernel.function, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
  kernel.static_shared = attribute_of(kernel.function, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
  kernel.max_threads = attribute_of(kernel.function, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
  kernel.dynamic_shared = report.dynamic_shared;
  kernel.max_dynamic_shared = shared_bytes - kernel.static_shared;
  if (kernel.dynamic_shared > kernel.max_dynamic_shared)
    throw Failure(HR_ERROR_RUNTIME,
                  fmt::format("GPU: kernel {} needs {} bytes of shared memory for a block; this device has {}",
                              name_of(source), kernel.dynamic_shared + kernel.static_shared, shared_bytes));
  check(driver().cuFuncSetAttribute(kernel.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                    kernel.max_dynamic_shared),
        "cuFuncSetAttribute");
  return kernel;
}

// A cubin from before that this driver, or this version of the library, does not take is as good as none.
std::optional<LoadedKernel> try_cubin(const std::string& cubin, const KernelSource& source, int shared_bytes,
                                      KernelOrigin origin) {
  try {
    return load_cubin(cubin, source, shared_bytes, origin);
  } catch (const Failure&) {
    return std::nullopt;
  }
}

LoadedKernel load(const KernelSource& source) {
  const CurrentDevice device = current_device();
  const std::string digest = digest_of(source, device.architecture);
  if (const auto cubin = find_precompiled(digest))
    if (auto kernel = try_cubin(std::string(*cubin), source, device.shared_bytes, KernelOrigin::precompiled))
      return *kernel;

  const NvrtcStatus& nvrtc = nvrtc_status();
  if (!nvrtc.error.empty())
    throw Failure(
        HR_ERROR_RUNTIME,
        fmt::format("GPU: this call needs a kernel outside the precompiled set, {} for {}, and there is no NVRTC "
                    "to compile it: {}. Install the CUDA toolkit or the pip package nvidia-cuda-nvrtc, or let "
                    "HEADRACE_NVRTC be the path of libnvrtc.so",
                    name_of(source), device.architecture, nvrtc.error));
  const DiskCache cache(DiskCache::default_folder());
  const std::string key = fmt::format("{} NVRTC {}", digest, version_text(nvrtc.version));
  if (const auto cubin = cache.read(key))
    if (auto kernel = try_cubin(*cubin, source, device.shared_bytes, KernelOrigin::disk_cache)) return *kernel;

  const Compiled compiled = compile(source, device.architecture);
  LoadedKernel kernel = load_cubin(compiled.cubin, source, device.shared_bytes, KernelOrigin::compiled);
  cache.write(key, compiled.cubin);
  return kernel;
}

// One kernel in one context. The number of a context is never used again, so what belongs to one that was destroyed
// is never found again either.
struct Key {
  ContextId context;
  KernelSource source;
};

struct KeyView {  // the same without copies: a hit allocates nothing
  ContextId context;
  const KernelSource& source;
};

struct Hash {
  using is_transparent = void;
  static void add(std::size_t& hash, std::size_t value) {
    hash ^= value + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2);
  }
  template <typename AnyKey>
  std::size_t operator()(const AnyKey& key) const {
    std::size_t hash = static_cast<std::size_t>(key.context);
    add(hash, std::hash<std::string>()(key.source.entry));
    add(hash, std::hash<std::string>()(key.source.file));
    // The names are the same for all kernels of a file; equality looks at them.
    for (const auto& constant : key.source.constants) add(hash, static_cast<std::size_t>(constant.second));
    return hash;
  }
};

struct Equal {
  using is_transparent = void;
  template <typename A, typename B>
  bool operator()(const A& a, const B& b) const {
    return a.context == b.context && a.source == b.source;
  }
};

struct Slot {
  std::mutex mutex;  // held while the kernel is loaded
  std::atomic<bool> ready = false;
  LoadedKernel kernel;
};

class ModuleCache {
 public:
  Slot& slot(ContextId context, const KernelSource& source) {
    {
      const std::shared_lock lock(mutex_);
      const auto found = slots_.find(KeyView{context, source});
      if (found != slots_.end()) return *found->second;
    }
    const std::unique_lock lock(mutex_);
    return *slots_.try_emplace(Key{context, source}, std::make_unique<Slot>()).first->second;
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<Key, std::unique_ptr<Slot>, Hash, Equal> slots_;
};

ModuleCache& module_cache() {
  static auto* const cache = new ModuleCache;  // never destroyed: threads may launch while the process ends
  return *cache;
}

}  // namespace

const LoadedKernel& load_kernel(const KernelSource& source) {
  const ContextId context = current_context_id();
  if (context == 0) throw Failure(HR_ERROR_RUNTIME, "GPU: the thread has no current CUDA context");
  Slot& slot = module_cache().slot(context, source);
  if (!slot.ready.load(std::memory_order_acquire)) {
    const std::lock_guard lock(slot.mutex);
    if (!slot.ready.load(std::memory_order_relaxed)) {
      slot.kernel = load(source);
      slot.kernel.context = context;
      slot.ready.store(true, std::memory_order_release);
    }
  }
  return slot.kernel;
}

}  // namespace headrace::cuda
