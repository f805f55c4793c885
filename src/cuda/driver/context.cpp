#include "cuda/driver/context.hpp"

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <mutex>

#include "describe/problem.hpp"

namespace headrace::cuda {
namespace {

constexpr int max_devices = 64;

void check_ordinal(int ordinal) {
  if (ordinal < 0 || ordinal >= max_devices)
    throw Failure(HR_ERROR_RUNTIME, fmt::format("device: is {}; must be in [0, {})", ordinal, max_devices));
}

// The primary context of a device, retained once and never released: other users of the process count their own.
CUcontext primary_context(int ordinal) {
  static std::array<std::atomic<CUcontext>, max_devices> contexts{};
  static std::mutex mutex;
  std::atomic<CUcontext>& cached = contexts[static_cast<std::size_t>(ordinal)];
  CUcontext context = cached.load(std::memory_order_acquire);
  if (context != nullptr) return context;

  const std::lock_guard lock(mutex);
  context = cached.load(std::memory_order_relaxed);
  if (context != nullptr) return context;
  const CaptureTolerance tolerance;
  CUdevice device = 0;
  check(driver().cuDeviceGet(&device, ordinal), "cuDeviceGet");
  check(driver().cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  cached.store(context, std::memory_order_release);
  return context;
}

// Whether the current context, of this number, belongs to the device.
bool is_context_of(ContextId current, int ordinal) {
  // The last one that did: what was true of a number stays true.
  static std::array<std::atomic<ContextId>, max_devices> known{};
  std::atomic<ContextId>& last = known[static_cast<std::size_t>(ordinal)];
  if (last.load(std::memory_order_relaxed) == current) return true;
  // A device's handle is its ordinal in every driver so far, but only cuDeviceGet promises anything.
  CUdevice device = 0, expected = 0;
  check(driver().cuCtxGetDevice(&device), "cuCtxGetDevice");
  check(driver().cuDeviceGet(&expected, ordinal), "cuDeviceGet");
  if (device != expected) return false;
  last.store(current, std::memory_order_relaxed);
  return true;
}

}  // namespace

ContextId current_context_id() {
  CUcontext context = nullptr;
  check(driver().cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  ContextId id = 0;
  if (context != nullptr) check(driver().cuCtxGetId(context, &id), "cuCtxGetId");
  return id;
}

ContextScope::ContextScope(int ordinal) : id_(current_context_id()) {
  check_ordinal(ordinal);
  if (id_ != 0 && is_context_of(id_, ordinal)) return;
  check(driver().cuCtxPushCurrent(primary_context(ordinal)), "cuCtxPushCurrent");
  pushed_ = true;
  id_ = current_context_id();
}

ContextScope::~ContextScope() {
  CUcontext popped = nullptr;
  if (pushed_) driver().cuCtxPopCurrent(&popped);
}

CaptureTolerance::CaptureTolerance() {
  check(driver().cuThreadExchangeStreamCaptureMode(&mode_), "cuThreadExchangeStreamCaptureMode");
}

CaptureTolerance::~CaptureTolerance() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }

}  // namespace headrace::cuda
