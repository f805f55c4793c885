// An input of a kernel that loads by TMA: read where it lies, or, if TMA cannot walk it there, from a copy in the
// workspace.
#pragma once

#include <cstddef>
#include <string>

#include "cuda/launch/tensor_map.hpp"

namespace headrace::cuda {

class TmaInput {
 public:
  // Decides when planning, by the strides and by whether the planned data is aligned to 16 bytes. A copy takes its
  // place behind the workspace_bytes that are taken already, and adds to them. Loads the kernel that copies: a context
  // of the device must be current. Throws Failure (HR_ERROR_UNSUPPORTED) if TMA could not walk the copy either: it is
  // too large for any memory.
  TmaInput(const char* name, const RowsOfHeads& rows, hr_dtype dtype, bool aligned, std::size_t& workspace_bytes);

  // Queues the copy on the stream, if there is one, and describes to TMA what is to be read: boxes of box_rows rows.
  // Throws Failure (HR_ERROR_VALUE) if the data is not aligned and the plan was made for data that is.
  [[nodiscard]] CUtensorMap map(const void* data, std::byte* workspace, CUstream stream, int box_rows) const;

  // Why it is copied, for explain; empty where it is not.
  [[nodiscard]] std::string note() const;

 private:
  void copy(const void* data, std::byte* to, CUstream stream) const;

  const char* name_;
  RowsOfHeads rows_, packed_;
  hr_dtype dtype_;
  std::string obstacle_;  // what keeps TMA from reading it in place; empty if nothing does
  std::size_t offset_ = 0;
};

}  // namespace headrace::cuda
