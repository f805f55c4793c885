// What the launchers of the CUDA backend share.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>

#include "cuda/driver/module_cache.hpp"
#include "plan/kernel.hpp"

namespace headrace::cuda {

// What the CUDA kernels share.
class CudaKernel : public Kernel {
 public:
  explicit CudaKernel(const Problem& problem) : problem_(problem) {}
  // Of the stream's memory pool, freed in the stream's order: a stream capture may record it.
  [[nodiscard]] Workspace allocate_workspace(void* stream) const final;

 protected:
  // Throws Failure if a buffer or the workspace is not memory that the problem's device can reach. Memory of the host
  // that CUDA does not know, above all: a kernel would fault on it. The driver is asked once for as long as a buffer
  // stays where it is.
  void check_pointers(const Buffers& buffers, const std::byte* workspace) const;

  const Problem& problem_;

 private:
  static constexpr std::size_t most_buffers = 18;  // all of Buffers, and the workspace
  // Where the driver has found each of them last.
  mutable std::array<std::atomic<const void*>, most_buffers> found_{};
};

std::unique_ptr<Kernel> make_hopper_forward(const Problem& problem, int multiprocessors);
std::unique_ptr<Kernel> make_hopper_split_forward(const Problem& problem, int multiprocessors);  // float32
std::unique_ptr<Kernel> make_hopper_backward(const Problem& problem, int multiprocessors);
std::unique_ptr<Kernel> make_gradient_backward(const Problem& problem, int multiprocessors);  // float32

// Queues a kernel on a stream, with the dynamic shared memory that it asks for. A context must be current.
void launch(const LoadedKernel& kernel, unsigned blocks, int threads, void* stream, void** arguments);

[[noreturn]] inline void unsupported(const std::string& message) { throw Failure(HR_ERROR_UNSUPPORTED, message); }

}  // namespace headrace::cuda
