// What the launchers of the CUDA backend refuse, in which words, and how they launch, with fake_driver.cpp in place of
// the driver: no GPU is needed.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "cuda/driver/driver.hpp"
#include "cuda/driver/nvrtc.hpp"
#include "cuda/driver/precompiled.hpp"
#include "cuda/launch/hopper_forward_source.hpp"
#include "headrace/headrace.h"
#include "test_kernels.hpp"

namespace headrace::cuda {
namespace {

using testing::StartsWith;

constexpr std::int64_t two_to_30 = std::int64_t{1} << 30, two_to_39 = std::int64_t{1} << 39;

template <typename Function>
Function* fake(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<Function*>(dlsym(library, name));
}
int launches() { return fake<int()>("fake_launches")(); }
CUlaunchConfig last_launch() { return fake<CUlaunchConfig()>("fake_last_launch")(); }

hr_tensor tensor(hr_dtype dtype, const std::vector<std::int64_t>& shape) {
  return hr_tensor_contiguous(nullptr, dtype, static_cast<int>(shape.size()), shape.data());
}

// A call of batch 2, seqlen 40 x 50, heads 4 on 2, dim 64, without data.
hr_attention valid_call(hr_dtype dtype = HR_BFLOAT16) {
  hr_attention a;
  hr_attention_init(&a);
  a.q = tensor(dtype, {2, 40, 4, 64});
  a.k = a.v = tensor(dtype, {2, 50, 2, 64});
  a.out = a.q;
  a.lse = tensor(HR_FLOAT32, {2, 4, 40});
  a.device = HR_DEVICE_CUDA;
  return a;
}

struct Rule {
  hr_status status;
  const char* message;
  std::function<void(hr_attention&)> break_it;
  hr_pass pass = HR_FORWARD;
};

void check_rules(const std::vector<Rule>& rules) {
  for (const Rule& rule : rules) {
    SCOPED_TRACE(rule.message);
    hr_attention a = valid_call();
    rule.break_it(a);
    hr_plan* plan = nullptr;
    EXPECT_EQ(hr_plan_create(&a, rule.pass, &plan), rule.status);
    EXPECT_EQ(plan, nullptr);
    EXPECT_STREQ(hr_last_error(), rule.message);
    hr_plan_destroy(plan);
  }
}

TEST(Launch, WhatIsNotSupportedIsNamed) {
  static std::int32_t cu_seqlens_q[] = {0, 20, 40}, cu_seqlens_k[] = {0, 20, 50}, used[] = {40, 39}, used_k[] = {3, 50};
  check_rules({
      {HR_ERROR_UNSUPPORTED, "pass: is backward; on CUDA there is only the forward pass so far",
       [](hr_attention& a) { a.dout = a.dq = a.q, a.dk = a.dv = a.k; }, HR_BACKWARD},
      {HR_ERROR_UNSUPPORTED, "q: dtype is float32; on CUDA it must be float16 or bfloat16",
       [](hr_attention& a) { a.q.dtype = a.k.dtype = a.v.dtype = a.out.dtype = HR_FLOAT32; }},
      {HR_ERROR_UNSUPPORTED, "q: dtype is float64; on CUDA it must be float16 or bfloat16",
       [](hr_attention& a) { a.q.dtype = a.k.dtype = a.v.dtype = a.out.dtype = HR_FLOAT64; }},
      {HR_ERROR_UNSUPPORTED, "q: head_dim is 264; on CUDA it must be at most 256",
       [](hr_attention& a) {
         a.q = tensor(HR_BFLOAT16, {2, 40, 4, 264});
         a.k = tensor(HR_BFLOAT16, {2, 50, 2, 264});
       }},
      {HR_ERROR_UNSUPPORTED, "v: value_dim is 264; on CUDA it must be at most 256",
       [](hr_attention& a) {
         a.v = tensor(HR_BFLOAT16, {2, 50, 2, 264});
         a.out = tensor(HR_BFLOAT16, {2, 40, 4, 264});
       }},
      {HR_ERROR_UNSUPPORTED, "cu_seqlens_q: ragged batches are not yet supported on CUDA",
       [](hr_attention& a) {
         a.q = a.out = tensor(HR_BFLOAT16, {40, 4, 64});
         a.k = a.v = tensor(HR_BFLOAT16, {50, 2, 64});
         a.lse = tensor(HR_FLOAT32, {4, 40});
         a.cu_seqlens_q = tensor(HR_INT32, {3}), a.cu_seqlens_k = tensor(HR_INT32, {3});
         a.cu_seqlens_q.data = cu_seqlens_q, a.cu_seqlens_k.data = cu_seqlens_k;
       }},
      {HR_ERROR_UNSUPPORTED, "seqused_q, seqused_k: not yet supported on CUDA",
       [](hr_attention& a) { a.seqused_q = tensor(HR_INT32, {2}), a.seqused_q.data = used; }},
      {HR_ERROR_UNSUPPORTED, "seqused_q, seqused_k: not yet supported on CUDA",
       [](hr_attention& a) { a.seqused_k = tensor(HR_INT32, {2}), a.seqused_k.data = used_k; }},
      {HR_ERROR_UNSUPPORTED,
       "q: batch 1 x heads 1 x seqlen_q 1073741824 (seqlen_k 50) has too many tiles; on CUDA seqlens and the number of "
       "tiles of 192 queries must be below 2^30",
       [](hr_attention& a) {
         a.q = a.out = tensor(HR_BFLOAT16, {1, two_to_30, 1, 64});
         a.k = a.v = tensor(HR_BFLOAT16, {1, 50, 1, 64});
         a.lse.ndim = 0;
       }},
      {HR_ERROR_UNSUPPORTED,
       "q: batch 1 x heads 1 x seqlen_q 40 (seqlen_k 1073741824) has too many tiles; on CUDA seqlens and the number of "
       "tiles of 192 queries must be below 2^30",
       [](hr_attention& a) {
         a.q = a.out = tensor(HR_BFLOAT16, {1, 40, 1, 64});
         a.k = a.v = tensor(HR_BFLOAT16, {1, two_to_30, 1, 64});
         a.lse.ndim = 0;
       }},
      {HR_ERROR_UNSUPPORTED,
       "q: batch 1 x heads 1073741824 x seqlen_q 1 (seqlen_k 1) has too many tiles; on CUDA seqlens and the number of "
       "tiles of 192 queries must be below 2^30",
       [](hr_attention& a) {
         a.q = a.out = a.k = a.v = tensor(HR_BFLOAT16, {1, 1, two_to_30, 64});
         a.lse.ndim = 0;
       }},
      {HR_ERROR_UNSUPPORTED,
       "q: the stride of its seqlen is 260 elements; on CUDA it must be a multiple of 8 elements, not negative and "
       "below "
       "2^39",
       [](hr_attention& a) { a.q.stride[1] = 260; }},
      {HR_ERROR_UNSUPPORTED,
       "k: the stride of its heads is -64 elements; on CUDA it must be a multiple of 8 elements, not negative and "
       "below "
       "2^39",
       [](hr_attention& a) { a.k.stride[2] = -64; }},
      {HR_ERROR_UNSUPPORTED,
       "v: the stride of its batch is 549755813888 elements; on CUDA it must be a multiple of 8 elements, not negative "
       "and below 2^39",
       [](hr_attention& a) { a.v.stride[0] = two_to_39; }},
      {HR_ERROR_VALUE, "device_index: is 2; this machine has 2 CUDA devices",
       [](hr_attention& a) { a.device_index = 2; }},
  });
}

TEST(Launch, OtherGenerationsOfGpusAreNamed) {
  setenv("HEADRACE_FAKE_DRIVER", "ampere", 1);
  check_rules(
      {{HR_ERROR_UNSUPPORTED,
        "device_index: CUDA device 1 has compute capability 8.0; there are kernels for 9.0 (Hopper) only so far",
        [](hr_attention& a) { a.device_index = 1; }}});
  unsetenv("HEADRACE_FAKE_DRIVER");
}

// A valid call with memory that the fake driver knows.
class DeviceCall {
 public:
  explicit DeviceCall(hr_dtype dtype = HR_BFLOAT16) : a(valid_call(dtype)) {
    for (hr_tensor hr_attention::*member :
         {&hr_attention::q, &hr_attention::k, &hr_attention::v, &hr_attention::out, &hr_attention::lse}) {
      CUdeviceptr address = 0;
      check(driver().cuMemAlloc(&address, std::size_t{1} << 16), "cuMemAlloc");
      memory_.push_back(address);
      (a.*member).data = reinterpret_cast<void*>(address);
    }
  }
  ~DeviceCall() {
    for (const CUdeviceptr address : memory_) driver().cuMemFree(address);
  }
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  hr_attention a;

