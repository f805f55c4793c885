// Tensors on the device that are larger than 32 bits can address.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "on_gpu.hpp"

namespace headrace::test {

// A small call, of which any tensor may be spread.
Spec spec_of_spread(std::uint64_t seed);
// With a bias and a mask that are broadcast nowhere.
Spec spec_of_spread_with_bias_and_mask(std::uint64_t seed);

// What the device said of missing memory while `work` ran; empty if it did not: then work is done.
std::string lack_of_memory(const std::function<void()>& work);

// An Array on the device with its elements more than 2^31 apart: one dimension has a very large stride, the others are
// packed. The memory between them is NaN.
class SpreadTensor {
 public:
  // The large stride is a multiple of 8 elements, and `remainder` more.
  SpreadTensor(Array& array, int spread, int remainder = 0);

  [[nodiscard]] Tensor view() const { return view_; }
  // From the host, and to it.
  void scatter() const;
  void gather();

 private:
  // Sets the strides and returns the size of the memory.
  std::size_t place(int spread, int remainder);
  // The contiguous pieces, row-major.
  template <typename F>
  void for_each_run(F&& visit) const;

  Array& array_;
  Tensor view_;
  std::size_t bytes_;
  GpuMemory memory_;
};

// A boolean mask [1, 1, seqlen, seqlen] by which every row sees one key, drawn; the last key more often than others.
class OneKeyMask {
 public:
  OneKeyMask(std::int64_t seqlen, std::uint64_t seed);
  [[nodiscard]] Tensor view() const;
  [[nodiscard]] const std::vector<std::size_t>& keys() const { return keys_; }  // of each row

 private:
  std::int64_t seqlen_;
  GpuMemory memory_;
  std::vector<std::size_t> keys_;
};

}  // namespace headrace::test
