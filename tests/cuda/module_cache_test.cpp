// Contexts and loaded kernels, with fake_driver.cpp in place of the driver: no GPU is needed, and every decision of
// the layer can be seen.
#include "cuda/driver/module_cache.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <thread>
#include <vector>

#include "cuda/driver/context.hpp"
#include "cuda/driver/devices.hpp"
#include "cuda/driver/disk_cache.hpp"
#include "cuda/driver/precompiled.hpp"
#include "describe/problem.hpp"
#include "fake_driver.hpp"
#include "test_kernels.hpp"

namespace headrace::cuda {
namespace {

namespace fs = std::filesystem;
using fake::module_loads;
using fake::new_context;
using test::scale_kernel;
using testing::HasSubstr;

CUcontext current_context() {
  CUcontext context = nullptr;
  check(driver().cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  return context;
}

template <typename Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.status, HR_ERROR_RUNTIME);
    return failure.what();
  }
  return "";
}

// What the process decides once is tried in a new process: prints the error of loading a kernel.
void print_load_error(long long factor) {
  std::fprintf(stderr, "%s", error_of([&] {
                               const ContextScope scope(0);
                               load_kernel(scale_kernel(factor));
                             }).c_str());
  std::exit(0);
}

TEST(Driver, ListsItsDevices) {
  const DeviceList& list = list_devices();
  EXPECT_EQ(list.error, "");
  ASSERT_EQ(list.devices.size(), 2u);
  EXPECT_EQ(list.devices[1].name, "Fake 1");
  EXPECT_EQ(list.devices[1].multiprocessors, 132);
  EXPECT_EQ(architecture(list.devices[1].compute_major, list.devices[1].compute_minor), "sm_90a");
  EXPECT_EQ(architecture(8, 6), "sm_86");
  EXPECT_EQ(architecture(12, 0), "sm_120a");
}

TEST(Driver, InfoTellsOfThem) {
  const std::string info = hr_info();
  for (const char* part : {R"("driver_version":"13.0")", R"("name":"Fake 1","compute_capability":"9.0")",
                           R"("multiprocessors":132)", R"("precompiled":{"kernels":)", R"("cache":{"folder":null)"})
    EXPECT_THAT(info, HasSubstr(part));
  if (nvrtc_status().error.empty())
    EXPECT_THAT(info, HasSubstr(R"("nvrtc":{"version":")" + version_text(nvrtc_status().version)));
  else
    EXPECT_THAT(info, HasSubstr(R"("nvrtc":{"version":null,"error":)"));
}

TEST(Driver, ErrorsNameTheCallAndTheReason) {
  EXPECT_EQ(error_of([] { check(static_cast<CUresult>(700), "cuLaunchKernelEx"); }),
            "cuLaunchKernelEx failed: CUDA error 700 (CUDA_ERROR_FAKE, a fake error)");
  EXPECT_THAT(error_of([] { const ContextScope scope(7); }), HasSubstr("cuDeviceGet failed: CUDA error 101"));
  EXPECT_THAT(error_of([] { const ContextScope scope(-1); }), HasSubstr("device: is -1"));
}

TEST(DriverDeathTest, WithoutADeviceSaysSo) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT((setenv("HEADRACE_FAKE_DRIVER", "no device", 1), print_load_error(1)), testing::ExitedWithCode(0),
              "^GPU: the CUDA driver sees no device$");
}

TEST(ContextScope, MakesAPrimaryContextCurrentAndRestoresNone) {
  ASSERT_EQ(current_context(), nullptr);
  {
    const ContextScope scope(1);
    CUdevice device = -1;
    check(driver().cuCtxGetDevice(&device), "cuCtxGetDevice");
    EXPECT_EQ(device, 1);
    const CUcontext outer = current_context();
    {
      const ContextScope inner(0);
      EXPECT_NE(current_context(), outer);
      const ContextScope innermost(1);
      EXPECT_EQ(current_context(), outer);
    }
    EXPECT_EQ(current_context(), outer);
  }
  EXPECT_EQ(current_context(), nullptr);
}

