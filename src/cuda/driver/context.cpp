#include "cuda/driver/context.hpp"

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <mutex>

#include "describe/problem.hpp"

namespace headrace::cuda {
namespace {

constexpr int max_devices = 64;

// The primary context of a device, retained once and never released: other users of the process count their own.
CUcontext primary_context(int ordinal) {
  static std::array<std::atomic<CUcontext>, max_devices> contexts{};
  static std::mutex mutex;
  if (ordinal < 0 || ordinal >= max_devices)
    throw Failure(HR_ERROR_RUNTIME, fmt::format("device: is {}; must be in [0, {})", ordinal, max_devices));
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

// A device's handle is its ordinal in every driver so far, but only cuDeviceGet promises anything.
bool is_device(CUdevice device, int ordinal) {
  CUdevice expected = 0;
  check(driver().cuDeviceGet(&expected, ordinal), "cuDeviceGet");
  return device == expected;
}

}  // namespace

ContextScope::ContextScope(int ordinal) {
  CUcontext current = nullptr;
  check(driver().cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  if (current != nullptr) {
    CUdevice device = 0;
    check(driver().cuCtxGetDevice(&device), "cuCtxGetDevice");
    if (is_device(device, ordinal)) return;
  }
  check(driver().cuCtxPushCurrent(primary_context(ordinal)), "cuCtxPushCurrent");
  pushed_ = true;
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
