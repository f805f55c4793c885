// Every rule of headrace.h by name: what breaks it, the status and the whole message, and that a call that fails
// writes nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "describe/problem.hpp"
#include "describe/tensor_view.hpp"
#include "headrace/headrace.h"

// A test asks for more memory than there is; sanitizers shall answer as malloc does.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" const char* __tsan_default_options();
extern "C" const char* __tsan_default_options() { return "allocator_may_return_null=1"; }

namespace headrace {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
constexpr std::int64_t int64_min = std::numeric_limits<std::int64_t>::min(),
                       int64_max = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t two_to_40 = std::int64_t{1} << 40;

// A valid call with every tensor present, each in its own slot of one block of poisoned memory. The tests break it.
class ValidCall {
 public:
  enum class Kind { dense, ragged };

  explicit ValidCall(Kind kind) {
    hr_attention_init(&a);
    a.backend = HR_BACKEND_REFERENCE;
    const bool ragged = kind == Kind::ragged;
    // Dense: batch 2, seqlen 3 x 5. Ragged: sequences of 3 x 5 and 1 x 2, and a token behind the last.
    const auto rows = [&](std::int64_t length, std::int64_t total, std::int64_t heads, std::int64_t dim) {
      return ragged ? tensor(HR_FLOAT32, {total, heads, dim}) : tensor(HR_FLOAT32, {2, length, heads, dim});
    };
    a.q = rows(3, 5, 4, 8);
    a.k = rows(5, 8, 2, 8);
    a.v = rows(5, 8, 2, 6);
    a.out = rows(3, 5, 4, 6);
    a.lse = ragged ? tensor(HR_FLOAT32, {4, 5}) : tensor(HR_FLOAT32, {2, 4, 3});
    a.bias = tensor(HR_FLOAT32, {2, 4, 3, 5});
    a.mask = tensor(HR_BOOL, {1, 4, 1, 5});
    a.alibi_slopes = tensor(HR_FLOAT32, {4});
    a.sinks = tensor(HR_FLOAT32, {4});
    a.block_mask = tensor(HR_BOOL, {1, 1, 2, 3});
    a.block_q = a.block_k = 2;
    if (ragged) {
      a.cu_seqlens_q = metadata({0, 3, 4});
      a.cu_seqlens_k = metadata({0, 5, 7});
    }
    a.seqused_q = ragged ? metadata({3, 1}) : metadata({3, 2});
    a.seqused_k = ragged ? metadata({4, 2}) : metadata({5, 4});
    a.dout = rows(3, 5, 4, 6);
    a.dlse = ragged ? tensor(HR_FLOAT32, {4, 5}) : tensor(HR_FLOAT32, {2, 4, 3});
    a.dq = rows(3, 5, 4, 8);
    a.dk = rows(5, 8, 2, 8);
    a.dv = rows(5, 8, 2, 6);
    a.dbias = tensor(HR_FLOAT32, {2, 4, 3, 5});
    a.dsinks = tensor(HR_FLOAT32, {4});
    a.softcap = 10;
    a.dropout_p = 0.5;
    remember();
  }

  hr_tensor tensor(hr_dtype dtype, const std::vector<std::int64_t>& shape) {
    void* data = memory_.get() + used_;
    const hr_tensor t = hr_tensor_contiguous(data, dtype, static_cast<int>(shape.size()), shape.data());
    std::int64_t size = dtype_size(dtype);
    for (const std::int64_t n : shape) size *= n;
    // Inputs are small finite numbers or true; everything is poison to a call that must not write.
    if (dtype == HR_FLOAT32) {
      for (std::int64_t i = 0; i < size / 4; ++i)
        static_cast<float*>(data)[i] = 0.25f * static_cast<float>(i % 7) - 0.5f;
    } else {
      std::memset(data, 1, static_cast<std::size_t>(size));
    }
    used_ += static_cast<std::size_t>(size + 63) / 64 * 64;
    return t;
  }

  hr_tensor metadata(const std::vector<std::int32_t>& values) {
    const hr_tensor t = tensor(HR_INT32, {static_cast<std::int64_t>(values.size())});
    std::memcpy(t.data, values.data(), values.size() * sizeof(std::int32_t));
    return t;
  }

  // Metadata of a test, made after the call.
  void replace(hr_tensor& t, const std::vector<std::int32_t>& values) {
    t = metadata(values);
    remember();
  }

  void remember() { remembered_.assign(memory_.get(), memory_.get() + bytes); }

  [[nodiscard]] bool nothing_written() const { return std::memcmp(memory_.get(), remembered_.data(), bytes) == 0; }

  hr_attention a;