TEST(ContextScope, KeepsTheCallersContextOfThatDevice) {
  const CUcontext own = new_context(1);
  check(driver().cuCtxPushCurrent(own), "cuCtxPushCurrent");
  {
    const ContextScope scope(1);
    EXPECT_EQ(current_context(), own);
  }
  {
    const ContextScope scope(0);
    EXPECT_NE(current_context(), own);
  }
  EXPECT_EQ(current_context(), own);
  CUcontext popped = nullptr;
  check(driver().cuCtxPopCurrent(&popped), "cuCtxPopCurrent");
  EXPECT_EQ(popped, own);
}

TEST(ContextScope, IsLeftByExceptions) {
  EXPECT_THROW(
      {
        const ContextScope scope(0);
        load_kernel({"absent", "absent.cuh", {}});
      },
      Failure);
  EXPECT_EQ(current_context(), nullptr);
}

class ModuleCache : public testing::Test {
 protected:
  ModuleCache() {
    std::string pattern = (fs::temp_directory_path() / "headrace_modules_XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    setenv("HEADRACE_CACHE_DIR", folder_.c_str(), 1);
  }
  ~ModuleCache() override {
    setenv("HEADRACE_CACHE_DIR", "off", 1);
    fs::remove_all(folder_);
  }
  std::string folder_;
};

TEST_F(ModuleCache, NeedsACurrentContext) {
  EXPECT_EQ(error_of([] { load_kernel(scale_kernel(1)); }), "GPU: the thread has no current CUDA context");
}

TEST_F(ModuleCache, TakesPrecompiledThenDiskThenCompiler) {
  HEADRACE_NEEDS_NVRTC();
  const KernelSource kernel = scale_kernel(10);
  const auto load_in_new_context = [&] {
    check(driver().cuCtxPushCurrent(new_context(0)), "cuCtxPushCurrent");
    const LoadedKernel& loaded = load_kernel(kernel);
    EXPECT_EQ(&loaded, &load_kernel(kernel)) << "the second time it is there";
    CUcontext popped = nullptr;
    check(driver().cuCtxPopCurrent(&popped), "cuCtxPopCurrent");
    return loaded;
  };
  const DiskCache cache(folder_);
  const LoadedKernel compiled = load_in_new_context();
  EXPECT_EQ(compiled.origin, KernelOrigin::compiled);
  EXPECT_EQ(compiled.dynamic_shared, 512);
  EXPECT_EQ(compiled.max_dynamic_shared, (227 << 10) - compiled.static_shared);
  EXPECT_EQ(cache.usage().entries, 1u);

  const LoadedKernel from_disk = load_in_new_context();
  EXPECT_EQ(from_disk.origin, KernelOrigin::disk_cache);
  EXPECT_NE(from_disk.function, compiled.function) << "another context has another function";

  for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) fs::resize_file(entry.path(), 100);
  EXPECT_EQ(load_in_new_context().origin, KernelOrigin::compiled);
  EXPECT_EQ(load_in_new_context().origin, KernelOrigin::disk_cache);

  // A whole entry that is no cubin, of a version of the library with a defect, is compiled anew and replaced.
  const std::string digest = digest_of(kernel, "sm_90a");
  const std::string key = digest + " NVRTC " + version_text(nvrtc_status().version);
  ASSERT_TRUE(cache.read(key));
  cache.write(key, "no cubin");
  EXPECT_EQ(load_in_new_context().origin, KernelOrigin::compiled);
  EXPECT_EQ(load_in_new_context().origin, KernelOrigin::disk_cache);

  static const std::string pack = write_pack({{digest, *cache.read(key)}});
  add_pack(pack);
  EXPECT_EQ(load_in_new_context().origin, KernelOrigin::precompiled);
}

