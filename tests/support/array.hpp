// Tensors of the tests: they own their memory, lie in it in every way the library allows, and notice
// when something writes where no element of theirs is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "headrace/headrace.hpp"
#include "support/random.hpp"

namespace headrace::test {

std::int64_t size_of(DType dtype);
const char* name_of(DType dtype);

// value rounded to the dtype (to nearest, ties to even), and back.
void encode(DType dtype, double value, void* element);
double decode(DType dtype, const void* element);
double rounded(DType dtype, double value);

enum class Layout {
  contiguous,
  transposed,  // the two middle dimensions exchanged: [b, h, s, d] memory behind a [b, s, h, d] view
  permuted,    // any order of the dimensions
  padded,      // unused elements behind every row, and behind every outer dimension
  aligned,     // as padded, and all strides multiples of 8 elements: what a GPU reads 16 bytes at a time
  reversed,    // negative strides in some dimensions; inputs only
  expanded     // stride 0 in some dimensions; inputs only
};
const char* name_of(Layout layout);

// vectors: the last dimension stays contiguous, as the library demands of q, k, v, out.
enum class Elements { vectors, scalars };

using Shape = std::vector<std::int64_t>;

class Array {
 public:
  Array() = default;  // absent
  Array(DType dtype, const Shape& shape);
  Array(DType dtype, const Shape& shape, Layout layout, Elements elements, Rng& rng);

  // One tensor [..., heads_0 + heads_1 + ..., dim] cut along its heads: the packed output of one projection.
  static std::vector<Array> interleaved(DType dtype, const Shape& outer, const std::vector<std::int64_t>& heads,
                                        std::int64_t dim, Rng& rng);

  // The same elements seen with a larger shape: stride 0 where a dimension of one becomes longer.
  [[nodiscard]] Array expanded(const Shape& shape) const;

  [[nodiscard]] bool present() const { return storage_ != nullptr; }
  [[nodiscard]] Tensor view() const { return view_; }
  [[nodiscard]] DType dtype() const { return static_cast<DType>(view_.dtype); }
  [[nodiscard]] Shape shape() const { return {view_.shape, view_.shape + view_.ndim}; }
  [[nodiscard]] std::int64_t size() const;

  // All elements, row-major. With stride 0 the last of the values that share an element stays.
  void fill(const std::vector<double>& values);
  [[nodiscard]] std::vector<double> values() const;

  // Every byte of the storage, gaps and guards too.
  void poison(std::uint8_t byte);
  // All of that memory; arrays that share it give the same span.
  [[nodiscard]] std::span<std::byte> storage() const {
    return present() ? std::span(storage_->memory.get(), storage_->size) : std::span<std::byte>();
  }
  // Remembers the storage for the two questions below.
  void remember();
  [[nodiscard]] bool unchanged() const;       // every byte
  [[nodiscard]] bool gaps_unchanged() const;  // every byte that belongs to no element of an array here
  // A copy of the elements' bytes, row-major, to compare bit for bit.
  [[nodiscard]] std::vector<std::byte> bytes() const;

  // "float32 [2, 3, 4] strides [12, 4, 1]"
  [[nodiscard]] std::string describe() const;

 private:
  struct Storage {
    std::unique_ptr<std::byte[]> memory;
    std::size_t size = 0;
    std::vector<std::byte> remembered;
    std::vector<bool> element;  // bytes of some element
  };

  void place(DType dtype, const Shape& shape, const std::vector<std::int64_t>& strides, std::int64_t first,
             std::int64_t elements, std::int64_t misalign);
  void mark_elements();
  template <typename F>
  void for_each(F&& visit) const;

  std::shared_ptr<Storage> storage_;
  Tensor view_;
};

}  // namespace headrace::test
