// Chooses the kernel of a problem on a CUDA device.
#include "cuda/launch/cuda_kernel.hpp"

#include <fmt/format.h>

#include "cuda/driver/context.hpp"
#include "cuda/driver/driver.hpp"
#include "describe/tensor_view.hpp"

namespace headrace {
namespace cuda {
namespace {

bool is_capturing(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  check(driver().cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

int attribute(CUdevice device, CUdevice_attribute which) {
  int value = 0;
  check(driver().cuDeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

void check_supported(const Problem& p) {
  if (p.dtype == HR_FLOAT64)
    unsupported(fmt::format("q: dtype is {}; on CUDA it must be float32, float16 or bfloat16", dtype_name(p.dtype)));
  constexpr std::int64_t largest = 256;
  if (p.head_dim > largest) unsupported(fmt::format("q: head_dim is {}; on CUDA it must be at most 256", p.head_dim));
  if (p.value_dim > largest)
    unsupported(fmt::format("v: value_dim is {}; on CUDA it must be at most 256", p.value_dim));
  if (p.ragged) unsupported("cu_seqlens_q: ragged batches are not yet supported on CUDA");
  for (const Sequence& s : p.sequences) {
    if (s.q_len != p.seqlen_q || s.k_len != p.seqlen_k || s.q_begin != 0 || s.k_begin != 0)
      unsupported("seqused_q, seqused_k: not yet supported on CUDA");
  }
  if (!p.unused_q.empty() || !p.unused_k.empty()) unsupported("seqused_q, seqused_k: not yet supported on CUDA");
}

}  // namespace

Workspace CudaKernel::allocate_workspace(void* stream) const {
  if (workspace_bytes() == 0) return {nullptr, [](std::byte*) {}};
  const int ordinal = problem_.device_index;
  const ContextScope context(ordinal);
  CUdeviceptr address = 0;
  check(driver().cuMemAllocAsync(&address, workspace_bytes(), static_cast<CUstream>(stream)), "cuMemAllocAsync");
  const auto free = [ordinal, stream](std::byte* memory) {
    try {
      const ContextScope again(ordinal);
      driver().cuMemFreeAsync(reinterpret_cast<CUdeviceptr>(memory), static_cast<CUstream>(stream));
    } catch (const Failure&) {
      return;  // the device is gone, and its memory with it
    }
  };
  // The driver's addresses are numbers. NOLINTNEXTLINE(performance-no-int-to-ptr)
  return {reinterpret_cast<std::byte*>(address), free};
}

void CudaKernel::check_pointers(const Buffers& b, const std::byte* workspace) const {
  std::size_t number = 0;
  const auto check_one = [&](const char* name, const void* data) {
    std::atomic<const void*>& found = found_[number++];
    if (data == nullptr || data == found.load(std::memory_order_relaxed)) return;
    unsigned type = 0;
    const CUresult result =
        driver().cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, reinterpret_cast<CUdeviceptr>(data));
    if (result == CUDA_SUCCESS) return found.store(data, std::memory_order_relaxed);
    if (result != CUDA_ERROR_INVALID_VALUE) throw_driver_error(result, "cuPointerGetAttribute");
    throw Failure(HR_ERROR_VALUE, fmt::format("{}: is at {}, which is not memory of CUDA device {}", name,
                                              fmt::ptr(data), problem_.device_index));
  };
  check_one("q", b.q);
  check_one("k", b.k);
  check_one("v", b.v);
  check_one("out", b.out);
  check_one("lse", b.lse);
  check_one("bias", b.bias);
  check_one("mask", b.mask);
  check_one("alibi_slopes", b.alibi_slopes);
  check_one("sinks", b.sinks);
  check_one("block_mask", b.block_mask);
  check_one("dout", b.dout);
  check_one("dlse", b.dlse);
  check_one("dq", b.dq);
  check_one("dk", b.dk);
  check_one("dv", b.dv);
  check_one("dbias", b.dbias);
  check_one("dsinks", b.dsinks);
  // Memory that a stream capture allocates, as allocate_workspace() does, is not known to the driver yet.
  const bool known = workspace_bytes() == 0 || workspace == found_[number].load(std::memory_order_relaxed);
  if (!known && !is_capturing(static_cast<CUstream>(b.stream))) check_one("workspace", workspace);
}

void launch(const LoadedKernel& kernel, unsigned blocks, int threads, void* stream, void** arguments) {
  const CUlaunchConfig config{.gridDimX = blocks,
                              .gridDimY = 1,
                              .gridDimZ = 1,
                              .blockDimX = static_cast<unsigned>(threads),
                              .blockDimY = 1,
                              .blockDimZ = 1,
                              .sharedMemBytes = static_cast<unsigned>(kernel.dynamic_shared),
                              .hStream = static_cast<CUstream>(stream),
                              .attrs = nullptr,
                              .numAttrs = 0};
  check(driver().cuLaunchKernelEx(&config, kernel.function, arguments, nullptr), "cuLaunchKernelEx");
}

}  // namespace cuda

std::unique_ptr<Kernel> make_cuda_kernel(const Problem& p) {
  using namespace cuda;
  check_supported(p);
  int count = 0;
  check(driver().cuDeviceGetCount(&count), "cuDeviceGetCount");
  if (p.device_index >= count)
    throw Failure(HR_ERROR_VALUE, fmt::format("device_index: is {}; this machine has {} CUDA device{}", p.device_index,
                                              count, count == 1 ? "" : "s"));
  CUdevice device = 0;
  check(driver().cuDeviceGet(&device, p.device_index), "cuDeviceGet");
  const int major = attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  const int minor = attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  if (major != 9 || minor != 0)
    unsupported(
        fmt::format("device_index: CUDA device {} has compute capability {}.{}; there are kernels for 9.0 "
                    "(Hopper) only so far",
                    p.device_index, major, minor));
  const int multiprocessors = attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  if (p.pass == Pass::backward)
    return p.dtype == HR_FLOAT32 ? make_gradient_backward(p, multiprocessors)
                                 : make_hopper_backward(p, multiprocessors);
  return p.dtype == HR_FLOAT32 ? make_hopper_split_forward(p, multiprocessors)
                               : make_hopper_forward(p, multiprocessors);
}

}  // namespace headrace
