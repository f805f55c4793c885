// One score after another, as the specification in headrace.h reads. It deliberately shares nothing
// with the tile walk and the kernels that it is there to check, but the dropout bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "describe/dropout.hpp"
#include "describe/element.hpp"
#include "describe/problem.hpp"

namespace headrace::reference {

inline double dot(const double* a, const double* b, std::int64_t count) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t n = 0; n < count; ++n) sum += a[n] * b[n];
  return sum;
}

// y += factor * x
inline void add_scaled(double factor, const double* x, std::int64_t count, double* y) {
#pragma omp simd
  for (std::int64_t n = 0; n < count; ++n) y[n] += factor * x[n];
}

// The scores of sequence b, query head h.
class Scores {
 public:
  Scores(const Problem& problem, const Buffers& buffers, std::int64_t b, std::int64_t h)
      : problem_(problem),
        buffers_(buffers),
        b_(b),
        h_(h),
        sequence_(problem.sequences[static_cast<std::size_t>(b)]),
        dropout_{problem.dropout_p, problem.seed} {
    if (problem.has_alibi)
      slope_ = buffers.alibi_slopes[b * problem.alibi_batch_stride + h * problem.alibi_head_stride];
    if (problem.has_sinks) sink_ = buffers.sinks[h * problem.sinks_stride];
  }

  // Whether every mask that is given lets query i see key j.
  [[nodiscard]] bool visible(std::int64_t i, std::int64_t j) const {
    const std::int64_t shift = problem_.causal == HR_CAUSAL_TOP_LEFT ? 0 : sequence_.k_len - sequence_.q_len;
    const std::int64_t ahead = j - (i + shift);
    // Compared rather than added to, so that no bound can overflow; HR_UNBOUNDED is never exceeded.
    if (problem_.causal != HR_CAUSAL_NONE && ahead > 0) return false;
    if (-ahead > problem_.window_left || ahead > problem_.window_right) return false;
    if (problem_.has_block_mask &&
        buffers_.block_mask[problem_.block_mask.at(b_, h_, i / problem_.block_q, j / problem_.block_k)] == 0)
      return false;
    if (problem_.has_mask && buffers_.mask[problem_.mask.at(b_, h_, i, j)] == 0) return false;
    return !problem_.has_bias || bias(i, j) != -std::numeric_limits<double>::infinity();
  }

  // The score of a visible key.
  [[nodiscard]] double score(std::int64_t i, std::int64_t j, double q_dot_k) const {
    double s = problem_.scale * q_dot_k;
    if (problem_.softcap > 0.0) s = problem_.softcap * std::tanh(s / problem_.softcap);
    if (problem_.has_bias) s += bias(i, j);
    if (problem_.has_alibi) s -= slope_ * std::abs(static_cast<double>(i + (sequence_.k_len - sequence_.q_len) - j));
    return s;
  }

  // The derivative of the score by q . k. tanh' = 1 / cosh^2 keeps its relative accuracy where the
  // softcap saturates, which 1 - tanh^2 does not.
  [[nodiscard]] double score_derivative(double q_dot_k) const {
    if (problem_.softcap <= 0.0) return problem_.scale;
    const double cosh = std::cosh(problem_.scale * q_dot_k / problem_.softcap);
    return problem_.scale / cosh / cosh;
  }

  // What dropout multiplies p by.
  [[nodiscard]] double dropout_factor(std::int64_t i, std::int64_t j) const {
    if (!dropout_.active()) return 1.0;
    return dropout_.keep(b_, h_, i, j) ? dropout_.kept_scale() : 0.0;
  }

  // The sink logit of the head; -inf: none.
  [[nodiscard]] double sink() const { return sink_; }

 private:
  [[nodiscard]] double bias(std::int64_t i, std::int64_t j) const {
    return load_element(buffers_.bias, problem_.bias_dtype, problem_.bias.at(b_, h_, i, j));
  }

  const Problem& problem_;
  const Buffers& buffers_;
  std::int64_t b_, h_;
  Sequence sequence_;
  Dropout dropout_;
  double slope_ = 0.0;
  double sink_ = -std::numeric_limits<double>::infinity();
};

}  // namespace headrace::reference