 private:
  std::vector<CUdeviceptr> memory_;
};

// Kernels come from the precompiled set, or else NVRTC must make them.
class LaunchOfKernels : public testing::Test {
 protected:
  void SetUp() override {
    const KernelSource source = hopper_forward_standard_set().front();
    if (find_precompiled(digest_of(source, "sm_90a"))) return;
    HEADRACE_NEEDS_NVRTC();
  }
};

TEST_F(LaunchOfKernels, GoToTheCallersStream) {
  for (const hr_dtype dtype : {HR_BFLOAT16, HR_FLOAT16}) {
    DeviceCall call(dtype);
    int stream = 0;  // any address
    call.a.stream = &stream;
    const int before = launches();
    ASSERT_EQ(hr_forward(&call.a), HR_OK) << hr_last_error();
    ASSERT_EQ(launches(), before + 1);
    const CUlaunchConfig config = last_launch();
    EXPECT_EQ(static_cast<void*>(config.hStream), call.a.stream);
    EXPECT_EQ(config.gridDimX, 8u) << "one tile for each of 2 x 4 heads";
    EXPECT_EQ(config.gridDimY * config.gridDimZ * config.blockDimY * config.blockDimZ, 1u);
    EXPECT_LE(config.sharedMemBytes, 227u << 10);
  }
}

TEST_F(LaunchOfKernels, DoNotHappenWhereThereIsNothingToDo) {
  for (const int empty : {0, 1, 2}) {
    DeviceCall call;
    call.a.q.shape[empty] = call.a.out.shape[empty] = 0;
    if (empty != 1) call.a.k.shape[empty] = call.a.v.shape[empty] = 0;
    call.a.lse.shape[empty == 0 ? 0 : empty == 1 ? 2 : 1] = 0;
    const int before = launches();
    EXPECT_EQ(hr_forward(&call.a), HR_OK) << hr_last_error();
    EXPECT_EQ(launches(), before);
  }
}

TEST_F(LaunchOfKernels, RefuseMemoryOfTheHost) {
  struct Field {
    const char* name;
    hr_tensor hr_attention::*tensor;
  };
  alignas(64) static std::byte host[1 << 16];
  for (const Field& field : {Field{"q", &hr_attention::q}, Field{"k", &hr_attention::k}, Field{"v", &hr_attention::v},
                             Field{"out", &hr_attention::out}, Field{"lse", &hr_attention::lse}}) {
    DeviceCall call;
    (call.a.*field.tensor).data = host;
    const int before = launches();
    EXPECT_EQ(hr_forward(&call.a), HR_ERROR_VALUE);
    EXPECT_THAT(hr_last_error(), StartsWith(std::string(field.name) + ": is at 0x"));
    EXPECT_THAT(hr_last_error(), testing::EndsWith(", which is not memory of CUDA device 0"));
    EXPECT_EQ(launches(), before);
  }
}

TEST_F(LaunchOfKernels, RefuseRowsThatAreNotAligned) {
  struct Field {
    const char* name;
    hr_tensor hr_attention::*tensor;
  };
  for (const Field& field :
       {Field{"q", &hr_attention::q}, Field{"k", &hr_attention::k}, Field{"v", &hr_attention::v}}) {
    DeviceCall call;
    hr_tensor& t = call.a.*field.tensor;
    t.data = static_cast<std::byte*>(t.data) + 8;
    const int before = launches();
    EXPECT_EQ(hr_forward(&call.a), HR_ERROR_UNSUPPORTED);
    EXPECT_THAT(hr_last_error(), StartsWith(std::string(field.name) + ": is at 0x"));
    EXPECT_THAT(hr_last_error(), testing::EndsWith("; on CUDA it must be aligned to 16 bytes"));
    EXPECT_EQ(launches(), before);
  }
}

// A plan belongs to its device.
TEST_F(LaunchOfKernels, ExecuteOnThePlannedDeviceOnly) {
  DeviceCall call;
  hr_plan* plan = nullptr;
  ASSERT_EQ(hr_plan_create(&call.a, HR_FORWARD, &plan), HR_OK) << hr_last_error();
  EXPECT_EQ(hr_plan_workspace_bytes(plan), 0u);
  call.a.device_index = 1;
  EXPECT_EQ(hr_plan_execute(plan, &call.a, nullptr, 0), HR_ERROR_VALUE);
  EXPECT_STREQ(hr_last_error(), "device_index: is 1, but the plan was made for 0; make a new plan");
  call.a.device_index = 0;
  EXPECT_EQ(hr_plan_execute(plan, &call.a, nullptr, 0), HR_OK) << hr_last_error();
  hr_plan_destroy(plan);
}

}  // namespace
}  // namespace headrace::cuda
