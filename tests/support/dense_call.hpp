// A Call as plain row-major numbers, and the scores of its rows straight from the definition in
// headrace.h. Shares nothing with the library but the dropout mask that the public interface returns.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "support/problem.hpp"

namespace headrace::test {

// Row-major values of what a call writes; empty where absent.
struct Results {
  std::vector<double> out, lse, dq, dk, dv, dbias, dsinks;
};

struct DenseSequence {
  std::int64_t b = 0;                                           // index in masks, bias, dropout
  std::int64_t q_begin = 0, q_len = 0, k_begin = 0, k_len = 0;  // rows of q and k
};

class DenseCall {
 public:
  explicit DenseCall(const Call& call);

  // q and dout are [rows_q, heads_q, ...], k and v [rows_k, heads_kv, ...].
  std::int64_t rows_q = 0, rows_k = 0, heads_q = 0, heads_kv = 0, group = 1, d = 0, dv = 0;
  std::vector<DenseSequence> sequences;
  std::vector<double> q, k, v, dout, dlse, sinks;
  Shape bias_shape;  // of dbias too
  double scale = 1.0, softcap = 0.0;
  double kept_scale = 1.0;  // 1 / (1 - dropout_p)

  // Where lse of a row of q lies in Results::lse.
  [[nodiscard]] std::size_t lse_at(std::int64_t row, std::int64_t h) const;
  [[nodiscard]] std::size_t bias_at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return at(bias_shape, b, h, i, j);
  }
  // By position, masks and biases of -inf.
  [[nodiscard]] bool visible(const DenseSequence& s, std::int64_t h, std::int64_t i, std::int64_t j) const;
  [[nodiscard]] double bias(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return bias_.empty() ? 0.0 : bias_[bias_at(b, h, i, j)];
  }
  [[nodiscard]] double alibi(const DenseSequence& s, std::int64_t h, std::int64_t i, std::int64_t j) const;
  [[nodiscard]] double sink(std::int64_t h) const {
    return sinks.empty() ? -infinity : sinks[static_cast<std::size_t>(h)];
  }
  // 0 where dropped, else 1 / (1 - dropout_p).
  [[nodiscard]] double dropout_factor(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const;

  // All results with their sizes: out 0, lse -inf, gradients 0, as where there is nothing to do.
  [[nodiscard]] Results empty_results() const;

 private:
  static std::size_t at(const Shape& shape, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
    const auto index = [](std::int64_t size, std::int64_t x) { return size == 1 ? 0 : x; };
    return static_cast<std::size_t>(
        ((index(shape[0], b) * shape[1] + index(shape[1], h)) * shape[2] + index(shape[2], i)) * shape[3] +
        index(shape[3], j));
  }

  Spec spec_;
  std::vector<double> bias_, slopes_;
  std::vector<double> mask_, blocks_;  // 0 or 1
  std::vector<std::uint8_t> keep_;
  Shape mask_shape_, blocks_shape_, keep_shape_;
  bool has_dlse_ = false, has_dbias_ = false, has_dsinks_ = false;
};

// One head of keys or values with the vectors as columns: [dim, length], so that a loop over keys is
// contiguous.
template <typename Real>
std::vector<Real> columns(const std::vector<double>& values, std::int64_t heads, std::int64_t head, std::int64_t dim,
                          std::int64_t begin, std::int64_t length) {
  std::vector<Real> result(static_cast<std::size_t>(dim * length));
  for (std::int64_t j = 0; j < length; ++j)
    for (std::int64_t c = 0; c < dim; ++c)
      result[static_cast<std::size_t>(c * length + j)] =
          static_cast<Real>(values[static_cast<std::size_t>(((begin + j) * heads + head) * dim + c)]);
  return result;
}

// result[j] = sum_c row[c] * columns[c, j]
template <typename Real>
void dots(const double* row, const std::vector<Real>& columns_of_keys, std::int64_t dim, std::vector<Real>& result) {
  const std::size_t n = result.size();
  std::fill(result.begin(), result.end(), Real{0});
  for (std::int64_t c = 0; c < dim; ++c) {
    const auto factor = static_cast<Real>(row[c]);
    const Real* column = columns_of_keys.data() + static_cast<std::size_t>(c) * n;
    for (std::size_t j = 0; j < n; ++j) result[j] += factor * column[j];
  }
}

// The scores of row i of one head in the arithmetic of Real: q . k arrives in `score`, the score, -inf where
// hidden, leaves in it. derivative: of the score by q . k.
template <typename Real>
void finish_scores(const DenseCall& call, const DenseSequence& s, std::int64_t h, std::int64_t i,
                   std::vector<Real>& score, std::vector<Real>& derivative) {
  const auto scale = static_cast<Real>(call.scale), cap = static_cast<Real>(call.softcap);
  for (std::int64_t j = 0; j < s.k_len; ++j) {
    const auto n = static_cast<std::size_t>(j);
    derivative[n] = scale;
    if (!call.visible(s, h, i, j)) {
      score[n] = static_cast<Real>(-infinity);
      continue;
    }
    Real x = scale * score[n];
    if (cap > 0) {
      const Real t = std::tanh(x / cap);
      x = cap * t;
      derivative[n] = scale * (1 - t * t);
    }
    x += static_cast<Real>(call.bias(s.b, h, i, j));
    x -= static_cast<Real>(call.alibi(s, h, i, j));
    score[n] = x;
  }
}

}  // namespace headrace::test