 private:
  static constexpr std::size_t bytes = 1 << 15;
  struct alignas(64) Line {
    std::byte data[64];
  };
  std::unique_ptr<Line[]> lines_ = std::make_unique<Line[]>(bytes / 64);
  struct Start {
    Line* lines;
    [[nodiscard]] std::byte* get() const { return lines->data; }
  };
  Start memory_{lines_.get()};
  std::size_t used_ = 0;
  std::vector<std::byte> remembered_;
};

using Kind = ValidCall::Kind;
enum class Passes { both, forward, backward };

struct Rule {
  hr_status status;
  const char* message;
  std::function<void(ValidCall&)> break_it;
  Passes passes = Passes::both;
};

void check_rules(Kind kind, const std::vector<Rule>& rules) {
  for (const Rule& rule : rules) {
    for (const hr_pass pass : {HR_FORWARD, HR_BACKWARD}) {
      if (rule.passes != Passes::both && (rule.passes == Passes::forward) != (pass == HR_FORWARD)) continue;
      SCOPED_TRACE(std::string(pass == HR_FORWARD ? "forward: " : "backward: ") + rule.message);
      ValidCall call(kind);
      rule.break_it(call);
      hr_plan* plan = reinterpret_cast<hr_plan*>(&call);
      EXPECT_EQ(hr_plan_create(&call.a, pass, &plan), rule.status);
      EXPECT_STREQ(hr_last_error(), rule.message);
      EXPECT_EQ(plan, nullptr);
      EXPECT_EQ(pass == HR_FORWARD ? hr_forward(&call.a) : hr_backward(&call.a), rule.status);
      EXPECT_STREQ(hr_last_error(), rule.message);
      EXPECT_TRUE(call.nothing_written());
    }
  }
}

// The rules mean something only if the call is valid before it is broken.
TEST(Validation, TheCallThatTheRulesBreakIsValid) {
  for (const Kind kind : {Kind::dense, Kind::ragged}) {
    ValidCall call(kind);
    EXPECT_EQ(hr_forward(&call.a), HR_OK) << hr_last_error();
    EXPECT_FALSE(call.nothing_written());
    EXPECT_EQ(hr_backward(&call.a), HR_OK) << hr_last_error();
  }
}

TEST(Validation, Options) {
  check_rules(
      Kind::dense,
      {
          {HR_ERROR_VALUE, "causal: is -1; it must be 0 (none), 1 (bottom-right) or 2 (top-left)",
           [](ValidCall& c) { c.a.causal = -1; }},
          {HR_ERROR_VALUE, "causal: is 3; it must be 0 (none), 1 (bottom-right) or 2 (top-left)",
           [](ValidCall& c) { c.a.causal = 3; }},
          {HR_ERROR_VALUE, "backend: is -1; it must be 0 (auto), 1 (cpu), 2 (reference) or 3 (cuda)",
           [](ValidCall& c) { c.a.backend = -1; }},
          {HR_ERROR_VALUE, "backend: is 4; it must be 0 (auto), 1 (cpu), 2 (reference) or 3 (cuda)",
           [](ValidCall& c) { c.a.backend = 4; }},
          {HR_ERROR_VALUE, "device: is -1; it must be 0 (cpu) or 1 (cuda)", [](ValidCall& c) { c.a.device = -1; }},
          {HR_ERROR_VALUE, "device: is 2; it must be 0 (cpu) or 1 (cuda)", [](ValidCall& c) { c.a.device = 2; }},
          {HR_ERROR_VALUE, "backend: is 3 (cuda), but the tensors are on device 0 (cpu)",
           [](ValidCall& c) { c.a.backend = HR_BACKEND_CUDA; }},
          {HR_ERROR_VALUE, "backend: is 2 (cpu or reference), but the tensors are on device 1 (cuda)",
           [](ValidCall& c) { c.a.device = HR_DEVICE_CUDA; }},
          {HR_ERROR_VALUE, "device_index: is -1; it must not be negative", [](ValidCall& c) { c.a.device_index = -1; }},
          {HR_ERROR_VALUE, "scale: is inf; it must be finite",
           [](ValidCall& c) { c.a.has_scale = 1, c.a.scale = inf; }},
          {HR_ERROR_VALUE, "scale: is nan; it must be finite",
           [](ValidCall& c) { c.a.has_scale = 1, c.a.scale = nan; }},
          {HR_ERROR_VALUE, "softcap: is -1; it must be finite, and 0 (none) or above",
           [](ValidCall& c) { c.a.softcap = -1; }},
          {HR_ERROR_VALUE, "softcap: is inf; it must be finite, and 0 (none) or above",
           [](ValidCall& c) { c.a.softcap = inf; }},
          {HR_ERROR_VALUE, "softcap: is nan; it must be finite, and 0 (none) or above",
           [](ValidCall& c) { c.a.softcap = nan; }},
          {HR_ERROR_VALUE, "dropout_p: is -0.25; it must be at least 0 and below 1",
           [](ValidCall& c) { c.a.dropout_p = -0.25; }},
          {HR_ERROR_VALUE, "dropout_p: is 1; it must be at least 0 and below 1",
           [](ValidCall& c) { c.a.dropout_p = 1; }},
          {HR_ERROR_VALUE, "dropout_p: is nan; it must be at least 0 and below 1",
           [](ValidCall& c) { c.a.dropout_p = nan; }},
          {HR_ERROR_VALUE, "threads: is -1; it must be 0 (all) to 1024", [](ValidCall& c) { c.a.threads = -1; }},
          {HR_ERROR_VALUE, "threads: is 1025; it must be 0 (all) to 1024", [](ValidCall& c) { c.a.threads = 1025; }},
      });
}

TEST(Validation, StructSizeAndNullArguments) {
  ValidCall call(Kind::dense);
  call.a.struct_size = 8;
  EXPECT_EQ(hr_forward(&call.a), HR_ERROR_VALUE);
  EXPECT_EQ(hr_last_error(),
            "struct_size: is 8; it must be " + std::to_string(sizeof(hr_attention)) + ": start from hr_attention_init");
  hr_plan* plan = nullptr;
  EXPECT_EQ(hr_plan_create(nullptr, HR_FORWARD, &plan), HR_ERROR_VALUE);
  EXPECT_STREQ(hr_last_error(), "attention: is NULL");
  EXPECT_EQ(hr_forward(nullptr), HR_ERROR_VALUE);
  EXPECT_STREQ(hr_last_error(), "attention: is NULL");
  EXPECT_EQ(hr_backward(nullptr), HR_ERROR_VALUE);
  EXPECT_EQ(hr_plan_create(&call.a, HR_FORWARD, nullptr), HR_ERROR_VALUE);
  EXPECT_STREQ(hr_last_error(), "plan: is NULL");
  EXPECT_EQ(hr_plan_execute(nullptr, &call.a, nullptr, 0), HR_ERROR_VALUE);
  EXPECT_STREQ(hr_last_error(), "plan: is NULL");
}

TEST(Validation, QueriesKeysValuesDense) {
  check_rules(
      Kind::dense,
      {
          {HR_ERROR_VALUE, "q: is absent (ndim 0); it is required", [](ValidCall& c) { c.a.q.ndim = 0; }},
          {HR_ERROR_VALUE, "k: is absent (ndim 0); it is required", [](ValidCall& c) { c.a.k.ndim = 0; }},
          {HR_ERROR_VALUE, "v: is absent (ndim 0); it is required", [](ValidCall& c) { c.a.v.ndim = 0; }},
          {HR_ERROR_TYPE, "q: dtype is int32; it must be float32, float16, bfloat16 or float64",
           [](ValidCall& c) { c.a.q.dtype = HR_INT32; }},
          {HR_ERROR_TYPE, "q: dtype is dtype 99; it must be float32, float16, bfloat16 or float64",
           [](ValidCall& c) { c.a.q.dtype = 99; }},
          {HR_ERROR_TYPE, "k: dtype is float16, but q has float32; they must be equal",
           [](ValidCall& c) { c.a.k.dtype = HR_FLOAT16; }},
          {HR_ERROR_TYPE, "v: dtype is bfloat16, but q has float32; they must be equal",
           [](ValidCall& c) { c.a.v.dtype = HR_BFLOAT16; }},
          {HR_ERROR_VALUE, "q: ndim is 3; it must be 4: [batch, seqlen_q, heads_q, head_dim]",
           [](ValidCall& c) { c.a.q.ndim = 3; }},
          {HR_ERROR_VALUE, "k: ndim is -1; it must be 4: [batch, seqlen_k, heads_kv, head_dim]",
           [](ValidCall& c) { c.a.k.ndim = -1; }},
          {HR_ERROR_VALUE, "v: ndim is 5; it must be 4: [batch, seqlen_k, heads_kv, value_dim]",
           [](ValidCall& c) { c.a.v.ndim = 5; }},
          {HR_ERROR_VALUE, "q: shape is [2, -3, 4, 8]; every size must be at least 0 and below 2^40",
           [](ValidCall& c) { c.a.q.shape[1] = -3; }},
          {HR_ERROR_VALUE, "k: shape is [2, 1099511627776, 2, 8]; every size must be at least 0 and below 2^40",
           [](ValidCall& c) { c.a.k.shape[1] = two_to_40; }},
          {HR_ERROR_VALUE,
           "k: shape is [2, 1099511627775, 1099511627775, 8] of float32; its size in bytes must fit 64 bits",
           [](ValidCall& c) { c.a.k.shape[1] = c.a.k.shape[2] = two_to_40 - 1; }},
          {HR_ERROR_VALUE,
           "q: strides are [2305843009213693952, 32, 8, 1] for shape [2, 3, 4, 8]; every offset in bytes must fit 64 "
           "bits",
           [](ValidCall& c) { c.a.q.stride[0] = std::int64_t{1} << 61; }},
          {HR_ERROR_VALUE,
           "v: strides are [60, 12, -9223372036854775808, 1] for shape [2, 5, 2, 6]; every offset in bytes must fit 64 "
           "bits",
           [](ValidCall& c) { c.a.v.stride[2] = int64_min; }},
          {HR_ERROR_VALUE, "q: the stride of the last dimension is 2; it must be 1 (contiguous)",
           [](ValidCall& c) { c.a.q.stride[3] = 2; }},
          {HR_ERROR_VALUE, "k: the stride of the last dimension is -1; it must be 1 (contiguous)",
           [](ValidCall& c) { c.a.k.stride[3] = -1; }},
          {HR_ERROR_VALUE, "v: the stride of the last dimension is 0; it must be 1 (contiguous)",
           [](ValidCall& c) { c.a.v.stride[3] = 0; }},
          {HR_ERROR_VALUE, "k: batch is 3, but q has 2; they must be equal", [](ValidCall& c) { c.a.k.shape[0] = 3; }},
          {HR_ERROR_VALUE, "v: batch is 1, but q has 2; they must be equal", [](ValidCall& c) { c.a.v.shape[0] = 1; }},
          {HR_ERROR_VALUE, "v: seqlen_k is 6, but k has 5; they must be equal",
           [](ValidCall& c) { c.a.v.shape[1] = 6; }},
          {HR_ERROR_VALUE, "v: seqlen_k is 4, but k has 5; they must be equal",
           [](ValidCall& c) { c.a.v.shape[1] = 4; }},
          {HR_ERROR_VALUE, "v: heads_kv is 1, but k has 2; they must be equal",
           [](ValidCall& c) { c.a.v.shape[2] = 1; }},
          {HR_ERROR_VALUE, "q: heads_q is 3, but k has heads_kv 2; heads_q must be a multiple of heads_kv",
           [](ValidCall& c) { c.a.q.shape[2] = 3; }},
          {HR_ERROR_VALUE, "q: heads_q is 1, but k has heads_kv 2; heads_q must be a multiple of heads_kv",
           [](ValidCall& c) { c.a.q.shape[2] = 1; }},
          {HR_ERROR_VALUE, "q: heads_q is 4, but k has heads_kv 0; heads_q must be a multiple of heads_kv",
           [](ValidCall& c) { c.a.k.shape[2] = c.a.v.shape[2] = 0; }},
          {HR_ERROR_VALUE, "q: head_dim is 0; it must be 1 to 512",
           [](ValidCall& c) { c.a.q.shape[3] = c.a.k.shape[3] = 0; }},
          {HR_ERROR_VALUE, "q: head_dim is 513; it must be 1 to 512",
           [](ValidCall& c) { c.a.q.shape[3] = c.a.k.shape[3] = 513; }},
          {HR_ERROR_VALUE, "k: head_dim is 7, but q has 8; they must be equal",
           [](ValidCall& c) { c.a.k.shape[3] = 7; }},
          {HR_ERROR_VALUE, "v: value_dim is 0; it must be 1 to 512", [](ValidCall& c) { c.a.v.shape[3] = 0; }},
          {HR_ERROR_VALUE, "v: value_dim is 513; it must be 1 to 512", [](ValidCall& c) { c.a.v.shape[3] = 513; }},
      });
}

TEST(Validation, QueriesKeysValuesRagged) {
  check_rules(Kind::ragged, {
                                {HR_ERROR_VALUE, "q: ndim is 4; it must be 3: [total_q, heads_q, head_dim]",
                                 [](ValidCall& c) { c.a.q.ndim = 4; }},
                                {HR_ERROR_VALUE, "k: ndim is 2; it must be 3: [total_k, heads_kv, head_dim]",
                                 [](ValidCall& c) { c.a.k.ndim = 2; }},
                                {HR_ERROR_VALUE, "v: ndim is 1; it must be 3: [total_k, heads_kv, value_dim]",
                                 [](ValidCall& c) { c.a.v.ndim = 1; }},
                                {HR_ERROR_VALUE, "v: total_k is 9, but k has 8; they must be equal",
                                 [](ValidCall& c) { c.a.v.shape[0] = 9; }},
                                {HR_ERROR_VALUE, "q: the stride of the last dimension is 2; it must be 1 (contiguous)",
                                 [](ValidCall& c) { c.a.q.stride[2] = 2; }},
                            });
}

TEST(Validation, Metadata) {
  check_rules(
      Kind::ragged,
      {
          {HR_ERROR_VALUE, "cu_seqlens_k: is absent, but cu_seqlens_q is given; a ragged batch needs both",
           [](ValidCall& c) { c.a.cu_seqlens_k.ndim = 0; }},
          {HR_ERROR_VALUE, "cu_seqlens_q: is absent, but cu_seqlens_k is given; a ragged batch needs both",
           [](ValidCall& c) { c.a.cu_seqlens_q.ndim = 0; }},
          {HR_ERROR_TYPE, "cu_seqlens_q: dtype is int64; it must be int32 (convert it: no length needs more)",
           [](ValidCall& c) { c.a.cu_seqlens_q.dtype = HR_INT64; }},
          {HR_ERROR_TYPE, "cu_seqlens_k: dtype is float32; it must be int32",
           [](ValidCall& c) { c.a.cu_seqlens_k.dtype = HR_FLOAT32; }},
          {HR_ERROR_VALUE, "cu_seqlens_q: ndim is 2; it must be 1: [batch + 1]",
           [](ValidCall& c) { c.a.cu_seqlens_q.ndim = 2; }},
          {HR_ERROR_VALUE, "cu_seqlens_q: the stride of the last dimension is 2; it must be 1 (contiguous)",
           [](ValidCall& c) { c.a.cu_seqlens_q.stride[0] = 2; }},
          {HR_ERROR_VALUE, "cu_seqlens_q: data is NULL; a tensor of shape [3] needs memory",
           [](ValidCall& c) { c.a.cu_seqlens_q.data = nullptr; }},
          {HR_ERROR_VALUE, "cu_seqlens_k: has no entries; it must have batch + 1 ([0] is an empty batch)",
           [](ValidCall& c) { c.a.cu_seqlens_k.shape[0] = 0; }},
          {HR_ERROR_VALUE, "cu_seqlens_k: has 2 entries, but cu_seqlens_q has 3; they must be equal (batch + 1)",
           [](ValidCall& c) { c.a.cu_seqlens_k.shape[0] = 2; }},
          {HR_ERROR_VALUE, "cu_seqlens_q: entry 0 is 1; it must be 0",
           [](ValidCall& c) {
             c.replace(c.a.cu_seqlens_q, {1, 3, 4});
           }},
          {HR_ERROR_VALUE, "cu_seqlens_q: entry 0 is -1; it must be 0",
           [](ValidCall& c) {
             c.replace(c.a.cu_seqlens_q, {-1, 3, 4});
           }},
          {HR_ERROR_VALUE, "cu_seqlens_k: entry 2 is 4, below entry 1, 5; entries must not decrease",
           [](ValidCall& c) {
             c.replace(c.a.cu_seqlens_k, {0, 5, 4});
           }},
          {HR_ERROR_VALUE, "cu_seqlens_q: the last entry is 6; it must be at most total_q 5",
           [](ValidCall& c) {
             c.replace(c.a.cu_seqlens_q, {0, 3, 6});
           }},
          {HR_ERROR_VALUE, "cu_seqlens_k: the last entry is 9; it must be at most total_k 8",
           [](ValidCall& c) {
             c.replace(c.a.cu_seqlens_k, {0, 5, 9});
           }},
          {HR_ERROR_TYPE, "seqused_q: dtype is int64; it must be int32 (convert it: no length needs more)",
           [](ValidCall& c) { c.a.seqused_q.dtype = HR_INT64; }},
          {HR_ERROR_TYPE, "seqused_k: dtype is bool; it must be int32",
           [](ValidCall& c) { c.a.seqused_k.dtype = HR_BOOL; }},
          {HR_ERROR_VALUE, "seqused_q: ndim is 2; it must be 1: [batch]", [](ValidCall& c) { c.a.seqused_q.ndim = 2; }},
          {HR_ERROR_VALUE, "seqused_k: batch is 1, but the call has 2; they must be equal",
           [](ValidCall& c) { c.a.seqused_k.shape[0] = 1; }},
          {HR_ERROR_VALUE, "seqused_k: data is NULL; a tensor of shape [2] needs memory",
           [](ValidCall& c) { c.a.seqused_k.data = nullptr; }},
          {HR_ERROR_VALUE, "seqused_q: entry 1 is 2; it must be 0 to 1, the length of that sequence",
           [](ValidCall& c) {
             c.replace(c.a.seqused_q, {3, 2});
           }},
          {HR_ERROR_VALUE, "seqused_k: entry 0 is -1; it must be 0 to 5, the length of that sequence",
           [](ValidCall& c) {
             c.replace(c.a.seqused_k, {-1, 2});
           }},
      });
  check_rules(Kind::dense, {{HR_ERROR_VALUE, "seqused_k: entry 1 is 6; it must be 0 to 5, the length of that sequence",
                             [](ValidCall& c) {
                               c.replace(c.a.seqused_k, {5, 6});
                             }}});

  ValidCall call(Kind::ragged);
  call.a.cu_seqlens_q.data = static_cast<std::byte*>(call.a.cu_seqlens_q.data) + 1;
  EXPECT_EQ(hr_forward(&call.a), HR_ERROR_VALUE);
  EXPECT_NE(std::string(hr_last_error()).find("cu_seqlens_q: data is at 0x"), std::string::npos) << hr_last_error();
  EXPECT_NE(std::string(hr_last_error()).find("int32 must be aligned to 4 bytes"), std::string::npos);
}

TEST(Validation, OutputAndStatistics) {
  check_rules(
      Kind::dense,
      {
          {HR_ERROR_VALUE, "out: is absent (ndim 0); it is required", [](ValidCall& c) { c.a.out.ndim = 0; }},
          {HR_ERROR_TYPE, "out: dtype is float64, but q has float32; they must be equal",
           [](ValidCall& c) { c.a.out.dtype = HR_FLOAT64; }},
          {HR_ERROR_VALUE, "out: ndim is 3; it must be 4: [batch, seqlen_q, heads_q, value_dim]",
           [](ValidCall& c) { c.a.out.ndim = 3; }},
          {HR_ERROR_VALUE, "out: shape is [2, 3, 4, 8]; q and v make it [2, 3, 4, 6]",
           [](ValidCall& c) { c.a.out.shape[3] = 8; }},
          {HR_ERROR_VALUE, "out: the stride of the last dimension is 4; it must be 1 (contiguous)",
           [](ValidCall& c) { c.a.out.stride[3] = 4; }},
          {HR_ERROR_VALUE, "out: strides are [72, 0, 6, 1]; those of an output must be positive",
           [](ValidCall& c) { c.a.out.stride[1] = 0; }, Passes::forward},
          {HR_ERROR_VALUE, "out: strides are [72, -24, 6, 1]; those of an output must be positive",
           [](ValidCall& c) { c.a.out.stride[1] = -24; }, Passes::forward},
          {HR_ERROR_VALUE,
           "out: strides are [72, 24, 5, 1] for shape [2, 3, 4, 6]; elements of an output must not overlap",
           [](ValidCall& c) { c.a.out.stride[2] = 5; }, Passes::forward},
          {HR_ERROR_VALUE,
           "out: strides are [24, 24, 6, 1] for shape [2, 3, 4, 6]; elements of an output must not overlap",
           [](ValidCall& c) { c.a.out.stride[0] = 24; }, Passes::forward},
          {HR_ERROR_TYPE, "lse: dtype is float64; it must be float32",
           [](ValidCall& c) { c.a.lse.dtype = HR_FLOAT64; }},
          {HR_ERROR_TYPE, "lse: dtype is float16; it must be float32",
           [](ValidCall& c) { c.a.lse.dtype = HR_FLOAT16; }},
          {HR_ERROR_VALUE, "lse: ndim is 2; it must be 3: [batch, heads_q, seqlen_q]",
           [](ValidCall& c) { c.a.lse.ndim = 2; }},
          {HR_ERROR_VALUE, "lse: shape is [2, 3, 4]; q makes it [2, 4, 3]",
           [](ValidCall& c) { c.a.lse.shape[1] = 3, c.a.lse.shape[2] = 4; }},
          {HR_ERROR_VALUE, "lse: strides are [12, 3, 0]; those of an output must be positive",
           [](ValidCall& c) { c.a.lse.stride[2] = 0; }, Passes::forward},
          {HR_ERROR_VALUE, "lse: strides are [12, 2, 1] for shape [2, 4, 3]; elements of an output must not overlap",
           [](ValidCall& c) { c.a.lse.stride[1] = 2; }, Passes::forward},
          {HR_ERROR_VALUE, "lse: is absent (ndim 0); it is required", [](ValidCall& c) { c.a.lse.ndim = 0; },
           Passes::backward},
      });
  check_rules(Kind::ragged, {
                                {HR_ERROR_VALUE, "out: shape is [4, 4, 6]; q and v make it [5, 4, 6]",
                                 [](ValidCall& c) { c.a.out.shape[0] = 4; }},
                                {HR_ERROR_VALUE, "lse: ndim is 3; it must be 2: [heads_q, total_q]",
                                 [](ValidCall& c) { c.a.lse.ndim = 3; }},
                                {HR_ERROR_VALUE, "lse: shape is [5, 4]; q makes it [4, 5]",
                                 [](ValidCall& c) { c.a.lse.shape[0] = 5, c.a.lse.shape[1] = 4; }},
                            });
}

TEST(Validation, BiasAndMasks) {
  check_rules(
      Kind::dense,
      {
          {HR_ERROR_TYPE, "bias: dtype is float16; it must be float32",
           [](ValidCall& c) { c.a.bias.dtype = HR_FLOAT16; }},
          {HR_ERROR_TYPE, "bias: dtype is bool; it must be float32", [](ValidCall& c) { c.a.bias.dtype = HR_BOOL; }},
          {HR_ERROR_VALUE, "bias: ndim is 2; it must be 4: [1|batch, 1|heads_q, 1|seqlen_q, 1|seqlen_k]",
           [](ValidCall& c) { c.a.bias.ndim = 2; }},
          {HR_ERROR_VALUE, "bias: batch is 3; it must be 1 or 2", [](ValidCall& c) { c.a.bias.shape[0] = 3; }},
          {HR_ERROR_VALUE, "bias: heads_q is 2; it must be 1 or 4", [](ValidCall& c) { c.a.bias.shape[1] = 2; }},
          {HR_ERROR_VALUE, "bias: seqlen_q is 4; it must be 1 or 3", [](ValidCall& c) { c.a.bias.shape[2] = 4; }},
          {HR_ERROR_VALUE, "bias: seqlen_k is 0; it must be 1 or 5", [](ValidCall& c) { c.a.bias.shape[3] = 0; }},
          {HR_ERROR_TYPE, "mask: dtype is float32; it must be bool", [](ValidCall& c) { c.a.mask.dtype = HR_FLOAT32; }},
          {HR_ERROR_VALUE, "mask: ndim is 3; it must be 4: [1|batch, 1|heads_q, 1|seqlen_q, 1|seqlen_k]",
           [](ValidCall& c) { c.a.mask.ndim = 3; }},
          {HR_ERROR_VALUE, "mask: seqlen_k is 6; it must be 1 or 5", [](ValidCall& c) { c.a.mask.shape[3] = 6; }},
          {HR_ERROR_TYPE, "block_mask: dtype is int32; it must be bool",
           [](ValidCall& c) { c.a.block_mask.dtype = HR_INT32; }},
          {HR_ERROR_VALUE,
           "block_mask: ndim is 3; it must be 4: [1|batch, 1|heads_q, ceil(seqlen_q / block_q), ceil(seqlen_k / "
           "block_k)]",
           [](ValidCall& c) { c.a.block_mask.ndim = 3; }},
          {HR_ERROR_VALUE, "block_mask: batch is 3; it must be 1 or 2",
           [](ValidCall& c) { c.a.block_mask.shape[0] = 3; }},
          {HR_ERROR_VALUE, "block_mask: heads_q is 2; it must be 1 or 4",
           [](ValidCall& c) { c.a.block_mask.shape[1] = 2; }},
          {HR_ERROR_VALUE, "block_mask: has 1 blocks for seqlen_q 3 and block_q 2; it must have 2",
           [](ValidCall& c) { c.a.block_mask.shape[2] = 1; }},
          {HR_ERROR_VALUE, "block_mask: has 4 blocks for seqlen_k 5 and block_k 2; it must have 3",
           [](ValidCall& c) { c.a.block_mask.shape[3] = 4; }},
          {HR_ERROR_VALUE, "block_q: is 0; with a block_mask it must be at least 1",
           [](ValidCall& c) { c.a.block_q = 0; }},
          {HR_ERROR_VALUE, "block_k: is -2; with a block_mask it must be at least 1",
           [](ValidCall& c) { c.a.block_k = -2; }},
          {HR_ERROR_VALUE, "block_q: is 2, but block_mask is absent; it must then be 0",
           [](ValidCall& c) { c.a.block_mask.ndim = 0; }},
          {HR_ERROR_VALUE, "block_k: is 2, but block_mask is absent; it must then be 0",
           [](ValidCall& c) { c.a.block_mask.ndim = 0, c.a.block_q = 0; }},
      });
  check_rules(Kind::ragged,
              {
                  // The longest sequences are 3 queries and, in use, 4 keys.
                  {HR_ERROR_VALUE, "bias: seqlen_q is 2; it must be 1 or at least 3",
                   [](ValidCall& c) { c.a.bias.shape[2] = 2; }},
                  {HR_ERROR_VALUE, "bias: seqlen_k is 3; it must be 1 or at least 4",
                   [](ValidCall& c) { c.a.bias.shape[3] = 3; }},
                  {HR_ERROR_VALUE, "mask: batch is 3; it must be 1 or 2", [](ValidCall& c) { c.a.mask.shape[0] = 3; }},
                  {HR_ERROR_VALUE, "block_mask: has 1 blocks for seqlen_k 4 and block_k 2; it must have at least 2",
                   [](ValidCall& c) { c.a.block_mask.shape[3] = 1; }},
              });
}

TEST(Validation, HeadInputs) {
  check_rules(
      Kind::dense,
      {
          {HR_ERROR_TYPE, "alibi_slopes: dtype is float64; it must be float32",
           [](ValidCall& c) { c.a.alibi_slopes.dtype = HR_FLOAT64; }},
          {HR_ERROR_VALUE, "alibi_slopes: ndim is 3; it must be 1: [heads_q], or 2: [batch, heads_q]",
           [](ValidCall& c) { c.a.alibi_slopes.ndim = 3; }},
          {HR_ERROR_VALUE, "alibi_slopes: heads_q is 2, but q has 4; they must be equal",
           [](ValidCall& c) { c.a.alibi_slopes.shape[0] = 2; }},
          {HR_ERROR_VALUE, "alibi_slopes: batch is 1, but the call has 2; they must be equal",
           [](ValidCall& c) {
             c.a.alibi_slopes = c.tensor(HR_FLOAT32, {1, 4});
             c.replace(c.a.seqused_q, {3, 2});
           }},
          {HR_ERROR_TYPE, "sinks: dtype is bfloat16; it must be float32",
           [](ValidCall& c) { c.a.sinks.dtype = HR_BFLOAT16; }},
          {HR_ERROR_VALUE, "sinks: ndim is 2; it must be 1: [heads_q]", [](ValidCall& c) { c.a.sinks.ndim = 2; }},
          {HR_ERROR_VALUE, "sinks: heads_q is 5, but q has 4; they must be equal",
           [](ValidCall& c) { c.a.sinks.shape[0] = 5; }},
      });
}

TEST(Validation, Gradients) {
  const auto backward = [](hr_status status, const char* message, std::function<void(ValidCall&)> break_it) {
    return Rule{status, message, std::move(break_it), Passes::backward};
  };
  check_rules(
      Kind::dense,
      {
          backward(HR_ERROR_VALUE, "dout: is absent (ndim 0); it is required", [](ValidCall& c) { c.a.dout.ndim = 0; }),
          backward(HR_ERROR_TYPE, "dout: dtype is float16, but q has float32; they must be equal",
                   [](ValidCall& c) { c.a.dout.dtype = HR_FLOAT16; }),
          backward(HR_ERROR_VALUE, "dout: shape is [2, 3, 4, 5]; q and v make it [2, 3, 4, 6]",
                   [](ValidCall& c) { c.a.dout.shape[3] = 5; }),
          backward(HR_ERROR_VALUE, "dout: the stride of the last dimension is 0; it must be 1 (contiguous)",
                   [](ValidCall& c) { c.a.dout.stride[3] = 0; }),
          backward(HR_ERROR_TYPE, "dlse: dtype is float64; it must be float32",
                   [](ValidCall& c) { c.a.dlse.dtype = HR_FLOAT64; }),
          backward(HR_ERROR_VALUE, "dlse: shape is [2, 4, 2]; q makes it [2, 4, 3]",
                   [](ValidCall& c) { c.a.dlse.shape[2] = 2; }),
          backward(HR_ERROR_VALUE, "dq: is absent (ndim 0); it is required", [](ValidCall& c) { c.a.dq.ndim = 0; }),
          backward(HR_ERROR_VALUE, "dk: is absent (ndim 0); it is required", [](ValidCall& c) { c.a.dk.ndim = 0; }),
          backward(HR_ERROR_VALUE, "dv: is absent (ndim 0); it is required", [](ValidCall& c) { c.a.dv.ndim = 0; }),
          backward(HR_ERROR_TYPE, "dq: dtype is float64, but q has float32; they must be equal",
                   [](ValidCall& c) { c.a.dq.dtype = HR_FLOAT64; }),
          backward(HR_ERROR_VALUE, "dq: ndim is 3; it must be 4: the shape of q",
                   [](ValidCall& c) { c.a.dq.ndim = 3; }),
          backward(HR_ERROR_VALUE, "dk: shape is [2, 4, 2, 8], but k has [2, 5, 2, 8]; they must be equal",
                   [](ValidCall& c) { c.a.dk.shape[1] = 4; }),
          backward(HR_ERROR_VALUE, "dk: the stride of the last dimension is 3; it must be 1 (contiguous)",
                   [](ValidCall& c) { c.a.dk.stride[3] = 3; }),
          // Keys expanded over heads: their gradient needs memory of its own for every head.
          backward(HR_ERROR_VALUE, "dk: strides are [80, 16, 0, 1]; those of an output must be positive",
                   [](ValidCall& c) { c.a.k.stride[2] = c.a.dk.stride[2] = 0; }),
          backward(HR_ERROR_VALUE,
                   "dv: strides are [12, 12, 6, 1] for shape [2, 5, 2, 6]; elements of an output must not overlap",
                   [](ValidCall& c) { c.a.dv.stride[0] = 12; }),
          backward(HR_ERROR_VALUE, "dbias: is given, but bias is absent; there is no gradient to write",
                   [](ValidCall& c) { c.a.bias.ndim = 0; }),
          backward(HR_ERROR_TYPE, "dbias: dtype is float64, but bias has float32; they must be equal",
                   [](ValidCall& c) { c.a.dbias.dtype = HR_FLOAT64; }),
          backward(HR_ERROR_VALUE, "dbias: ndim is 3; it must be 4: the shape of bias",
                   [](ValidCall& c) { c.a.dbias.ndim = 3; }),
          backward(HR_ERROR_VALUE, "dbias: shape is [1, 4, 3, 5], but bias has [2, 4, 3, 5]; they must be equal",
                   [](ValidCall& c) { c.a.dbias.shape[0] = 1; }),
          // A bias expanded with stride 0 has a gradient for every element.
          backward(HR_ERROR_VALUE, "dbias: strides are [60, 15, 5, 0]; those of an output must be positive",
                   [](ValidCall& c) { c.a.bias.stride[3] = c.a.dbias.stride[3] = 0; }),
          backward(HR_ERROR_VALUE, "dsinks: is given, but sinks is absent; there is no gradient to write",
                   [](ValidCall& c) { c.a.sinks.ndim = 0; }),
          backward(HR_ERROR_TYPE, "dsinks: dtype is float16; it must be float32",
                   [](ValidCall& c) { c.a.dsinks.dtype = HR_FLOAT16; }),
          backward(HR_ERROR_VALUE, "dsinks: heads_q is 2, but q has 4; they must be equal",
                   [](ValidCall& c) { c.a.dsinks.shape[0] = 2; }),
          backward(HR_ERROR_VALUE, "dsinks: strides are [-1]; those of an output must be positive",
                   [](ValidCall& c) { c.a.dsinks.stride[0] = -1; }),
      });
}

TEST(Validation, DropoutBeyondItsCounters) {
  // Positions are numbered by 32-bit halves; nothing of this size is touched, only described.
  ValidCall call(Kind::dense);
  hr_attention a;
  hr_attention_init(&a);
  const std::int64_t shape_q[] = {1, 1, 1, 1}, shape_k[] = {1, (std::int64_t{1} << 33) + 1, 1, 1};
  a.q = a.out = hr_tensor_contiguous(nullptr, HR_FLOAT16, 4, shape_q);
  a.k = a.v = hr_tensor_contiguous(nullptr, HR_FLOAT16, 4, shape_k);
  EXPECT_NO_THROW(validate(a, Pass::forward));
  a.dropout_p = 0.5;
  hr_plan* plan = nullptr;
  EXPECT_EQ(hr_plan_create(&a, HR_FORWARD, &plan), HR_ERROR_VALUE);
  EXPECT_STREQ(hr_last_error(),
               "dropout_p: is 0.5 for batch 1, heads_q 1, seqlen_q 1, seqlen_k 8589934593; dropout works up to 2^32 "
               "sequences and heads and lengths of 2^33");
}

// ---- what must not raise ----

struct Legal {
  const char* what;
  std::function<void(ValidCall&)> change;
  Kind kind = Kind::dense;
};

TEST(Validation, TheEdgesOfTheRulesAreLegal) {
  const std::vector<Legal> table = {
      {"every option at its default", [](ValidCall& c) { c.a.softcap = c.a.dropout_p = 0, c.a.has_scale = 0; }},
      {"scale 0", [](ValidCall& c) { c.a.has_scale = 1, c.a.scale = 0; }},
      {"scale below 0", [](ValidCall& c) { c.a.has_scale = 1, c.a.scale = -2; }},
      {"a scale that is not given is not read", [](ValidCall& c) { c.a.has_scale = 0, c.a.scale = nan; }},
      {"a high dropout", [](ValidCall& c) { c.a.dropout_p = std::nextafter(1.0, 0.0); }},
      {"1024 threads", [](ValidCall& c) { c.a.threads = 1024; }},
      {"window bounds at the ends of 64 bits",
       [](ValidCall& c) { c.a.window_left = int64_min, c.a.window_right = int64_max - 1; }},
      {"window bounds at the other ends",
       [](ValidCall& c) { c.a.window_left = int64_max - 1, c.a.window_right = int64_min; }},
      {"a block longer than any sequence",
       [](ValidCall& c) {
         c.a.block_q = c.a.block_k = int64_max;
         c.a.block_mask.shape[2] = c.a.block_mask.shape[3] = 1;
       }},
      {"inputs of stride 0 and below",
       [](ValidCall& c) {
         c.a.q.data = static_cast<float*>(c.a.q.data) + 2 * c.a.q.stride[1];
         c.a.q.stride[1] = -c.a.q.stride[1];
         c.a.k.stride[2] = 0;
         c.a.v.stride[0] = 0;
         c.a.bias.stride[3] = 0;
         c.a.dout.stride[0] = c.a.dout.stride[1] = c.a.dout.stride[2] = 0;
         c.a.dlse.stride[0] = c.a.dlse.stride[1] = c.a.dlse.stride[2] = 0;
         c.a.sinks.stride[0] = 0;
       }},
      {"an output whose dimensions are exchanged", [](ValidCall& c) { c.a.out.stride[1] = 6, c.a.out.stride[2] = 18; }},
      {"any stride where the size is 1 or 0",
       [](ValidCall& c) { c.a.mask.stride[0] = int64_min, c.a.mask.stride[2] = int64_max; }},
      {"a bias of one element",
       [](ValidCall& c) {
         for (hr_tensor* t : {&c.a.bias, &c.a.dbias}) t->shape[0] = t->shape[1] = t->shape[2] = t->shape[3] = 1;
       }},
      {"slopes of their own for each batch entry",
       [](ValidCall& c) {
         c.a.alibi_slopes = c.tensor(HR_FLOAT32, {2, 4});
       }},
      {"optional results not asked for", [](ValidCall& c) { c.a.dlse.ndim = c.a.dbias.ndim = c.a.dsinks.ndim = 0; }},
      {"no sequence used to its end",
       [](ValidCall& c) {
         c.replace(c.a.seqused_q, {0, 0}), c.replace(c.a.seqused_k, {0, 1});
       }},
      {"an empty ragged batch",
       [](ValidCall& c) {
         c.a.cu_seqlens_q.shape[0] = c.a.cu_seqlens_k.shape[0] = 1;
         c.a.seqused_q.shape[0] = c.a.seqused_k.shape[0] = 0;
         c.a.bias.shape[0] = c.a.dbias.shape[0] = 1;
       },
       Kind::ragged},
      {"empty sequences",
       [](ValidCall& c) {
         c.replace(c.a.cu_seqlens_q, {0, 0, 3}), c.replace(c.a.seqused_q, {0, 3});
       },
       Kind::ragged},
      {"masks larger than the longest sequence",
       [](ValidCall& c) {
         c.a.seqused_q.ndim = c.a.seqused_k.ndim = 0;
         c.replace(c.a.cu_seqlens_q, {0, 2, 4}), c.replace(c.a.cu_seqlens_k, {0, 3, 6});
       },
       Kind::ragged},
  };
  for (const Legal& legal : table) {
    SCOPED_TRACE(legal.what);
    ValidCall call(legal.kind);
    legal.change(call);
    EXPECT_EQ(hr_forward(&call.a), HR_OK) << hr_last_error();
    EXPECT_EQ(hr_backward(&call.a), HR_OK) << hr_last_error();
  }
}

TEST(Validation, EveryDimensionMayBeEmpty) {
  // Without data: a tensor that has no elements needs none.
  for (int empty = 0; empty < 5; ++empty) {
    SCOPED_TRACE(empty);
    const std::int64_t batch = empty == 0 ? 0 : 2, seqlen_q = empty == 1 ? 0 : 3, seqlen_k = empty == 2 ? 0 : 5;
    const std::int64_t heads_q = empty >= 3 ? 0 : 4, heads_kv = empty == 3 ? 0 : 2;
    ValidCall call(Kind::dense);
    hr_attention& a = call.a;
    a.seqused_q.ndim = a.seqused_k.ndim = 0;
    const auto shrink = [&](hr_tensor& t, const std::vector<std::int64_t>& shape) {
      t = hr_tensor_contiguous(t.data, static_cast<hr_dtype>(t.dtype), t.ndim, shape.data());
      if (is_empty(t)) t.data = nullptr;
    };
    for (hr_tensor* t : {&a.q, &a.dq}) shrink(*t, {batch, seqlen_q, heads_q, 8});
    for (hr_tensor* t : {&a.k, &a.dk}) shrink(*t, {batch, seqlen_k, heads_kv, 8});
    for (hr_tensor* t : {&a.v, &a.dv}) shrink(*t, {batch, seqlen_k, heads_kv, 6});
    for (hr_tensor* t : {&a.out, &a.dout}) shrink(*t, {batch, seqlen_q, heads_q, 6});
    for (hr_tensor* t : {&a.lse, &a.dlse}) shrink(*t, {batch, heads_q, seqlen_q});
    for (hr_tensor* t : {&a.bias, &a.dbias}) shrink(*t, {batch, heads_q, seqlen_q, seqlen_k});
    shrink(a.mask, {1, heads_q, 1, seqlen_k});
    shrink(a.block_mask, {1, 1, (seqlen_q + 1) / 2, (seqlen_k + 1) / 2});
    for (hr_tensor* t : {&a.alibi_slopes, &a.sinks, &a.dsinks}) shrink(*t, {heads_q});
    EXPECT_EQ(hr_forward(&a), HR_OK) << hr_last_error();
    EXPECT_EQ(hr_backward(&a), HR_OK) << hr_last_error();
  }
}

TEST(Validation, EveryInputTypeIsAccepted) {
  for (const hr_dtype dtype : {HR_FLOAT32, HR_FLOAT16, HR_BFLOAT16, HR_FLOAT64}) {
    for (const hr_dtype lse : {HR_FLOAT32, HR_FLOAT64}) {
      for (const hr_dtype bias : {HR_FLOAT32, dtype}) {
        ValidCall call(Kind::dense);
        for (hr_tensor* t :
             {&call.a.q, &call.a.k, &call.a.v, &call.a.out, &call.a.dout, &call.a.dq, &call.a.dk, &call.a.dv})
          t->dtype = dtype;
        call.a.lse.dtype = call.a.dlse.dtype = lse;
        call.a.bias.dtype = call.a.dbias.dtype = bias;
        // Nothing runs: the data of the call is float32.
        for (const Pass pass : {Pass::forward, Pass::backward}) {
          if (lse == HR_FLOAT64 && dtype != HR_FLOAT64)
            EXPECT_THROW(validate(call.a, pass), Failure);
          else
            EXPECT_NO_THROW(validate(call.a, pass));
        }
      }
    }
  }
}

// ---- the normal form ----

TEST(Validation, NormalFormOfBroadcastsAndUnusedRows) {
  ValidCall dense(Kind::dense);
  Problem p = validate(dense.a, Pass::backward);
  EXPECT_DOUBLE_EQ(p.scale, 1 / std::sqrt(8.0));
  EXPECT_EQ(p.mask.batch, 0);
  EXPECT_EQ(p.mask.head, 5);
  EXPECT_EQ(p.mask.query, 0);
  EXPECT_EQ(p.mask.key, 1);
  EXPECT_EQ(p.bias.at(1, 2, 1, 3), 60 + 30 + 5 + 3);
  EXPECT_EQ(p.alibi_batch_stride, 0);
  EXPECT_EQ(p.seqlen_q, 3);
  ASSERT_EQ(p.unused_q.size(), 1u);
  EXPECT_EQ(p.unused_q[0].batch, 1);
  EXPECT_EQ(p.unused_q[0].begin, 2);
  EXPECT_EQ(p.unused_q[0].end, 3);
  ASSERT_EQ(p.unused_k.size(), 1u);
  EXPECT_EQ(p.unused_k[0].begin, 4);
  EXPECT_EQ(p.unused_k[0].end, 5);
  EXPECT_EQ(p.sequences[1].q_len, 2);
  EXPECT_EQ(p.sequences[1].k_len, 4);
  EXPECT_EQ(p.lse.at(1, 2, 1), 12 + 6 + 1);

  ValidCall ragged(Kind::ragged);
  p = validate(ragged.a, Pass::forward);
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.q.batch, 0);
  EXPECT_EQ(p.q.at(0, 4, 3), 4 * 32 + 3 * 8);
  EXPECT_EQ(p.sequences[1].q_begin, 3);
  EXPECT_EQ(p.sequences[1].k_begin, 5);
  EXPECT_EQ(p.sequences[0].k_len, 4);  // seqused
  EXPECT_EQ(p.seqlen_q, 3);
  EXPECT_EQ(p.seqlen_k, 4);
  ASSERT_EQ(p.unused_q.size(), 1u);  // behind cu_seqlens[-1]
  EXPECT_EQ(p.unused_q[0].begin, 4);
  EXPECT_EQ(p.unused_q[0].end, 5);
  ASSERT_EQ(p.unused_k.size(), 2u);  // the tail of sequence 0, and behind cu_seqlens[-1]
  EXPECT_EQ(p.unused_k[0].begin, 4);
  EXPECT_EQ(p.unused_k[0].end, 5);
  EXPECT_EQ(p.unused_k[1].begin, 7);
  EXPECT_EQ(p.unused_k[1].end, 8);
}

