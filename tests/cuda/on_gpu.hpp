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
  // What `pass` wrote beside it, or "".
  [[nodiscard]] std::string judge(Pass pass = Pass::forward) const;

 private:
  std::size_t bytes_;
  GpuMemory memory_;
};

// All tensors of a call on the device: the memory of each as it is on the host, gaps too, between guard bands. In two
// of three calls a result is aligned to 16 bytes, each on its own; q, k, v and dout always, or if drawn in as many.
class GpuCall {
 public:
  enum class Alignment { full, drawn };
  GpuCall(Call& call, cuda::CUstream stream, Alignment alignment = Alignment::full);

  // The call with device pointers, on the stream.
  [[nodiscard]] const Attention& attention() const { return attention_; }
  [[nodiscard]] Attention& attention() { return attention_; }
  // Copies the host's tensors to the device, the bands too.
  void upload() const;
  // Copies everything back. Returns what `pass` wrote where nothing of the call is, or "".
  [[nodiscard]] std::string download(Pass pass = Pass::forward);
  // Where the storage of an array of the call begins.
  [[nodiscard]] CUdeviceptr address_of(const Array& array) const;
  // All of the memory, bands too.
  [[nodiscard]] CUdeviceptr address() const { return memory_.address(); }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

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

// What runs on the GPU: the forward pass, or that and then the backward pass on the out and lse that it gave.
enum class Passes { forward, both };

// The passes on a stream of their own: their results, and what was wrong with their manners.
Outcome run_on_gpu(Call& call, Passes passes = Passes::forward);

// Runs one pass of a call that is on the device, through a plan and a poisoned workspace if the spec says so, and
// waits. Returns what it wrote beside the workspace, or "".
std::string run_pass(const Spec& spec, const Attention& attention, const GpuStream& stream, Pass pass);

// The results that are on the host, as the passes left them.
Results results_in(const Call& call, Passes passes);

// The float64 results, with `threads`; of the forward pass alone, the gradients are zeros.
Results exact_on_cpu(const Call& call, int threads, Passes passes = Passes::forward);

// What is wrong with the results of a run; "" if nothing is.
std::string judge(const Call& call, const Outcome& outcome, const Results& exact, Passes passes = Passes::forward);

// The call on the GPU against the reference; "" or what is wrong.
std::string check_on_gpu(const Spec& spec, Passes passes = Passes::forward);

// As a gtest failure. Returns what the GPU gave, or the exact results if it gave none, so that a test may go on.
Results run_and_expect_exact_on_gpu(Call& call, Passes passes = Passes::forward);

// The variant of the forward kernel that a spec needs; empty entry: none, there is nothing to do.
cuda::KernelSource variant_of(const Spec& spec);

// Compiles and loads the kernels that plans of the spec need, if need be.
void load_kernels(const Spec& spec, Passes passes);
// Those of all specs, at the same time. What fails is left to their calls to report.
void load_variants(const std::vector<Spec>& specs, Passes passes = Passes::forward);

// Runs job(0) to job(count - 1) on as many threads as there are processors, in this order. A job that throws is a gtest
// failure.
void in_parallel(std::size_t count, const std::function<void(std::size_t)>& job);

// A dense call of one head, with a seed of the running test.
Spec dense_spec(DType dtype, std::int64_t seqlen_q, std::int64_t seqlen_k, std::int64_t dim);

// Skipped where there is no Hopper GPU.
class OnGpu : public testing::Test {
 protected:
  void SetUp() override;
};

}  // namespace headrace::test
