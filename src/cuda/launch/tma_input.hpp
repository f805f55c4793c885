// An input of a kernel that loads by TMA: read where it lies, or, if TMA cannot walk it there, from a copy in the
// workspace.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "cuda/driver/module_cache.hpp"
#include "cuda/kernels/pack_rows_params.hpp"
#include "cuda/launch/tensor_map.hpp"

namespace headrace::cuda {

class TmaInput {
 public:
  // Decides when planning, by the strides and by whether the planned data is aligned to 16 bytes. A copy takes its
  // place behind the workspace_bytes that are taken already, and adds to them. Loads the kernel that copies: a context
  // of the device must be current. Throws Failure (HR_ERROR_UNSUPPORTED) if TMA could not walk the copy either: it is
  // too large for any memory. It is to be read in boxes of box_rows rows.
  TmaInput(const char* name, const RowsOfHeads& rows, hr_dtype dtype, int box_rows, bool aligned,
           std::size_t& workspace_bytes);

  // Queues the copy on the stream, if there is one, and describes to TMA what is to be read. Throws Failure
  // (HR_ERROR_VALUE) if the data is not aligned and the plan was made for data that is.
  [[nodiscard]] CUtensorMap map(const void* data, std::byte* workspace, CUstream stream,
                                const ContextScope& context) const;

  // Why it is copied, for explain; empty where it is not.
  [[nodiscard]] std::string note() const;

 private:
  const char* name_;
  std::string obstacle_;                 // what keeps TMA from reading it in place; empty if nothing does
  std::optional<PlannedTensorMap> map_;  // of what TMA reads; none where there is nothing to be read
  // Of the copy:
  std::optional<PlannedKernel> pack_;
  PackRowsParams params_{};
  unsigned blocks_ = 0;
  std::size_t offset_ = 0;
};

}  // namespace headrace::cuda