// cap * tanh(s / cap) in float32: a cap beyond its range gave inf * 0, one below it 0 / 0.
TEST(Validation, SoftcapsOutsideFloat32AreUsable) {
  for (const hr_backend backend : {HR_BACKEND_CPU, HR_BACKEND_REFERENCE}) {
    std::vector<float> results[3];
    for (const double softcap : {0.0, 1e300, 1e39, 1e-300, std::numeric_limits<double>::denorm_min()}) {
      SCOPED_TRACE(softcap);
      ValidCall call(Kind::dense);
      call.a.backend = backend;
      call.a.softcap = softcap;
      call.a.dropout_p = 0;
      ASSERT_EQ(hr_forward(&call.a), HR_OK) << hr_last_error();
      const auto* lse = static_cast<const float*>(call.a.lse.data);
      std::vector<float>& result = results[softcap == 0.0 ? 0 : softcap > 1 ? 1 : 2];
      const std::vector<float> found(lse, lse + 24);
      EXPECT_FALSE(std::isnan(found[0]));
      if (result.empty()) result = found;
      EXPECT_EQ(found, result);
    }
    for (std::size_t n = 0; n < 24; ++n) {
      if (std::isinf(results[0][n])) continue;  // rows of no sequence
      EXPECT_NEAR(results[1][n], results[0][n], 1e-5) << "a huge cap is none";
      EXPECT_LT(std::abs(results[2][n]), 100) << "a tiny cap leaves bias, slopes and sinks";
    }
  }
}

