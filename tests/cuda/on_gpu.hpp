// Runs the calls of tests/support on a GPU and judges them against the float64 reference.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "cuda/driver/context.hpp"
#include "cuda/driver/driver.hpp"
#include "cuda/driver/kernel_source.hpp"
#include "headrace/headrace.hpp"
#include "support/compare.hpp"
#include "support/problem.hpp"

namespace headrace::test {

using cuda::check;
using cuda::ContextScope;
using cuda::CUdeviceptr;
using cuda::driver;

// A stream that does not wait for the default stream.
class GpuStream {
 public:
  GpuStream();
  ~GpuStream();
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;
  [[nodiscard]] cuda::CUstream get() const { return stream_; }
  // Waits. If that takes very long the process ends with a message that says what was running: a kernel that hangs
  // cannot be stopped otherwise.
  void synchronize(const std::string& what) const;

 private:
  cuda::CUstream stream_ = nullptr;
};

class GpuMemory {
 public:
  explicit GpuMemory(std::size_t bytes);
  ~GpuMemory();
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  [[nodiscard]] cuda::CUdeviceptr address() const { return address_; }

 private:
  cuda::CUdeviceptr address_ = 0;
};

// The workspace of a plan, full of NaN between guard bands.
class GpuWorkspace {
 public:
  explicit GpuWorkspace(std::size_t bytes);
  // To be given to hr_plan_execute.
  [[nodiscard]] std::span<std::byte> span() const;
  // What was written beside it, or "".
  [[nodiscard]] std::string judge() const;

 private:
  std::size_t bytes_;
  GpuMemory memory_;
};

// All tensors of a call on the device: the memory of each as it is on the host, gaps too, between guard bands. In two
// of three calls out is aligned to 16 bytes; q, k and v always, or if drawn in as many, each on its own.
class GpuCall {
 public:
  enum class Alignment { full, drawn };
  GpuCall(Call& call, cuda::CUstream stream, Alignment alignment = Alignment::full);

  // The call with device pointers, on the stream.
  [[nodiscard]] const Attention& attention() const { return attention_; }
  [[nodiscard]] Attention& attention() { return attention_; }
  // Copies the host's tensors to the device, the bands too.
  void upload() const;
  // Copies everything back. Returns what was written where nothing of the call is, or "".
  [[nodiscard]] std::string download();

 private:
  struct Block {
    std::string name;
    std::span<std::byte> host;
    std::size_t at;
  };
  static std::size_t layout(Call& call, Alignment alignment, std::vector<Block>& blocks);

  Call& call_;
  std::vector<Block> blocks_;
  std::size_t bytes_;
  std::vector<std::byte> image_;
  GpuMemory memory_;
  Attention attention_;
};

// The forward pass on a stream of its own: out and lse, and what was wrong with its manners.
Outcome run_on_gpu(Call& call);

// The float64 out and lse, with `threads`; the gradients are zeros.
Results exact_forward(const Call& call, int threads);

// What is wrong with out and lse of a run; "" if nothing is.
std::string judge_forward(const Call& call, const Outcome& outcome, const Results& exact);

// The call on the GPU against the reference; "" or what is wrong.
std::string check_on_gpu(const Spec& spec);

// The variant of the kernel that a spec needs; empty entry: none, there is nothing to do.
cuda::KernelSource variant_of(const Spec& spec);

// Loads the kernel, compiling it if need be.
void load_variant(const cuda::KernelSource& source);
// The kernels of all specs, compiled at the same time. What fails is left to their calls to report.
void load_variants(const std::vector<Spec>& specs);

// Runs job(0) to job(count - 1) on as many threads as there are processors, in this order.
void in_parallel(std::size_t count, const std::function<void(std::size_t)>& job);

// Skipped where there is no Hopper GPU.
class OnGpu : public testing::Test {
 protected:
  void SetUp() override;
};

}  // namespace headrace::test
