// Standard attention, the yardstick of bench and demo: S = q k^T of every head in memory, softmax in place,
// P v, with a BLAS for the products. float32 inside; 16-bit tensors are converted first, as frameworks
// on a CPU do. Written to be hard to beat in its own way: every core works, nothing is computed twice.
#pragma once

#include <cstdint>
#include <memory>

#include "array.hpp"
#include "blas.hpp"

namespace headrace::tool {

struct StandardShape {
  std::int64_t heads = 1, seqlen = 1, dim = 1;
  bool causal = false;
};

// Memory that is allocated but not yet touched, as malloc gives it.
class Scores {
 public:
  Scores(std::int64_t heads, std::int64_t seqlen);
  [[nodiscard]] float* head(std::int64_t h) { return data_.get() + h * seqlen_ * stride_; }
  [[nodiscard]] std::int64_t stride() const { return stride_; }
  static std::uint64_t bytes(const StandardShape& shape);

 private:
  struct Free {
    void operator()(float* data) const;
  };
  std::int64_t seqlen_, stride_;
  std::unique_ptr<float[], Free> data_;
};

class StandardAttention {
 public:
  enum class Threading {
    tasks,    // heads, and rows of a head, over threads that each call the BLAS for themselves
    products  // one head after another; the BLAS spreads each product over the threads
  };

  StandardAttention(const Blas& blas, const StandardShape& shape, int threads, Threading threading);

  // Tensors are [1, seqlen, heads, dim] of one dtype: float32, float16 or bfloat16. probabilities is scratch
  // memory that then holds P, which backward needs.
  void forward(const Array& q, const Array& k, const Array& v, Array& out, Scores& probabilities) const;
  void backward(const Array& dout, const Array& q, const Array& k, const Array& v, Array& dq, Array& dk, Array& dv,
                Scores& probabilities, Scores& dscores) const;

 private:
  template <typename Work>
  void for_parts(Work work) const;

  const Blas& blas_;
  StandardShape shape_;
  int threads_;
  Threading threading_;
};

}  // namespace headrace::tool