// Keys expanded with stride 0 to more than any address space could hold widened, as the reference would.
TEST(Validation, AWorkspaceThatCannotBeHadIsAnError) {
  ValidCall call(Kind::dense);
  hr_attention a;
  hr_attention_init(&a);
  a.backend = HR_BACKEND_REFERENCE;
  const std::int64_t shape_q[] = {1, 1, 1, 512}, shape_k[] = {1, two_to_40 - 1, 1, 512};
  a.q = hr_tensor_contiguous(call.tensor(HR_FLOAT32, {512}).data, HR_FLOAT32, 4, shape_q);
  a.out = hr_tensor_contiguous(call.tensor(HR_FLOAT32, {512}).data, HR_FLOAT32, 4, shape_q);
  a.k = hr_tensor_contiguous(call.tensor(HR_FLOAT32, {512}).data, HR_FLOAT32, 4, shape_k);
  a.k.stride[1] = 0;
  a.v = a.k;
  call.remember();
  EXPECT_EQ(hr_forward(&a), HR_ERROR_RUNTIME);
  const std::string message = hr_last_error();
  EXPECT_EQ(message.find("workspace: "), 0u) << message;
  EXPECT_NE(message.find(" bytes could not be allocated"), std::string::npos) << message;
  EXPECT_TRUE(call.nothing_written());
}

