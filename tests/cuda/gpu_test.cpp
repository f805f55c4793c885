// The driver layer on a GPU: kernels from each source, streams, graphs, contexts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <numeric>
#include <thread>
#include <vector>

#include "cuda/driver/context.hpp"
#include "cuda/driver/devices.hpp"
#include "cuda/driver/disk_cache.hpp"
#include "cuda/driver/module_cache.hpp"
#include "cuda/driver/precompiled.hpp"
#include "cuda/standard_set.hpp"
#include "describe/problem.hpp"
#include "test_kernels.hpp"

namespace headrace::cuda {
namespace {

namespace fs = std::filesystem;
using test::scale_kernel;

constexpr int count = 1000, threads = 128;

CUcontext current_context() {
  CUcontext context = nullptr;
  check(driver().cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  return context;
}

// Device memory with x[i] = i.
class Vector {
 public:
  Vector() {
    check(driver().cuMemAlloc(&address_, count * sizeof(float)), "cuMemAlloc");
    reset();
  }
  ~Vector() { driver().cuMemFree(address_); }
  Vector(const Vector&) = delete;
  Vector& operator=(const Vector&) = delete;

  void reset() {
    std::vector<float> values(count);
    std::iota(values.begin(), values.end(), 0.0F);
    check(driver().cuMemcpyHtoD(address_, values.data(), count * sizeof(float)), "cuMemcpyHtoD");
    // The copy may still be on its way, and a non-blocking stream would not wait for it.
    check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
  }
  void expect_scaled(int factor, int times = 1) const {
    std::vector<float> values(count);
    check(driver().cuMemcpyDtoH(values.data(), address_, count * sizeof(float)), "cuMemcpyDtoH");
    for (int i = 0; i < count; ++i) {
      float expected = static_cast<float>(i);
      for (int k = 0; k < times; ++k) expected = static_cast<float>(factor) * expected + static_cast<float>(i % 7);
      ASSERT_EQ(values[static_cast<std::size_t>(i)], expected) << "element " << i;
    }
  }
  CUdeviceptr address() const { return address_; }

 private:
  CUdeviceptr address_ = 0;
};

class Stream {
 public:
  Stream() { check(driver().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate"); }
  ~Stream() { driver().cuStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  CUstream get() const { return stream_; }

 private:
  CUstream stream_ = nullptr;
};

void launch(const LoadedKernel& kernel, const Vector& x, CUstream stream) {
  CUlaunchConfig config{};
  config.gridDimX = (count + threads - 1) / threads;
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(kernel.dynamic_shared);
  config.hStream = stream;
  CUdeviceptr address = x.address();
  int elements = count;
  void* parameters[] = {&address, &elements};
  check(driver().cuLaunchKernelEx(&config, kernel.function, parameters, nullptr), "cuLaunchKernelEx");
}

// Every test with a scratch cache folder, and skipped without a GPU.
class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    if (list_devices().devices.empty()) GTEST_SKIP() << "no GPU: " << list_devices().error;
    HEADRACE_NEEDS_NVRTC();
    std::string pattern = (fs::temp_directory_path() / "headrace_gpu_XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    setenv("HEADRACE_CACHE_DIR", folder_.c_str(), 1);
  }
  void TearDown() override {
    setenv("HEADRACE_CACHE_DIR", "off", 1);
    if (!folder_.empty()) fs::remove_all(folder_);
  }
  static std::string device_architecture(int ordinal = 0) {
    const Device& device = list_devices().devices.at(static_cast<std::size_t>(ordinal));
    return architecture(device.compute_major, device.compute_minor);
  }
  std::string folder_;
};

TEST_F(Gpu, RunsACompiledKernel) {
  const ContextScope scope(0);
  const LoadedKernel& kernel = load_kernel(scale_kernel(3));
  EXPECT_EQ(kernel.origin, KernelOrigin::compiled);
  EXPECT_EQ(kernel.dynamic_shared, threads * 4);
  EXPECT_GE(kernel.max_dynamic_shared, 48 << 10);
  EXPECT_GT(kernel.registers, 0);
  EXPECT_EQ(kernel.local_bytes, 0);
  EXPECT_EQ(kernel.max_threads, threads);
  const Vector x;
  launch(kernel, x, nullptr);
  x.expect_scaled(3);
  EXPECT_EQ(DiskCache(folder_).usage().entries, 1u);
}

TEST_F(Gpu, RunsAKernelFromDisk) {
  const KernelSource source = scale_kernel(4);
  const std::string key = digest_of(source, device_architecture()) + " NVRTC " + version_text(nvrtc_status().version);
  DiskCache(folder_).write(key, compile(source, device_architecture()).cubin);
  const ContextScope scope(0);
  const LoadedKernel& kernel = load_kernel(source);
  EXPECT_EQ(kernel.origin, KernelOrigin::disk_cache);
  const Vector x;
  launch(kernel, x, nullptr);
  x.expect_scaled(4);
}

TEST_F(Gpu, RunsAPrecompiledKernel) {
  const KernelSource source = scale_kernel(5);
  static const std::string pack =
      write_pack({{digest_of(source, device_architecture()), compile(source, device_architecture()).cubin}});
  add_pack(pack);
  const ContextScope scope(0);
  const LoadedKernel& kernel = load_kernel(source);
  EXPECT_EQ(kernel.origin, KernelOrigin::precompiled);
  const Vector x;
  launch(kernel, x, nullptr);
  x.expect_scaled(5);
}

// A cubin for another architecture, under the name of the right one, is refused by the driver and compiled anew.
TEST_F(Gpu, PassesOverACubinThatTheDriverRefuses) {
  const KernelSource source = scale_kernel(6);
  const std::string other = device_architecture() == "sm_80" ? "sm_90a" : "sm_80";
  static const std::string pack =
      write_pack({{digest_of(source, device_architecture()), compile(source, other).cubin}});
  add_pack(pack);
  const ContextScope scope(0);
  const LoadedKernel& kernel = load_kernel(source);
  EXPECT_EQ(kernel.origin, KernelOrigin::compiled);
  const Vector x;
  launch(kernel, x, nullptr);
  x.expect_scaled(6);
}

TEST_F(Gpu, WorksOnTheCallersStream) {
  const ContextScope scope(0);
  const LoadedKernel& kernel = load_kernel(scale_kernel(7));
  const Vector x;
  const Stream stream;
  for (int i = 0; i < 3; ++i) launch(kernel, x, stream.get());
  check(driver().cuStreamSynchronize(stream.get()), "cuStreamSynchronize");
  x.expect_scaled(7, 3);
}

// The kernel is compiled, loaded and launched for the first time while the stream is captured.
TEST_F(Gpu, LoadsAndLaunchesDuringCapture) {
  const ContextScope scope(0);
  Vector x;
  const Stream stream;
  for (const CUstreamCaptureMode mode :
       {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED}) {
    SCOPED_TRACE(static_cast<int>(mode));
    const int factor = 20 + mode;  // a kernel that has not been loaded yet
    x.reset();
    check(driver().cuStreamBeginCapture(stream.get(), mode), "cuStreamBeginCapture");
    {
      const ContextScope again(0);
      launch(load_kernel(scale_kernel(factor)), x, stream.get());
    }
    CUgraph graph = nullptr;
    check(driver().cuStreamEndCapture(stream.get(), &graph), "cuStreamEndCapture");
    x.expect_scaled(1, 0);  // captured, not run
    CUgraphExec executable = nullptr;
    check(driver().cuGraphInstantiate(&executable, graph, 0), "cuGraphInstantiate");
    for (int i = 0; i < 2; ++i) check(driver().cuGraphLaunch(executable, stream.get()), "cuGraphLaunch");
    check(driver().cuStreamSynchronize(stream.get()), "cuStreamSynchronize");
    x.expect_scaled(factor, 2);
    driver().cuGraphExecDestroy(executable);
    driver().cuGraphDestroy(graph);
  }
}

TEST_F(Gpu, RestoresTheCallersContext) {
  EXPECT_EQ(current_context(), nullptr);
  {
    const ContextScope outer(0);
    const CUcontext context = current_context();
    EXPECT_NE(context, nullptr);
    const ContextScope inner(0);
    EXPECT_EQ(current_context(), context);
  }
  EXPECT_EQ(current_context(), nullptr);
  EXPECT_THROW(load_kernel(scale_kernel(8)), Failure);
}

TEST_F(Gpu, WorksOnADeviceThatIsNotCurrent) {
  if (list_devices().devices.size() < 2) GTEST_SKIP() << "needs two GPUs";
  const ContextScope first(0);
  const CUcontext context = current_context();
  {
    const ContextScope second(1);
    const Vector x;
    launch(load_kernel(scale_kernel(9)), x, nullptr);
    x.expect_scaled(9);
    int ordinal = -1;
    check(driver().cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, x.address()),
          "cuPointerGetAttribute");
    EXPECT_EQ(ordinal, 1);
  }
  EXPECT_EQ(current_context(), context);
  const Vector x;
  launch(load_kernel(scale_kernel(9)), x, nullptr);
  x.expect_scaled(9);
}

TEST_F(Gpu, ManyThreadsLoadAndLaunch) {
  std::vector<std::thread> workers;
  for (int t = 0; t < 8; ++t)
    workers.emplace_back([t] {
      const ContextScope scope(0);
      const Vector x;
      const Stream stream;
      launch(load_kernel(scale_kernel(10 + t % 2)), x, stream.get());
      check(driver().cuStreamSynchronize(stream.get()), "cuStreamSynchronize");
      x.expect_scaled(10 + t % 2);
    });
  for (std::thread& worker : workers) worker.join();
}

// The errors of a launch have the driver's words. A wrong size is refused before anything runs.
TEST_F(Gpu, RefusedLaunchesSayWhy) {
  const ContextScope scope(0);
  LoadedKernel kernel = load_kernel(scale_kernel(12));
  kernel.dynamic_shared = kernel.max_dynamic_shared + 1;
  const Vector x;
  try {
    launch(kernel, x, nullptr);
    FAIL() << "more shared memory than there is was accepted";
  } catch (const Failure& failure) {
    EXPECT_THAT(failure.what(), testing::HasSubstr("cuLaunchKernelEx failed: CUDA error 1 (CUDA_ERROR_INVALID_VALUE"));
  }
}

// Every kernel of the set is taken as it was embedded, and the device has the shared memory that it asks for.
TEST_F(Gpu, LoadsTheStandardSet) {
  if (device_architecture() != standard_architecture) GTEST_SKIP() << "the set is for " << standard_architecture;
  const ContextScope scope(0);
  for (const KernelSource& source : standard_set()) {
    SCOPED_TRACE(name_of(source));
    const bool embedded = find_precompiled(digest_of(source, device_architecture())).has_value();
    const LoadedKernel& kernel = load_kernel(source);
    EXPECT_EQ(kernel.origin, embedded ? KernelOrigin::precompiled : KernelOrigin::compiled);
    EXPECT_LE(kernel.dynamic_shared, kernel.max_dynamic_shared);
  }
}

TEST_F(Gpu, AHitTakesLessThanAMicrosecond) {
  const ContextScope outer(0);
  const KernelSource source = scale_kernel(13);
  load_kernel(source);
  double best = 1e9;
  for (int batch = 0; batch < 50; ++batch) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 1000; ++i) {
      const ContextScope scope(0);
      load_kernel(source);
    }
    const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
    best = std::min(best, spent.count() / 1000);
  }
  std::printf("a context that is current already and a hit take %.0f ns\n", best);
  EXPECT_LT(best, 1000);
}

// A wrong enumerator of abi.hpp would show here.
TEST_F(Gpu, EncodesTensorMaps) {
  const ContextScope scope(0);
  CUdeviceptr memory = 0;
  check(driver().cuMemAlloc(&memory, 64 * 64 * 2), "cuMemAlloc");
  alignas(64) CUtensorMap map{};
  const std::uint64_t sizes[] = {64, 64}, strides[] = {128};
  const std::uint32_t box[] = {64, 32}, element_strides[] = {1, 1};
  const auto encode = [&](const std::uint32_t* boxes) {
    return driver().cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, reinterpret_cast<void*>(memory),
                                           sizes, strides, boxes, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                           CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  if (list_devices().devices[0].compute_major >= 9) {
    EXPECT_EQ(encode(box), CUDA_SUCCESS);
    // 64 elements of 2 bytes are the 128 that this swizzle allows; as float32 they would be too many.
    const std::uint32_t too_wide[] = {128, 32};
    EXPECT_EQ(encode(too_wide), CUDA_ERROR_INVALID_VALUE);
  }
  driver().cuMemFree(memory);
}

}  // namespace
}  // namespace headrace::cuda
