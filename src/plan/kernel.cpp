#include "plan/kernel.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <limits>

namespace headrace {

Workspace Kernel::allocate_workspace(void* /*stream*/) const {
  constexpr std::size_t alignment = 64;
  const std::size_t bytes = workspace_bytes();
  Workspace workspace(nullptr, [](std::byte* memory) { std::free(memory); });
  if (bytes == 0) return workspace;
  if (bytes <= std::numeric_limits<std::size_t>::max() - alignment)
    workspace.reset(
        static_cast<std::byte*>(std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)));
  if (workspace == nullptr)
    throw Failure(HR_ERROR_RUNTIME, fmt::format("workspace: {} bytes could not be allocated", bytes));
  return workspace;
}

}  // namespace headrace