// ---- execution of a plan ----

struct PlanDeleter {
  void operator()(hr_plan* plan) const { hr_plan_destroy(plan); }
};
using PlanPointer = std::unique_ptr<hr_plan, PlanDeleter>;

PlanPointer make_plan(const hr_attention& a, hr_pass pass) {
  hr_plan* plan = nullptr;
  EXPECT_EQ(hr_plan_create(&a, pass, &plan), HR_OK) << hr_last_error();
  return PlanPointer(plan);
}

struct alignas(64) Workspace {
  std::vector<std::byte> memory;
  explicit Workspace(std::size_t size) : memory(size + 64) {}
  [[nodiscard]] std::byte* aligned() {
    auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    return memory.data() + ((address + 63) / 64 * 64 - address);
  }
};

void check_execution(const std::vector<Rule>& rules) {
  for (const Rule& rule : rules) {
    for (const hr_pass pass : {HR_FORWARD, HR_BACKWARD}) {
      if (rule.passes != Passes::both && (rule.passes == Passes::forward) != (pass == HR_FORWARD)) continue;
      SCOPED_TRACE(std::string(pass == HR_FORWARD ? "forward: " : "backward: ") + rule.message);
      ValidCall call(Kind::dense);
      const PlanPointer plan = make_plan(call.a, pass);
      Workspace workspace(hr_plan_workspace_bytes(plan.get()));
      rule.break_it(call);
      EXPECT_EQ(hr_plan_execute(plan.get(), &call.a, workspace.aligned(), hr_plan_workspace_bytes(plan.get())),
                rule.status);
      EXPECT_STREQ(hr_last_error(), rule.message);
      EXPECT_TRUE(call.nothing_written());
    }
  }
}