TEST_F(ModuleCache, ManyThreadsShareOneCompilation) {
  HEADRACE_NEEDS_NVRTC();
  const int before = module_loads();
  std::vector<const LoadedKernel*> loaded(16);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < loaded.size(); ++i)
    threads.emplace_back([&, i] {
      const ContextScope scope(0);
      loaded[i] = &load_kernel(scale_kernel(20 + static_cast<long long>(i % 2)));
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(module_loads(), before + 2);
  for (std::size_t i = 0; i < loaded.size(); ++i) EXPECT_EQ(loaded[i], loaded[i % 2]);
  EXPECT_NE(loaded[0], loaded[1]);
}

TEST_F(ModuleCache, AFailureIsTriedAgain) {
  HEADRACE_NEEDS_NVRTC();
  const ContextScope scope(0);
  setenv("HEADRACE_FAKE_DRIVER", "refuse", 1);
  EXPECT_THAT(error_of([] { load_kernel(scale_kernel(30)); }), HasSubstr("cuModuleLoadData failed: CUDA error 200"));
  unsetenv("HEADRACE_FAKE_DRIVER");
  EXPECT_EQ(load_kernel(scale_kernel(30)).origin, KernelOrigin::compiled);
}

TEST_F(ModuleCache, TooMuchSharedMemoryIsAnError) {
  HEADRACE_NEEDS_NVRTC();
  static constexpr SourceFile files[] = {{"greedy.cuh", R"(
extern "C" __constant__ unsigned dynamic_shared_bytes = 1 << 20;
extern "C" __global__ void greedy() {}
)"}};
  add_sources(files);
  const ContextScope scope(0);
  EXPECT_THAT(error_of([] {
                load_kernel({"greedy", "greedy.cuh", {}});
              }),
              HasSubstr("kernel greedy needs 1048576 bytes of shared memory for a block; this device has 232448"));
}

TEST_F(ModuleCache, AHitTakesLessThanAMicrosecond) {
  HEADRACE_NEEDS_NVRTC();
  const ContextScope scope(0);
  KernelSource kernel = scale_kernel(40);
  for (int i = 0; i < 12; ++i) kernel.constants.emplace_back("CONSTANT_" + std::to_string(i), i);
  load_kernel(kernel);
  std::vector<double> nanoseconds;
  for (int batch = 0; batch < 50; ++batch) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 1000; ++i) load_kernel(kernel);
    nanoseconds.push_back(std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() /
                          1000);
  }
  const double best = *std::min_element(nanoseconds.begin(), nanoseconds.end());
  RecordProperty("nanoseconds", static_cast<int>(best));
  std::printf("a hit takes %.0f ns\n", best);
#if defined(NDEBUG) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(best, 1000);
#endif
}

using ModuleCacheDeathTest = ModuleCache;

TEST_F(ModuleCacheDeathTest, WithoutNvrtcSaysWhatIsMissing) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT((setenv("HEADRACE_NVRTC", "/nowhere/libnvrtc.so", 1), print_load_error(50)), testing::ExitedWithCode(0),
              "^GPU: this call needs a kernel outside the precompiled set, scale<FACTOR=50, THREADS=128> for sm_90a, "
              "and there is no NVRTC to compile it: HEADRACE_NVRTC=/nowhere/libnvrtc.so cannot be opened: .*Install ");
}

TEST_F(ModuleCacheDeathTest, AnOldDriverSaysWhatItLacks) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        dlopen(HEADRACE_OLD_DRIVER, RTLD_NOW);  // what is loaded already is found by its name
        print_load_error(60);
      },
      testing::ExitedWithCode(0),
      "^GPU: the CUDA driver \\(13.0\\) is too old: it lacks cuTensorMapEncodeTiled; CUDA 12.0 or newer is needed$");
}

}  // namespace
}  // namespace headrace::cuda
