// Tensors as the tensor memory accelerator (TMA) sees them.
#pragma once

#include <atomic>
#include <cstdint>

#include "cuda/driver/abi.hpp"
#include "cuda/launch/tma_rows.hpp"

namespace headrace::cuda {

// Loads boxes of 64 columns x box_rows rows of one head of 16-bit elements, with the 128-byte swizzle; what lies
// outside the tensor becomes 0. Coordinates: column, row, head, batch. Data must be aligned, and nothing an obstacle.
CUtensorMap make_tensor_map(const RowsOfHeads& tensor, hr_dtype dtype, const void* data, int box_rows);

// The map of a tensor of a plan, which differs from call to call in its address alone. The driver makes it the first
// time, and later puts another address into a copy; where the address is that of the first time it is not asked. Any
// number of threads may ask for maps at once, and none waits for another.
class PlannedTensorMap {
 public:
  // As make_tensor_map().
  PlannedTensorMap(const RowsOfHeads& tensor, hr_dtype dtype, int box_rows)
      : tensor_(tensor), dtype_(dtype), box_rows_(box_rows) {}
  [[nodiscard]] CUtensorMap at(const void* data) const;

 private:
  enum class First { none, in_the_making, made };

  RowsOfHeads tensor_;
  hr_dtype dtype_;
  int box_rows_;
  // Written once, by the thread that brings the state from none to in_the_making; read when it is made.
  mutable std::atomic<First> state_ = First::none;
  mutable const void* first_data_ = nullptr;
  mutable CUtensorMap first_{};
};

}  // namespace headrace::cuda