TEST(Execution, DescriptionMustBeThePlannedOne) {
  check_execution({
      {HR_ERROR_VALUE, "causal: is 1, but the plan was made for 0; make a new plan",
       [](ValidCall& c) { c.a.causal = 1; }},
      {HR_ERROR_VALUE, "has_scale: is true, but the plan was made for false; make a new plan",
       [](ValidCall& c) { c.a.has_scale = 1; }},
      {HR_ERROR_VALUE, "window_left: is 3, but the plan was made for 9223372036854775807; make a new plan",
       [](ValidCall& c) { c.a.window_left = 3; }},
      {HR_ERROR_VALUE, "window_right: is -1, but the plan was made for 9223372036854775807; make a new plan",
       [](ValidCall& c) { c.a.window_right = -1; }},
      {HR_ERROR_VALUE, "softcap: is 5, but the plan was made for 10; make a new plan",
       [](ValidCall& c) { c.a.softcap = 5; }},
      {HR_ERROR_VALUE, "dropout_p: is 0.25, but the plan was made for 0.5; make a new plan",
       [](ValidCall& c) { c.a.dropout_p = 0.25; }},
      {HR_ERROR_VALUE, "seed: is 7, but the plan was made for 0; make a new plan", [](ValidCall& c) { c.a.seed = 7; }},
      {HR_ERROR_VALUE, "deterministic: is true, but the plan was made for false; make a new plan",
       [](ValidCall& c) { c.a.deterministic = 1; }},
      {HR_ERROR_VALUE, "batch_invariant: is true, but the plan was made for false; make a new plan",
       [](ValidCall& c) { c.a.batch_invariant = 1; }},
      {HR_ERROR_VALUE, "threads: is 1, but the plan was made for 0; make a new plan",
       [](ValidCall& c) { c.a.threads = 1; }},
      {HR_ERROR_VALUE, "backend: is 1, but the plan was made for 2; make a new plan",
       [](ValidCall& c) { c.a.backend = 1; }},
      {HR_ERROR_VALUE, "device: is 1, but the plan was made for 0; make a new plan",
       [](ValidCall& c) { c.a.device = HR_DEVICE_CUDA; }},
      {HR_ERROR_VALUE, "device_index: is 1, but the plan was made for 0; make a new plan",
       [](ValidCall& c) { c.a.device_index = 1; }},
      {HR_ERROR_VALUE, "block_q: is 3, but the plan was made for 2; make a new plan",
       [](ValidCall& c) { c.a.block_q = 3; }},
      {HR_ERROR_VALUE, "block_k: is 4, but the plan was made for 2; make a new plan",
       [](ValidCall& c) { c.a.block_k = 4; }},
      {HR_ERROR_VALUE, "lse: is absent, but the plan was made with it given; make a new plan",
       [](ValidCall& c) { c.a.lse.ndim = 0; }},
      {HR_ERROR_TYPE, "k: dtype is float16, but the plan was made for float32; make a new plan",
       [](ValidCall& c) { c.a.k.dtype = HR_FLOAT16; }},
      {HR_ERROR_VALUE, "q: ndim is 5, but the plan was made for 4; make a new plan",
       [](ValidCall& c) { c.a.q.ndim = 5; }},
      {HR_ERROR_VALUE, "v: shape is [2, 4, 2, 6], but the plan was made for [2, 5, 2, 6]; make a new plan",
       [](ValidCall& c) { c.a.v.shape[1] = 4; }},
      {HR_ERROR_VALUE, "bias: stride 2 is 0, but the plan was made for 5; make a new plan",
       [](ValidCall& c) { c.a.bias.stride[2] = 0; }},
      {HR_ERROR_VALUE, "seqused_k: is absent, but the plan was made with it given; make a new plan",
       [](ValidCall& c) { c.a.seqused_k.ndim = 0; }},
      {HR_ERROR_VALUE, "dv: stride 1 is 24, but the plan was made for 12; make a new plan",
       [](ValidCall& c) { c.a.dv.stride[1] = 24; }, Passes::backward},
      {HR_ERROR_VALUE, "dsinks: is absent, but the plan was made with it given; make a new plan",
       [](ValidCall& c) { c.a.dsinks.ndim = 0; }, Passes::backward},
  });
}

