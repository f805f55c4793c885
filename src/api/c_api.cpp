#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>

#include "api/guard.hpp"
#include "headrace/headrace.h"
#include "plan/plan.hpp"

namespace headrace {
namespace {

thread_local char last_error[1024] = "";

void not_null(const char* name, const void* pointer) {
  if (pointer == nullptr) throw Failure(HR_ERROR_VALUE, fmt::format("{}: is NULL", name));
}

// A C caller may pass any number as an enum, which C++ may not even read as one.
template <typename Enum>
int number_of(const Enum& value) {
  static_assert(sizeof(Enum) == sizeof(int));
  int number = 0;
  std::memcpy(&number, &value, sizeof(number));
  return number;
}

Pass pass_of(const hr_pass& pass) {
  const int number = number_of(pass);
  if (number != HR_FORWARD && number != HR_BACKWARD)
    throw Failure(HR_ERROR_VALUE, fmt::format("pass: is {}; it must be 0 (forward) or 1 (backward)", number));
  return static_cast<Pass>(number);
}

hr_status run(const hr_attention* attention, Pass pass) {
  return guarded([&] {
    not_null("attention", attention);
    const hr_plan plan(*attention, pass);
    const Workspace workspace = plan.kernel->allocate_workspace(attention->stream);
    plan.execute(*attention, workspace.get(), plan.kernel->workspace_bytes());
  });
}

}  // namespace

void set_last_error(const char* message) noexcept {
  const std::size_t length = std::min(std::strlen(message), sizeof(last_error) - 1);
  std::memcpy(last_error, message, length);
  last_error[length] = '\0';
}

}  // namespace headrace

hr_tensor hr_tensor_contiguous(void* data, hr_dtype dtype, int ndim, const int64_t* shape) {
  hr_tensor tensor{};
  tensor.data = data;
  tensor.dtype = headrace::number_of(dtype);
  tensor.ndim = ndim;
  if (ndim < 0 || ndim > 4) return tensor;
  if (shape == nullptr && ndim > 0) {
    tensor.ndim = -1;
    return tensor;
  }
  std::int64_t stride = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    tensor.shape[i] = shape[i];
    tensor.stride[i] = stride;
    // A product beyond 64 bits stays at the largest stride, which validation refuses.
    if (__builtin_mul_overflow(stride, std::max<std::int64_t>(shape[i], 1), &stride))
      stride = std::numeric_limits<std::int64_t>::max();
  }
  return tensor;
}

void hr_attention_init(hr_attention* attention) {
  if (attention == nullptr) return;
  *attention = hr_attention{};
  attention->struct_size = sizeof(hr_attention);
  attention->window_left = HR_UNBOUNDED;
  attention->window_right = HR_UNBOUNDED;
}

hr_status hr_plan_create(const hr_attention* attention, hr_pass pass, hr_plan** plan) {
  return headrace::guarded([&] {
    headrace::not_null("plan", plan);
    *plan = nullptr;
    headrace::not_null("attention", attention);
    auto made = std::make_unique<hr_plan>(*attention, headrace::pass_of(pass));
    // The block mask may be read here only: its memory need not outlive this call. On a device it cannot be read.
    const void* block_mask = made->problem.device == HR_DEVICE_CPU ? attention->block_mask.data : nullptr;
    made->explanation = headrace::explain(made->problem, *made->kernel, static_cast<const std::uint8_t*>(block_mask));
    *plan = made.release();
  });
}

void hr_plan_destroy(hr_plan* plan) { delete plan; }

size_t hr_plan_workspace_bytes(const hr_plan* plan) { return plan == nullptr ? 0 : plan->kernel->workspace_bytes(); }

hr_status hr_plan_execute(const hr_plan* plan, const hr_attention* attention, void* workspace, size_t workspace_bytes) {
  return headrace::guarded([&] {
    headrace::not_null("plan", plan);
    headrace::not_null("attention", attention);
    plan->execute(*attention, workspace, workspace_bytes);
  });
}

const char* hr_plan_explain(const hr_plan* plan) { return plan == nullptr ? "" : plan->explanation.text.c_str(); }

const char* hr_plan_explain_json(const hr_plan* plan) {
  return plan == nullptr ? "{}" : plan->explanation.json.c_str();
}

hr_status hr_forward(const hr_attention* attention) { return headrace::run(attention, headrace::Pass::forward); }

hr_status hr_backward(const hr_attention* attention) { return headrace::run(attention, headrace::Pass::backward); }

#define HEADRACE_TEXT(number) HEADRACE_TEXT_OF(number)
#define HEADRACE_TEXT_OF(number) #number
const char* hr_version(void) {
  return HEADRACE_TEXT(HEADRACE_VERSION_MAJOR) "." HEADRACE_TEXT(HEADRACE_VERSION_MINOR) "." HEADRACE_TEXT(
      HEADRACE_VERSION_PATCH);
}

const char* hr_last_error(void) { return headrace::last_error; }
