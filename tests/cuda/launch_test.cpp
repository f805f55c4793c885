// What the launchers of the CUDA backend refuse, in which words, and how they launch, with fake_driver.cpp in place of
// the driver: no GPU is needed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/driver/driver.hpp"
#include "cuda/driver/nvrtc.hpp"
#include "cuda/driver/precompiled.hpp"
#include "cuda/launch/hopper_forward_source.hpp"
#include "fake_driver.hpp"
#include "headrace/headrace.h"
#include "test_kernels.hpp"

namespace headrace::cuda {
namespace {

using fake::launches;
using testing::Contains;
using testing::ElementsAre;
using testing::EndsWith;
using testing::StartsWith;

constexpr std::int64_t two_to_30 = std::int64_t{1} << 30;

hr_tensor tensor(hr_dtype dtype, const std::vector<std::int64_t>& shape) {
  return hr_tensor_contiguous(nullptr, dtype, static_cast<int>(shape.size()), shape.data());
}

hr_tensor with_shape(const hr_tensor& t, const std::vector<std::int64_t>& shape) {
  hr_tensor other = tensor(static_cast<hr_dtype>(t.dtype), shape);
  other.data = t.data;
  return other;
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
      {HR_ERROR_UNSUPPORTED,
       "k: batch 1 x heads 128 x seqlen_k 536870912 has too many tiles for the backward pass on CUDA; the number of "
       "tiles "
       "of 64 must be below 2^30",
       [](hr_attention& a) {
         a.q = a.out = a.dout = a.dq = tensor(HR_BFLOAT16, {1, 40, 128, 64});
         a.k = a.v = a.dk = a.dv = tensor(HR_BFLOAT16, {1, two_to_30 / 2, 128, 64});
         a.lse = tensor(HR_FLOAT32, {1, 128, 40});
       },
       HR_BACKWARD},
      {HR_ERROR_UNSUPPORTED, "q: dtype is float64; on CUDA it must be float32, float16 or bfloat16",
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
       "tiles of 64 queries must be below 2^30",
       [](hr_attention& a) {
         a.q = a.out = tensor(HR_BFLOAT16, {1, two_to_30, 1, 64});
         a.k = a.v = tensor(HR_BFLOAT16, {1, 50, 1, 64});
         a.lse.ndim = 0;
       }},
      {HR_ERROR_UNSUPPORTED,
       "q: batch 1 x heads 1 x seqlen_q 40 (seqlen_k 1073741824) has too many tiles; on CUDA seqlens and the number of "
       "tiles of 64 queries must be below 2^30",
       [](hr_attention& a) {
         a.q = a.out = tensor(HR_BFLOAT16, {1, 40, 1, 64});
         a.k = a.v = tensor(HR_BFLOAT16, {1, two_to_30, 1, 64});
         a.lse.ndim = 0;
       }},
      {HR_ERROR_UNSUPPORTED,
       "q: batch 1 x heads 1073741824 x seqlen_q 1 (seqlen_k 1) has too many tiles; on CUDA seqlens and the number of "
       "tiles of 64 queries must be below 2^30",
       [](hr_attention& a) {
         a.q = a.out = a.k = a.v = tensor(HR_BFLOAT16, {1, 1, two_to_30, 64});
         a.lse.ndim = 0;
       }},
      {HR_ERROR_UNSUPPORTED,
       "v: the stride of its heads is 7 elements, not a multiple of 8 from 0 to 2^39, and a copy of [4, 536870912, 16, "
       "64] "
       "is too large for CUDA",
       [](hr_attention& a) {
         a.q = a.out = tensor(HR_BFLOAT16, {4, 1, 16, 64});
         a.k = a.v = tensor(HR_BFLOAT16, {4, two_to_30 / 2, 16, 64});
         a.lse.ndim = 0;
         a.k.stride[0] = a.k.stride[1] = a.v.stride[0] = a.v.stride[1] = 0;
         a.v.stride[2] = 7;
       }},
      {HR_ERROR_UNSUPPORTED, "k: float16 parts of [4, 536870912, 16, 64] are too large for CUDA",
       [](hr_attention& a) {
         a.q = a.out = tensor(HR_FLOAT32, {4, 1, 16, 64});
         a.k = a.v = tensor(HR_FLOAT32, {4, two_to_30 / 2, 16, 64});
         a.lse.ndim = 0;
       }},
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

class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) { check(driver().cuMemAlloc(&address_, bytes), "cuMemAlloc"); }
  ~DeviceMemory() { driver().cuMemFree(address_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  [[nodiscard]] void* data() const { return reinterpret_cast<void*>(address_); }

 private:
  CUdeviceptr address_ = 0;
};

// A valid call with memory that the fake driver knows.
class DeviceCall {
 public:
  explicit DeviceCall(hr_dtype dtype = HR_BFLOAT16) : a(valid_call(dtype)) {
    a.dout = a.dq = a.out;
    a.dk = a.dv = a.k;
    for (hr_tensor hr_attention::*member :
         {&hr_attention::q, &hr_attention::k, &hr_attention::v, &hr_attention::out, &hr_attention::lse,
          &hr_attention::dout, &hr_attention::dq, &hr_attention::dk, &hr_attention::dv})
      (a.*member).data = memory_.emplace_back(std::size_t{1} << 16).data();
  }
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  hr_attention a;

 private:
  std::deque<DeviceMemory> memory_;
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
    const CUlaunchConfig config = fake::launch().config;
    EXPECT_EQ(static_cast<void*>(config.hStream), call.a.stream);
    EXPECT_EQ(config.gridDimX, 8u) << "one tile for each of 2 x 4 heads";
    EXPECT_EQ(config.gridDimY * config.gridDimZ * config.blockDimY * config.blockDimZ, 1u);
    EXPECT_LE(config.sharedMemBytes, 227u << 10);
  }
}

// float32 is split into parts, in the workspace, and then multiplied.
TEST_F(LaunchOfKernels, SplitFloat32First) {
  for (const std::int64_t seqlen_k : {50, 0}) {
    DeviceCall call(HR_FLOAT32);
    call.a.k.shape[1] = call.a.v.shape[1] = seqlen_k;
    DeviceMemory out(std::size_t{1} << 17);
    call.a.out.data = out.data();
    int stream = 0;
    call.a.stream = &stream;
    hr_plan* plan = nullptr;
    ASSERT_EQ(hr_plan_create(&call.a, HR_FORWARD, &plan), HR_OK) << hr_last_error();
    const std::size_t bytes = hr_plan_workspace_bytes(plan);
    // Two parts of 2 bytes an element, and a unit for each 64 rows of q and 128 of k and v of a head.
    EXPECT_GE(bytes, 2u * 2u * 64u * static_cast<unsigned>(2 * 40 * 4 + 2 * 2 * 2 * seqlen_k));
    EXPECT_LE(bytes, 2u * 2u * 64u * static_cast<unsigned>(2 * 40 * 4 + 2 * 2 * 2 * seqlen_k) + 2048u);
    DeviceMemory workspace(bytes);
    const int before = launches();
    ASSERT_EQ(hr_plan_execute(plan, &call.a, workspace.data(), bytes), HR_OK) << hr_last_error();
    ASSERT_EQ(launches(), before + 2);
    EXPECT_EQ(fake::launch(1).kernel, "split_rows");
    EXPECT_EQ(fake::launch(1).config.gridDimX, seqlen_k == 0 ? 8u : 16u);
    const FakeLaunch multiply = fake::launch(0);
    EXPECT_EQ(multiply.kernel, "hopper_split_forward");
    EXPECT_EQ(static_cast<void*>(multiply.config.hStream), call.a.stream);
    EXPECT_EQ(multiply.config.gridDimX, 8u) << "one tile for each of 2 x 4 heads";
    hr_plan_destroy(plan);
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
    EXPECT_THAT(hr_last_error(), EndsWith(", which is not memory of CUDA device 0"));
    EXPECT_EQ(launches(), before);
  }
}

// q, k or v that TMA cannot walk is copied to the workspace first, and it alone.
TEST_F(LaunchOfKernels, CopyWhatTmaCannotWalk) {
  struct Case {
    const char* name;
    std::size_t map;
    std::int64_t rows, heads;
    std::function<void(hr_attention&)> change;
    const char* note;
  };
  constexpr std::size_t of_q = 2 * 40 * 4 * 64 * 2, of_k = 2 * 50 * 2 * 64 * 2;
  for (const Case& c :
       {Case{"q", 0, 40, 4, [](hr_attention& a) { a.q.stride[1] = 260; },
             "q is copied to the workspace first: the stride of its seqlen is 260 elements, not a multiple of 8 from 0 "
             "to 2^39"},
        Case{"k", 1, 50, 2, [](hr_attention& a) { a.k.stride[2] = -64; },
             "k is copied to the workspace first: the stride of its heads is -64 elements, not a multiple of 8 from 0 "
             "to "
             "2^39"},
        Case{
            "v", 2, 50, 2, [](hr_attention& a) { a.v.stride[0] = std::int64_t{1} << 39; },
            "v is copied to the workspace first: the stride of its batch is 549755813888 elements, not a multiple of 8 "
            "from 0 to 2^39"},
        Case{"k", 1, 50, 2, [](hr_attention& a) { a.k.data = static_cast<std::byte*>(a.k.data) + 2; },
             "k is copied to the workspace first: its data is not aligned to 16 bytes"}}) {
    SCOPED_TRACE(c.note);
    DeviceCall call;
    c.change(call.a);
    const hr_tensor& t = c.name[0] == 'q' ? call.a.q : c.name[0] == 'k' ? call.a.k : call.a.v;
    int stream = 0;
    call.a.stream = &stream;
    hr_plan* plan = nullptr;
    ASSERT_EQ(hr_plan_create(&call.a, HR_FORWARD, &plan), HR_OK) << hr_last_error();
    EXPECT_THAT(hr_plan_explain(plan), testing::HasSubstr(c.note));
    const std::size_t bytes = hr_plan_workspace_bytes(plan);
    EXPECT_EQ(bytes, c.name[0] == 'q' ? of_q : of_k);
    DeviceMemory workspace(bytes);
    const int before = launches();
    ASSERT_EQ(hr_plan_execute(plan, &call.a, workspace.data(), bytes), HR_OK) << hr_last_error();
    ASSERT_EQ(launches(), before + 2);
    EXPECT_EQ(fake::launch(0).kernel, "hopper_forward");
    const FakeLaunch copy = fake::launch(1);
    EXPECT_EQ(copy.kernel, "pack_rows");
    EXPECT_EQ(static_cast<void*>(copy.config.hStream), call.a.stream);
    const PackRowsParams& p = copy.packed;
    EXPECT_EQ(p.from, t.data);
    EXPECT_EQ(p.to, workspace.data());
    EXPECT_EQ(p.batch_stride, t.stride[0]);
    EXPECT_EQ(p.row_stride, t.stride[1]);
    EXPECT_EQ(p.head_stride, t.stride[2]);
    EXPECT_EQ(p.rows, c.rows);
    EXPECT_EQ(p.heads, c.heads);
    EXPECT_EQ(p.all, 2 * c.rows * c.heads);
    EXPECT_EQ(p.size, 64);
    EXPECT_EQ(p.pitch, 64);
    EXPECT_GE(copy.config.gridDimX * (copy.config.blockDimX / 32) * p.rows_of_warp, p.all) << "rows are left out";
    EXPECT_EQ(fake::launch(0).maps.at(c.map), reinterpret_cast<CUdeviceptr>(workspace.data()));
    hr_plan_destroy(plan);
  }
}

// Each copy has its place, rows that are not multiples of 16 bytes have gaps, and a call without a plan takes the
// memory from the stream's pool.
TEST_F(LaunchOfKernels, CopyAllThree) {
  DeviceCall call;
  call.a.q = with_shape(call.a.q, {2, 40, 4, 35});
  call.a.k = with_shape(call.a.k, {2, 50, 2, 35});
  call.a.v = with_shape(call.a.v, {2, 50, 2, 3});
  call.a.out = with_shape(call.a.out, {2, 40, 4, 3});
  const int before = launches(), allocations = fake::allocations();
  ASSERT_EQ(hr_forward(&call.a), HR_OK) << hr_last_error();
  EXPECT_EQ(fake::allocations(), allocations);
  ASSERT_EQ(launches(), before + 4);
  const PackRowsParams q = fake::launch(3).packed, k = fake::launch(2).packed, v = fake::launch(1).packed;
  EXPECT_EQ(q.from, call.a.q.data);
  EXPECT_EQ(k.from, call.a.k.data);
  EXPECT_EQ(v.from, call.a.v.data);
  EXPECT_EQ(q.pitch, 40);
  EXPECT_EQ(v.size, 3);
  EXPECT_EQ(v.pitch, 8);
  EXPECT_EQ(static_cast<const std::byte*>(k.to) - static_cast<const std::byte*>(q.to), 2 * 40 * 4 * 40 * 2);
  EXPECT_EQ(static_cast<const std::byte*>(v.to) - static_cast<const std::byte*>(k.to), 2 * 50 * 2 * 40 * 2);
}

// What is never read needs no copy.
TEST_F(LaunchOfKernels, CopyNothingThatIsEmpty) {
  DeviceCall call;
  call.a.k.shape[1] = call.a.v.shape[1] = 0;
  call.a.k.stride[2] = call.a.v.stride[2] = 63;
  const int before = launches();
  ASSERT_EQ(hr_forward(&call.a), HR_OK) << hr_last_error();
  EXPECT_EQ(launches(), before + 1);
  call.a.q.shape[1] = call.a.out.shape[1] = call.a.lse.shape[2] = 0;
  call.a.q.stride[2] = 63;
  ASSERT_EQ(hr_forward(&call.a), HR_OK) << hr_last_error();
  EXPECT_EQ(launches(), before + 1);
}

// A plan for aligned data, or for data that is not known yet, takes aligned data only; one for other data takes any.
TEST_F(LaunchOfKernels, ExecuteOnDataAsAlignedAsPlanned) {
  for (const auto& [name, member] :
       {std::pair{"q", &hr_attention::q}, std::pair{"k", &hr_attention::k}, std::pair{"v", &hr_attention::v}}) {
    SCOPED_TRACE(name);
    DeviceCall call;
    hr_attention unaligned = call.a, unknown = call.a;
    (unaligned.*member).data = static_cast<std::byte*>((call.a.*member).data) + 8;
    (unknown.*member).data = nullptr;
    for (const hr_attention* planned : {&call.a, &unknown}) {
      hr_plan* plan = nullptr;
      ASSERT_EQ(hr_plan_create(planned, HR_FORWARD, &plan), HR_OK) << hr_last_error();
      EXPECT_EQ(hr_plan_workspace_bytes(plan), 0u);
      const int before = launches();
      EXPECT_EQ(hr_plan_execute(plan, &unaligned, nullptr, 0), HR_ERROR_VALUE);
      EXPECT_THAT(hr_last_error(), StartsWith(std::string(name) + ": is at 0x"));
      EXPECT_THAT(hr_last_error(), EndsWith(", but the plan was made for data aligned to 16 bytes; make a new plan"));
      EXPECT_EQ(launches(), before);
      hr_plan_destroy(plan);
    }
    hr_plan* plan = nullptr;
    ASSERT_EQ(hr_plan_create(&unaligned, HR_FORWARD, &plan), HR_OK) << hr_last_error();
    const std::size_t bytes = hr_plan_workspace_bytes(plan);
    DeviceMemory workspace(bytes);
    const int before = launches();
    for (const hr_attention* executed : {&unaligned, &call.a})
      EXPECT_EQ(hr_plan_execute(plan, executed, workspace.data(), bytes), HR_OK) << hr_last_error();
    EXPECT_EQ(launches(), before + 4);
    alignas(64) static std::byte host[1 << 15];
    EXPECT_EQ(hr_plan_execute(plan, &unaligned, host, bytes), HR_ERROR_VALUE);
    EXPECT_THAT(hr_last_error(), StartsWith("workspace: is at 0x"));
    EXPECT_THAT(hr_last_error(), EndsWith(", which is not memory of CUDA device 0"));
    hr_plan_destroy(plan);
  }
}

// A bias that TMA loads where its data is aligned, and its gradient; else they are read and written one by one,
// wherever they are.
TEST_F(LaunchOfKernels, LoadABiasThatIsAlignedAsPlanned) {
  HEADRACE_NEEDS_NVRTC();
  DeviceCall call;
  DeviceMemory bias(2 * 2 * 4 * 40 * 56), dbias(2 * 2 * 4 * 40 * 56);
  call.a.k.shape[1] = call.a.v.shape[1] = call.a.dk.shape[1] = call.a.dv.shape[1] = 48;
  call.a.bias = call.a.dbias = tensor(HR_BFLOAT16, {2, 4, 40, 48});
  call.a.bias.data = bias.data();
  call.a.dbias.data = dbias.data();
  for (const auto& [name, member, pass] :
       {std::tuple{"bias", &hr_attention::bias, HR_FORWARD}, std::tuple{"dbias", &hr_attention::dbias, HR_BACKWARD}}) {
    SCOPED_TRACE(name);
    hr_attention unaligned = call.a;
    (unaligned.*member).data = static_cast<std::byte*>((call.a.*member).data) + 8;
    const auto execute = [pass = pass](const hr_attention& planned, const hr_attention& executed) {
      hr_plan* plan = nullptr;
      EXPECT_EQ(hr_plan_create(&planned, pass, &plan), HR_OK) << hr_last_error();
      const std::size_t bytes = hr_plan_workspace_bytes(plan);
      DeviceMemory workspace(bytes + 1);
      const hr_status status = hr_plan_execute(plan, &executed, workspace.data(), bytes);
      hr_plan_destroy(plan);
      return status;
    };
    EXPECT_EQ(execute(call.a, call.a), HR_OK) << hr_last_error();
    EXPECT_EQ(execute(unaligned, unaligned), HR_OK) << hr_last_error();
    EXPECT_EQ(execute(unaligned, call.a), HR_OK) << hr_last_error();
    EXPECT_EQ(execute(call.a, unaligned), HR_ERROR_VALUE);
    EXPECT_THAT(hr_last_error(), StartsWith(std::string(name) + ": is at 0x"));
  }
}

// The driver calls of a planned execution, whose every microsecond counts.
class DriverCalls : public LaunchOfKernels {
 protected:
  ~DriverCalls() override {
    hr_plan_destroy(plan_);
    CUcontext popped = nullptr;
    driver().cuCtxPopCurrent(&popped);
  }
  // Plans the call in a context that stays current.
  void plan(hr_pass pass) {
    check(driver().cuCtxPushCurrent(fake::new_context(0)), "cuCtxPushCurrent");
    ASSERT_EQ(hr_plan_create(&call_.a, pass, &plan_), HR_OK) << hr_last_error();
    workspace_.emplace(hr_plan_workspace_bytes(plan_) + 1);
  }
  std::vector<std::string> calls_of_execution() {
    fake::take_calls();
    EXPECT_EQ(hr_plan_execute(plan_, &call_.a, workspace_->data(), hr_plan_workspace_bytes(plan_)), HR_OK)
        << hr_last_error();
    return fake::take_calls();
  }