TEST(Execution, DataMustBeUsableAndOutputsApart) {
  check_execution({
      {HR_ERROR_VALUE, "q: data is NULL; a tensor of shape [2, 3, 4, 8] needs memory",
       [](ValidCall& c) { c.a.q.data = nullptr; }},
      {HR_ERROR_VALUE, "out: data is NULL; a tensor of shape [2, 3, 4, 6] needs memory",
       [](ValidCall& c) { c.a.out.data = nullptr; }},
      {HR_ERROR_VALUE, "block_mask: data is NULL; a tensor of shape [1, 1, 2, 3] needs memory",
       [](ValidCall& c) { c.a.block_mask.data = nullptr; }},
      {HR_ERROR_VALUE, "dsinks: data is NULL; a tensor of shape [4] needs memory",
       [](ValidCall& c) { c.a.dsinks.data = nullptr; }, Passes::backward},
      {HR_ERROR_VALUE, "out: shares memory with v; an output must have memory of its own",
       [](ValidCall& c) { c.a.out.data = c.a.v.data; }, Passes::forward},
      {HR_ERROR_VALUE, "out: shares memory with lse; an output must have memory of its own",
       [](ValidCall& c) { c.a.out.data = c.a.lse.data; }, Passes::forward},
      // A shifted overlap: q starts inside out.
      {HR_ERROR_VALUE, "out: shares memory with q; an output must have memory of its own",
       [](ValidCall& c) { c.a.q.data = static_cast<float*>(c.a.out.data) + 70; }, Passes::forward},
      {HR_ERROR_VALUE, "lse: shares memory with sinks; an output must have memory of its own",
       [](ValidCall& c) { c.a.sinks.data = static_cast<float*>(c.a.lse.data) + 2; }, Passes::forward},
      {HR_ERROR_VALUE, "dq: shares memory with q; an output must have memory of its own",
       [](ValidCall& c) { c.a.dq.data = c.a.q.data; }, Passes::backward},
      {HR_ERROR_VALUE, "dk: shares memory with dv; an output must have memory of its own",
       [](ValidCall& c) { c.a.dv.data = c.a.dk.data; }, Passes::backward},
      {HR_ERROR_VALUE, "dbias: shares memory with bias; an output must have memory of its own",
       [](ValidCall& c) { c.a.dbias.data = c.a.bias.data; }, Passes::backward},
  });

  ValidCall call(Kind::dense);
  const PlanPointer plan = make_plan(call.a, HR_FORWARD);
  Workspace workspace(hr_plan_workspace_bytes(plan.get()));
  call.a.k.data = static_cast<std::byte*>(call.a.k.data) + 2;
  EXPECT_EQ(hr_plan_execute(plan.get(), &call.a, workspace.aligned(), hr_plan_workspace_bytes(plan.get())),
            HR_ERROR_VALUE);
  const std::string message = hr_last_error();
  EXPECT_EQ(message.find("k: data is at 0x"), 0u) << message;
  EXPECT_NE(message.find("; float32 must be aligned to 4 bytes"), std::string::npos) << message;
}

TEST(Execution, WorkspaceMustBeThere) {
  ValidCall call(Kind::dense);
  const PlanPointer plan = make_plan(call.a, HR_FORWARD);
  const std::size_t needed = hr_plan_workspace_bytes(plan.get());
  ASSERT_GT(needed, 0u);
  Workspace workspace(needed);
  EXPECT_EQ(hr_plan_execute(plan.get(), &call.a, workspace.aligned(), needed - 1), HR_ERROR_VALUE);
  EXPECT_EQ(hr_last_error(), "workspace_bytes: is " + std::to_string(needed - 1) + "; the plan needs at least " +
                                 std::to_string(needed));
  EXPECT_EQ(hr_plan_execute(plan.get(), &call.a, nullptr, needed), HR_ERROR_VALUE);
  EXPECT_EQ(hr_last_error(), "workspace: is NULL; the plan needs " + std::to_string(needed) + " bytes");
  EXPECT_EQ(hr_plan_execute(plan.get(), &call.a, workspace.aligned() + 32, needed), HR_ERROR_VALUE);
  EXPECT_NE(std::string(hr_last_error()).find("; it must be aligned to 64 bytes"), std::string::npos)
      << hr_last_error();
  EXPECT_TRUE(call.nothing_written());
  EXPECT_EQ(hr_plan_execute(plan.get(), &call.a, workspace.aligned(), needed), HR_OK) << hr_last_error();
}

TEST(Execution, InputsMayShareMemory) {
  ValidCall call(Kind::dense);
  call.a.k.shape[3] = call.a.q.shape[3] = call.a.dq.shape[3] = call.a.dk.shape[3] = 6;
  call.a.v = call.a.k;
  EXPECT_EQ(hr_forward(&call.a), HR_OK) << hr_last_error();
  EXPECT_EQ(hr_backward(&call.a), HR_OK) << hr_last_error();
}

// q, k, v as slices of one projection, and their gradients likewise: spans cross, elements do not.
TEST(Execution, InterleavedOutputsAreApart) {
  constexpr std::int64_t batch = 2, seqlen = 3, heads = 2, dim = 4;
  std::vector<float> inputs(batch * seqlen * 3 * heads * dim, 0.5f), gradients(inputs.size());
  std::vector<float> out(batch * seqlen * heads * dim), lse(batch * heads * seqlen), dout(out.size(), 1.0f);
  hr_attention a;
  hr_attention_init(&a);
  a.backend = HR_BACKEND_REFERENCE;
  const auto slice = [&](std::vector<float>& packed, std::int64_t index) {
    const std::int64_t shape[] = {batch, seqlen, heads, dim};
    hr_tensor t = hr_tensor_contiguous(packed.data() + index * heads * dim, HR_FLOAT32, 4, shape);
    t.stride[0] = seqlen * 3 * heads * dim, t.stride[1] = 3 * heads * dim;
    return t;
  };
  a.q = slice(inputs, 0), a.k = slice(inputs, 1), a.v = slice(inputs, 2);
  a.dq = slice(gradients, 0), a.dk = slice(gradients, 1), a.dv = slice(gradients, 2);
  const std::int64_t out_shape[] = {batch, seqlen, heads, dim}, lse_shape[] = {batch, heads, seqlen};
  a.out = hr_tensor_contiguous(out.data(), HR_FLOAT32, 4, out_shape);
  a.dout = hr_tensor_contiguous(dout.data(), HR_FLOAT32, 4, out_shape);
  a.lse = hr_tensor_contiguous(lse.data(), HR_FLOAT32, 3, lse_shape);
  EXPECT_EQ(hr_forward(&a), HR_OK) << hr_last_error();
  EXPECT_EQ(hr_backward(&a), HR_OK) << hr_last_error();
  // Written in place over q, k, v they would not be.
  a.dq = slice(inputs, 0);
  EXPECT_EQ(hr_backward(&a), HR_ERROR_VALUE);
  EXPECT_STREQ(hr_last_error(), "dq: shares memory with q; an output must have memory of its own");
}

// ---- the smaller functions ----

