// The kernels of tests/cuda/kernels, and the compiler that the build found.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>

#include "cuda/driver/kernel_source.hpp"
#include "cuda/driver/nvrtc.hpp"

namespace headrace::cuda {

std::span<const SourceFile> test_sources();

namespace test {

// Before any test: the sources are known, NVRTC is the build's unless the environment says otherwise, and the disk
// cache is off until a test turns it on.
inline const bool prepared = [] {
  add_sources(test_sources());
  if (std::filesystem::exists(HEADRACE_TEST_NVRTC)) setenv("HEADRACE_NVRTC", HEADRACE_TEST_NVRTC, 0);
  setenv("HEADRACE_CACHE_DIR", "off", 1);
  return true;
}();

inline KernelSource scale_kernel(long long factor, long long threads = 128) {
  return {"scale", "test/scale.cuh", {{"FACTOR", factor}, {"THREADS", threads}}};
}

// What a test without its tool does: it is skipped, but where HEADRACE_TEST_REQUIRE_NVIDIA is set it fails.
#define HEADRACE_SKIP_WITHOUT(present, what)                                        \
  do {                                                                              \
    if (!(present)) {                                                               \
      if (std::getenv("HEADRACE_TEST_REQUIRE_NVIDIA") != nullptr) FAIL() << (what); \
      GTEST_SKIP() << (what);                                                       \
    }                                                                               \
  } while (false)
#define HEADRACE_NEEDS_NVRTC()                                        \
  HEADRACE_SKIP_WITHOUT(headrace::cuda::nvrtc_status().error.empty(), \
                        "no NVRTC: " + headrace::cuda::nvrtc_status().error)

}  // namespace test
}  // namespace headrace::cuda