  DeviceCall call_;
  hr_plan* plan_ = nullptr;
  std::optional<DeviceMemory> workspace_;
};

TEST_F(DriverCalls, OfForwardAreThree) {
  plan(HR_FORWARD);
  EXPECT_THAT(calls_of_execution(), Contains("cuTensorMapEncodeTiled").Times(4));
  for (int time = 0; time < 2; ++time)
    EXPECT_THAT(calls_of_execution(), ElementsAre("cuCtxGetCurrent", "cuCtxGetId", "cuLaunchKernelEx"));
}

TEST_F(DriverCalls, OfBackwardAreFive) {
  plan(HR_BACKWARD);
  EXPECT_THAT(calls_of_execution(), Contains("cuTensorMapEncodeTiled").Times(6));
  for (int time = 0; time < 2; ++time)
    EXPECT_THAT(calls_of_execution(), ElementsAre("cuCtxGetCurrent", "cuCtxGetId", "cuLaunchKernelEx",
                                                  "cuLaunchKernelEx", "cuLaunchKernelEx"));
  EXPECT_EQ(fake::launch(1).kernel, "hopper_backward");
}

// Only what has moved is looked at again, and its map gets the new address.
TEST_F(DriverCalls, OfOtherMemoryAreTwoMoreForEachBuffer) {
  plan(HR_FORWARD);
  calls_of_execution();
  const DeviceMemory k(std::size_t{1} << 16), lse(std::size_t{1} << 16);
  const void* const first = std::exchange(call_.a.k.data, k.data());
  call_.a.lse.data = lse.data();
  const auto addresses = [&] {
    std::vector<CUdeviceptr> all;
    for (const hr_tensor* t : {&call_.a.q, &call_.a.k, &call_.a.v, &call_.a.out})
      all.push_back(reinterpret_cast<CUdeviceptr>(t->data));
    return all;
  };
  EXPECT_THAT(calls_of_execution(),
              ElementsAre("cuCtxGetCurrent", "cuCtxGetId", "cuPointerGetAttribute", "cuPointerGetAttribute",
                          "cuTensorMapReplaceAddress", "cuLaunchKernelEx"));
  EXPECT_EQ(fake::launch().maps, addresses());
  call_.a.k.data = const_cast<void*>(first);
  EXPECT_THAT(calls_of_execution(),
              ElementsAre("cuCtxGetCurrent", "cuCtxGetId", "cuPointerGetAttribute", "cuLaunchKernelEx"));
  EXPECT_EQ(fake::launch().maps, addresses());
}

// A kernel belongs to a context: in another one the plan loads it anew, and finds it there from then on.
TEST_F(DriverCalls, OfAnotherContextLaunchItsKernel) {
  plan(HR_FORWARD);
  calls_of_execution();
  const CUfunction first = fake::launch().function;
  check(driver().cuCtxPushCurrent(fake::new_context(0)), "cuCtxPushCurrent");
  calls_of_execution();
  const CUfunction second = fake::launch().function;
  EXPECT_NE(second, first);
  EXPECT_THAT(calls_of_execution(), ElementsAre("cuCtxGetCurrent", "cuCtxGetId", "cuLaunchKernelEx"));
  EXPECT_EQ(fake::launch().function, second);
  CUcontext popped = nullptr;
  check(driver().cuCtxPopCurrent(&popped), "cuCtxPopCurrent");
  calls_of_execution();
  EXPECT_EQ(fake::launch().function, first);
}

// One plan in many threads, each on memory of its own: every launch has its own addresses.
TEST_F(LaunchOfKernels, ShareAPlanAmongThreads) {
  constexpr int threads = 4, times = 200;
  DeviceCall planned;
  planned.a.lse.ndim = 0;
  hr_plan* plan = nullptr;
  ASSERT_EQ(hr_plan_create(&planned.a, HR_FORWARD, &plan), HR_OK) << hr_last_error();
  const int before = launches();
  std::deque<DeviceCall> calls;
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t) {
    DeviceCall& call = calls.emplace_back();
    call.a.lse.ndim = 0;
    workers.emplace_back([&call, plan] {
      call.a.stream = &call;  // tells the launches of this thread
      for (int n = 0; n < times; ++n) EXPECT_EQ(hr_plan_execute(plan, &call.a, nullptr, 0), HR_OK) << hr_last_error();
    });
  }
  for (std::thread& worker : workers) worker.join();
  ASSERT_EQ(launches(), before + threads * times);
  for (int n = 0; n < threads * times; ++n) {
    const FakeLaunch launch = fake::launch(n);
    const hr_attention& a = reinterpret_cast<const DeviceCall*>(launch.config.hStream)->a;
    std::vector<CUdeviceptr> own;
    for (const hr_tensor* t : {&a.q, &a.k, &a.v, &a.out}) own.push_back(reinterpret_cast<CUdeviceptr>(t->data));
    ASSERT_EQ(launch.maps, own);
  }
  hr_plan_destroy(plan);
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
