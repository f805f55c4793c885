#include "standard_attention.hpp"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>
#include <vector>

#include "standard_kernels.hpp"

namespace headrace::tool {
namespace {

std::int64_t row_stride(std::int64_t seqlen) {
  return (seqlen + score_row_alignment - 1) / score_row_alignment * score_row_alignment;
}

// A tensor as float32: itself, or a converted copy.
class Float32 {
 public:
  explicit Float32(const Array& array) {
    if (array.dtype == DType::float32) {
      data_ = reinterpret_cast<const float*>(array.bytes.data());
      return;
    }
    copy_.reset(new float[static_cast<std::size_t>(array.size())]);
    standard_kernels().widen(array.dtype, array.bytes.data(), copy_.get(), array.size());
    data_ = copy_.get();
  }
  [[nodiscard]] const float* data() const { return data_; }

 private:
  std::unique_ptr<float[]> copy_;
  const float* data_ = nullptr;
};

// Memory for a float32 result that becomes the array's when it is complete.
class Float32Result {
 public:
  explicit Float32Result(Array& array) : array_(array) {
    if (array.dtype == DType::float32) return;
    copy_.reset(new float[static_cast<std::size_t>(array.size())]);
  }
  [[nodiscard]] float* data() { return copy_ ? copy_.get() : reinterpret_cast<float*>(array_.bytes.data()); }
  void finish() {
    if (copy_) standard_kernels().narrow(array_.dtype, copy_.get(), array_.bytes.data(), array_.size());
  }

 private:
  Array& array_;
  std::unique_ptr<float[]> copy_;
};

}  // namespace

Scores::Scores(std::int64_t heads, std::int64_t seqlen)
    : seqlen_(seqlen),
      stride_(row_stride(seqlen)),
      data_(static_cast<float*>(std::aligned_alloc(
          64, static_cast<std::size_t>(std::max<std::int64_t>(heads * seqlen * stride_, 16)) * sizeof(float)))) {
  if (!data_) throw std::bad_alloc();
}

void Scores::Free::operator()(float* data) const { std::free(data); }

std::uint64_t Scores::bytes(const StandardShape& shape) {
  return static_cast<std::uint64_t>(shape.heads * shape.seqlen * row_stride(shape.seqlen)) * sizeof(float);
}

StandardAttention::StandardAttention(const Blas& blas, const StandardShape& shape, int threads, Threading threading)
    : blas_(blas), shape_(shape), threads_(threads), threading_(threading) {
  blas_.set_threads(threading == Threading::products ? threads : 1);
}

// Calls work(head, begin, end) for ranges of rows (or keys) that cover every head. With few heads, several
// ranges share one, so that no thread is idle.
template <typename Work>
void StandardAttention::for_parts(Work work) const {
  if (threading_ == Threading::products) {
    for (std::int64_t h = 0; h < shape_.heads; ++h) work(h, 0, shape_.seqlen);
    return;
  }
  std::int64_t parts = 1;
  while (shape_.heads * parts % threads_ != 0 && shape_.heads * parts < std::int64_t{4} * threads_) ++parts;
  const std::int64_t count = shape_.heads * parts;
#pragma omp parallel for num_threads(threads_) schedule(dynamic)
  for (std::int64_t part = 0; part < count; ++part) {
    const std::int64_t index = part % parts;
    const std::int64_t begin = shape_.seqlen * index / parts, end = shape_.seqlen * (index + 1) / parts;
    if (begin < end) work(part / parts, begin, end);
  }
}

void StandardAttention::forward(const Array& q, const Array& k, const Array& v, Array& out,
                                Scores& probabilities) const {
  const std::int64_t n = shape_.seqlen, d = shape_.dim, stride = shape_.heads * d, row = probabilities.stride();
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  const Float32 q32(q), k32(k), v32(v);
  Float32Result out32(out);
  const StandardKernels& kernels = standard_kernels();
  const auto softmax = [&](float* s, std::int64_t begin, std::int64_t end) {
    kernels.softmax(s, end - begin, n, row, shape_.causal ? begin + 1 : n, shape_.causal ? 1 : 0);
  };
  for_parts([&](std::int64_t h, std::int64_t begin, std::int64_t end) {
    float* s = probabilities.head(h) + begin * row;
    blas_.sgemm(end - begin, n, d, scale, {q32.data() + begin * stride + h * d, stride},
                {k32.data() + h * d, stride, true}, s, row);
    if (threading_ == Threading::tasks) {
      softmax(s, begin, end);
    } else {
#pragma omp parallel for num_threads(threads_) schedule(static)
      for (std::int64_t i = begin; i < end; ++i) softmax(probabilities.head(h) + i * row, i, i + 1);
    }
    blas_.sgemm(end - begin, d, n, 1.0f, {s, row}, {v32.data() + h * d, stride}, out32.data() + begin * stride + h * d,
                stride);
  });
  out32.finish();
}

void StandardAttention::backward(const Array& dout, const Array& q, const Array& k, const Array& v, Array& dq,
                                 Array& dk, Array& dv, Scores& probabilities, Scores& dscores) const {
  const std::int64_t n = shape_.seqlen, d = shape_.dim, stride = shape_.heads * d, row = probabilities.stride();
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  const Float32 dout32(dout), q32(q), k32(k), v32(v);
  Float32Result dq32(dq), dk32(dk), dv32(dv);
  const StandardKernels& kernels = standard_kernels();
  for_parts([&](std::int64_t h, std::int64_t begin, std::int64_t end) {  // rows of queries
    const float* p = probabilities.head(h) + begin * row;
    float* ds = dscores.head(h) + begin * row;
    blas_.sgemm(end - begin, n, d, 1.0f, {dout32.data() + begin * stride + h * d, stride},
                {v32.data() + h * d, stride, true}, ds, row);
    if (threading_ == Threading::tasks) {
      kernels.softmax_backward(p, ds, end - begin, n, row);
    } else {
#pragma omp parallel for num_threads(threads_) schedule(static)
      for (std::int64_t i = 0; i < end - begin; ++i) kernels.softmax_backward(p + i * row, ds + i * row, 1, n, row);
    }
    blas_.sgemm(end - begin, d, n, scale, {ds, row}, {k32.data() + h * d, stride}, dq32.data() + begin * stride + h * d,
                stride);
  });
  for_parts([&](std::int64_t h, std::int64_t begin, std::int64_t end) {  // columns of keys
    blas_.sgemm(end - begin, d, n, 1.0f, {probabilities.head(h) + begin, row, true}, {dout32.data() + h * d, stride},
                dv32.data() + begin * stride + h * d, stride);
    blas_.sgemm(end - begin, d, n, scale, {dscores.head(h) + begin, row, true}, {q32.data() + h * d, stride},
                dk32.data() + begin * stride + h * d, stride);
  });
  for (Float32Result* result : {&dq32, &dk32, &dv32}) result->finish();
}

}  // namespace headrace::tool
