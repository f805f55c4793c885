// Which context is current: every call works on the device that it was given and leaves the caller's state alone.
#pragma once

#include "cuda/driver/driver.hpp"

namespace headrace::cuda {

using ContextId = unsigned long long;
// Of the calling thread's current context; 0, which is no context's, if there is none.
ContextId current_context_id();

// Makes a context of a device current for its lifetime. If the caller's current context belongs to that device it
// stays (it may not be the primary one); else the device's primary context, the one that CUDA's runtime and PyTorch
// use, is pushed and popped again. Calls nothing that a stream capture forbids, and where the context stays, two of the
// driver's functions.
class ContextScope {
 public:
  explicit ContextScope(int ordinal);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
  // The number of the context that is current now; no other context of the process ever has the same.
  [[nodiscard]] ContextId id() const { return id_; }

 private:
  ContextId id_ = 0;
  bool pushed_ = false;
};

// Lets the thread make calls that a stream capture forbids by default and that are harmless to it: loading code,
// allocating. Restores the caller's mode.
class CaptureTolerance {
 public:
  CaptureTolerance();
  ~CaptureTolerance();
  CaptureTolerance(const CaptureTolerance&) = delete;
  CaptureTolerance& operator=(const CaptureTolerance&) = delete;

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace headrace::cuda