struct MergeCall {
  std::vector<float> memory = std::vector<float>(4096, 0.25f);
  hr_tensor tensors[6];  // out_a, lse_a, out_b, lse_b, out, lse

  MergeCall() {
    const std::int64_t out[] = {2, 3, 4, 5}, lse[] = {2, 4, 3};
    for (int i = 0; i < 6; ++i)
      tensors[i] =
          hr_tensor_contiguous(memory.data() + 512 * i, HR_FLOAT32, i % 2 == 0 ? 4 : 3, i % 2 == 0 ? out : lse);
  }
  [[nodiscard]] hr_status run() const {
    return hr_merge_states(tensors, tensors + 1, tensors + 2, tensors + 3, tensors + 4, tensors + 5);
  }
};

TEST(Validation, MergeStates) {
  struct MergeRule {
    hr_status status;
    const char* message;
    std::function<void(MergeCall&)> break_it;
  };
  const std::vector<MergeRule> rules = {
      {HR_ERROR_TYPE, "out_a: dtype is int32; it must be float32, float16, bfloat16 or float64",
       [](MergeCall& c) { c.tensors[0].dtype = HR_INT32; }},
      {HR_ERROR_TYPE, "out_b: dtype is float16, but out_a has float32; they must be equal",
       [](MergeCall& c) { c.tensors[2].dtype = HR_FLOAT16; }},
      {HR_ERROR_TYPE, "out: dtype is float64, but out_a has float32; they must be equal",
       [](MergeCall& c) { c.tensors[4].dtype = HR_FLOAT64; }},
      {HR_ERROR_TYPE, "lse_a: dtype is float64; it must be float32",
       [](MergeCall& c) { c.tensors[1].dtype = HR_FLOAT64; }},
      {HR_ERROR_VALUE, "out_a: is absent (ndim 0); it is required", [](MergeCall& c) { c.tensors[0].ndim = 0; }},
      {HR_ERROR_VALUE, "lse: is absent (ndim 0); it is required", [](MergeCall& c) { c.tensors[5].ndim = 0; }},
      {HR_ERROR_VALUE, "out_b: ndim is 3; it must be 4: [batch, seqlen_q, heads, value_dim]",
       [](MergeCall& c) { c.tensors[2].ndim = 3; }},
      {HR_ERROR_VALUE, "lse_b: ndim is 4; it must be 3: [batch, heads, seqlen_q]",
       [](MergeCall& c) { c.tensors[3].ndim = 4; }},
      {HR_ERROR_VALUE, "out_b: shape is [2, 3, 4, 4]; out_a makes it [2, 3, 4, 5]",
       [](MergeCall& c) { c.tensors[2].shape[3] = 4; }},
      {HR_ERROR_VALUE, "lse_b: shape is [2, 3, 4]; out_a makes it [2, 4, 3]",
       [](MergeCall& c) { std::swap(c.tensors[3].shape[1], c.tensors[3].shape[2]); }},
      {HR_ERROR_VALUE, "out: strides are [60, 20, 0, 1]; those of an output must be positive",
       [](MergeCall& c) { c.tensors[4].stride[2] = 0; }},
      {HR_ERROR_VALUE, "lse: strides are [12, 3, 3] for shape [2, 4, 3]; elements of an output must not overlap",
       [](MergeCall& c) { c.tensors[5].stride[2] = 3; }},
      {HR_ERROR_VALUE, "lse_b: data is NULL; a tensor of shape [2, 4, 3] needs memory",
       [](MergeCall& c) { c.tensors[3].data = nullptr; }},
      {HR_ERROR_VALUE, "out: shares memory with out_b; it may only be out_a itself",
       [](MergeCall& c) { c.tensors[4] = c.tensors[2]; }},
      {HR_ERROR_VALUE, "out: shares memory with out_a; it may only be out_a itself",
       [](MergeCall& c) { c.tensors[4].data = static_cast<float*>(c.tensors[0].data) + 5; }},
      {HR_ERROR_VALUE, "lse: shares memory with lse_b; it may only be lse_a itself",
       [](MergeCall& c) { c.tensors[5] = c.tensors[3]; }},
      {HR_ERROR_VALUE, "lse: shares memory with out; an output must have memory of its own",
       [](MergeCall& c) { c.tensors[5].data = c.tensors[4].data; }},
  };
  for (const MergeRule& rule : rules) {
    SCOPED_TRACE(rule.message);
    MergeCall call;
    rule.break_it(call);
    EXPECT_EQ(call.run(), rule.status);
    EXPECT_STREQ(hr_last_error(), rule.message);
    EXPECT_EQ(call.memory, std::vector<float>(4096, 0.25f));
  }
  const char* names[] = {"out_a", "lse_a", "out_b", "lse_b", "out", "lse"};
  for (int i = 0; i < 6; ++i) {
    MergeCall call;
    const hr_tensor* t[6];
    for (int j = 0; j < 6; ++j) t[j] = i == j ? nullptr : call.tensors + j;
    EXPECT_EQ(hr_merge_states(t[0], t[1], t[2], t[3], t[4], t[5]), HR_ERROR_VALUE);
    EXPECT_EQ(hr_last_error(), std::string(names[i]) + ": is NULL");
  }
  MergeCall call;
  EXPECT_EQ(call.run(), HR_OK) << hr_last_error();
}

TEST(Validation, DropoutMask) {
  std::vector<std::uint8_t> memory(256, 0xCB);
  const std::int64_t shape[] = {1, 2, 3, 4};
  const hr_tensor good = hr_tensor_contiguous(memory.data(), HR_BOOL, 4, shape);
  const auto fails = [&](hr_status status, const std::string& message, hr_tensor t, double p) {
    EXPECT_EQ(hr_dropout_mask(&t, p, 1), status);
    EXPECT_EQ(hr_last_error(), message);
    EXPECT_EQ(memory, std::vector<std::uint8_t>(256, 0xCB));
  };
  const auto changed = [&](auto&& change) {
    hr_tensor t = good;
    change(t);
    return t;
  };
  EXPECT_EQ(hr_dropout_mask(nullptr, 0.5, 1), HR_ERROR_VALUE);
  EXPECT_STREQ(hr_last_error(), "keep: is NULL");
  fails(HR_ERROR_VALUE, "dropout_p: is 1; it must be at least 0 and below 1", good, 1);
  fails(HR_ERROR_VALUE, "dropout_p: is -0.5; it must be at least 0 and below 1", good, -0.5);
  fails(HR_ERROR_VALUE, "dropout_p: is nan; it must be at least 0 and below 1", good, nan);
  fails(HR_ERROR_VALUE, "keep: is absent (ndim 0); it is required", changed([](hr_tensor& t) { t.ndim = 0; }), 0.5);
  fails(HR_ERROR_TYPE, "keep: dtype is float32; it must be bool", changed([](hr_tensor& t) { t.dtype = HR_FLOAT32; }),
        0.5);
  fails(HR_ERROR_VALUE, "keep: ndim is 3; it must be 4: [batch, heads_q, seqlen_q, seqlen_k]",
        changed([](hr_tensor& t) { t.ndim = 3; }), 0.5);
  fails(HR_ERROR_VALUE, "keep: strides are [24, 12, 0, 1]; those of an output must be positive",
        changed([](hr_tensor& t) { t.stride[2] = 0; }), 0.5);
  fails(HR_ERROR_VALUE,
        "keep: strides are [24, 12, 3, 1] for shape [1, 2, 3, 4]; elements of an output must not overlap",
        changed([](hr_tensor& t) { t.stride[2] = 3; }), 0.5);
  fails(HR_ERROR_VALUE, "keep: data is NULL; a tensor of shape [1, 2, 3, 4] needs memory",
        changed([](hr_tensor& t) { t.data = nullptr; }), 0.5);
  fails(HR_ERROR_VALUE,
        "keep: shape is [1, 1, 1, 8589934593]; dropout works up to 2^32 sequences and heads and lengths of 2^33",
        changed([](hr_tensor& t) {
          t.shape[1] = t.shape[2] = 1;
          t.shape[3] = (std::int64_t{1} << 33) + 1;
        }),
        0.5);
}

TEST(Validation, ContiguousTensors) {
  float data = 0;
  const std::int64_t shape[] = {2, 0, 4, 8};
  const hr_tensor t = hr_tensor_contiguous(&data, HR_FLOAT32, 4, shape);
  EXPECT_EQ(std::vector<std::int64_t>(t.stride, t.stride + 4), (std::vector<std::int64_t>{32, 32, 8, 1}));
  EXPECT_EQ(hr_tensor_contiguous(&data, HR_FLOAT32, 0, nullptr).ndim, 0);
  // These are refused by every call, wherever they are used.
  for (const hr_tensor& bad :
       {hr_tensor_contiguous(&data, HR_FLOAT32, 5, shape), hr_tensor_contiguous(&data, HR_FLOAT32, -2, shape),
        hr_tensor_contiguous(&data, HR_FLOAT32, 4, nullptr)}) {
    ValidCall call(Kind::dense);
    call.a.q = bad;
    EXPECT_EQ(hr_forward(&call.a), HR_ERROR_VALUE);
    EXPECT_EQ(std::string(hr_last_error()).find("q: ndim is "), 0u) << hr_last_error();
  }
  const std::int64_t huge[] = {2, two_to_40 - 1, two_to_40 - 1, 8};
  ValidCall call(Kind::dense);
  call.a.q = hr_tensor_contiguous(&data, HR_FLOAT32, 4, huge);
  EXPECT_EQ(hr_forward(&call.a), HR_ERROR_VALUE);
}

}  // namespace
}  // namespace headrace
