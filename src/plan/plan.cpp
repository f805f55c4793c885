#include "plan/plan.hpp"

#include <fmt/format.h>

namespace {

std::unique_ptr<headrace::Kernel> make_kernel(const headrace::Problem& problem) {
  if (problem.device == HR_DEVICE_CUDA) return headrace::make_cuda_kernel(problem);
  if (problem.backend == HR_BACKEND_REFERENCE) return headrace::make_reference_kernel(problem);
  return headrace::make_cpu_kernel(problem);
}

}  // namespace

hr_plan::hr_plan(const hr_attention& attention, headrace::Pass pass)
    : described(attention), problem(headrace::validate(attention, pass)), kernel(make_kernel(problem)) {}

void hr_plan::execute(const hr_attention& attention, void* workspace, std::size_t workspace_bytes) const {
  using headrace::Failure;
  constexpr std::size_t alignment = 64;
  const headrace::Buffers buffers = headrace::bind(described, attention, problem.pass);
  const std::size_t needed = kernel->workspace_bytes();
  if (workspace_bytes < needed)
    throw Failure(HR_ERROR_VALUE,
                  fmt::format("workspace_bytes: is {}; the plan needs at least {}", workspace_bytes, needed));
  if (needed > 0 && workspace == nullptr)
    throw Failure(HR_ERROR_VALUE, fmt::format("workspace: is NULL; the plan needs {} bytes", needed));
  if (needed > 0 && reinterpret_cast<std::uintptr_t>(workspace) % alignment != 0)
    throw Failure(HR_ERROR_VALUE,
                  fmt::format("workspace: is at {}; it must be aligned to {} bytes", fmt::ptr(workspace), alignment));
  kernel->execute(buffers, static_cast<std::byte*>(workspace));
}
