#include "support/standard_attention.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>

namespace headrace::test {
namespace {

// Matrix products are summed in pieces, as every BLAS does.
constexpr std::size_t piece = 256;
// A softmax is summed in as many chains as a vector has lanes: one chain drifts where all terms are alike.
constexpr std::size_t lanes = 16;

template <typename Real>
class Standard {
 public:
  Standard(const DenseCall& call, DType dtype, DType lse_dtype)
      : call_(call),
        dtype_(dtype),
        lse_dtype_(lse_dtype),
        results_(call.empty_results()),
        dk_(results_.dk.size()),
        dv_(results_.dv.size()),
        dk_part_(dk_.size()),
        dv_part_(dv_.size()),
        dbias_(results_.dbias.size()) {}

  Results run() {
    for (const DenseSequence& s : call_.sequences) {
      for (std::int64_t g = 0; g < call_.heads_kv; ++g) {
        keys_ = columns<Real>(call_.k, call_.heads_kv, g, call_.d, s.k_begin, s.k_len);
        values_ = columns<Real>(call_.v, call_.heads_kv, g, call_.dv, s.k_begin, s.k_len);
        for (std::vector<Real>* row : {&score_, &derivative_, &p_, &dp_})
          row->assign(static_cast<std::size_t>(s.k_len), Real{0});
        std::size_t rows = 0;
        for (std::int64_t h = g * call_.group; h < (g + 1) * call_.group; ++h)
          for (std::int64_t i = 0; i < s.q_len; ++i) {
            row(s, g, h, i);
            if (++rows % piece != 0) continue;
            flush(dk_, dk_part_);
            flush(dv_, dv_part_);
          }
      }
    }
    flush(dk_, dk_part_);
    flush(dv_, dv_part_);
    std::transform(dk_.begin(), dk_.end(), results_.dk.begin(), [this](Real x) { return to_dtype(x); });
    std::transform(dv_.begin(), dv_.end(), results_.dv.begin(), [this](Real x) { return to_dtype(x); });
    std::copy(dbias_.begin(), dbias_.end(), results_.dbias.begin());
    return std::move(results_);
  }

 private:
  double to_dtype(Real x) const { return rounded(dtype_, static_cast<double>(x)); }

  void row(const DenseSequence& s, std::int64_t g, std::int64_t h, std::int64_t i) {
    const std::int64_t row_of_q = s.q_begin + i, d = call_.d, dv = call_.dv;
    const auto n = static_cast<std::size_t>(s.k_len);
    const double* q = call_.q.data() + (row_of_q * call_.heads_q + h) * d;
    const double* dout = call_.dout.data() + (row_of_q * call_.heads_q + h) * dv;
    dots(q, keys_, d, score_);
    finish_scores(call_, s, h, i, score_, derivative_);

    const auto sink = static_cast<Real>(call_.sink(h));
    Real m = sink;
    for (const Real x : score_) m = std::max(m, x);
    if (m == static_cast<Real>(-infinity)) return;  // sees nothing: out 0, lse -inf, no gradient
    Real chains[lanes] = {std::exp(sink - m)};
    for (std::size_t j = 0; j < n; ++j) chains[j % lanes] += p_[j] = std::exp(score_[j] - m);
    const Real sum = std::accumulate(std::begin(chains), std::end(chains), Real{0});
    const auto lse = static_cast<Real>(rounded(lse_dtype_, static_cast<double>(m + std::log(sum))));
    results_.lse[call_.lse_at(row_of_q, h)] = static_cast<double>(lse);

    // Forward.
    for (std::size_t j = 0; j < n; ++j) p_[j] = static_cast<Real>(to_dtype(p_[j] / sum * dropout(s, h, i, j)));
    double* out = results_.out.data() + (row_of_q * call_.heads_q + h) * dv;
    for (std::int64_t c = 0; c < dv; ++c) out[c] = to_dtype(weighted_sum(p_, values_, c));

    // Backward.
    Real dot = call_.dlse.empty() ? Real{0} : -static_cast<Real>(call_.dlse[call_.lse_at(row_of_q, h)]);
    for (std::int64_t c = 0; c < dv; ++c) dot += static_cast<Real>(dout[c]) * static_cast<Real>(out[c]);
    dots(dout, values_, dv, dp_);
    for (std::size_t j = 0; j < n; ++j) {
      if (score_[j] == static_cast<Real>(-infinity)) {
        p_[j] = dp_[j] = 0;
        continue;
      }
      const Real p = std::exp(score_[j] - lse), factor = dropout(s, h, i, j);
      const Real ds = p * (factor * dp_[j] - dot);
      if (!dbias_.empty()) dbias_[call_.bias_at(s.b, h, i, static_cast<std::int64_t>(j))] += ds;
      p_[j] = static_cast<Real>(to_dtype(p * factor));
      dp_[j] = static_cast<Real>(to_dtype(ds)) * derivative_[j];
    }
    double* dq = results_.dq.data() + (row_of_q * call_.heads_q + h) * d;
    for (std::int64_t c = 0; c < d; ++c) dq[c] = to_dtype(weighted_sum(dp_, keys_, c));
    for (std::size_t j = 0; j < n; ++j) {
      const auto key = static_cast<std::size_t>((s.k_begin + static_cast<std::int64_t>(j)) * call_.heads_kv + g);
      Real* dk_row = dk_part_.data() + key * static_cast<std::size_t>(d);
      Real* dv_row = dv_part_.data() + key * static_cast<std::size_t>(dv);
      for (std::int64_t c = 0; c < d; ++c) dk_row[c] += dp_[j] * static_cast<Real>(q[c]);
      for (std::int64_t c = 0; c < dv; ++c) dv_row[c] += p_[j] * static_cast<Real>(dout[c]);
    }
    if (!results_.dsinks.empty() && sink != static_cast<Real>(-infinity))
      results_.dsinks[static_cast<std::size_t>(h)] -= static_cast<double>(std::exp(sink - lse) * dot);
  }

  Real dropout(const DenseSequence& s, std::int64_t h, std::int64_t i, std::size_t j) const {
    return static_cast<Real>(call_.dropout_factor(s.b, h, i, static_cast<std::int64_t>(j)));
  }

  static Real weighted_sum(const std::vector<Real>& weights, const std::vector<Real>& all_columns, std::int64_t c) {
    const Real* column = all_columns.data() + static_cast<std::size_t>(c) * weights.size();
    Real sum = 0;
    for (std::size_t begin = 0; begin < weights.size(); begin += piece) {
      Real part = 0;
      for (std::size_t j = begin; j < std::min(begin + piece, weights.size()); ++j) part += weights[j] * column[j];
      sum += part;
    }
    return sum;
  }

  // Ends a piece of the sums over rows.
  static void flush(std::vector<Real>& sums, std::vector<Real>& parts) {
    for (std::size_t n = 0; n < sums.size(); ++n) sums[n] += parts[n];
    std::fill(parts.begin(), parts.end(), Real{0});
  }

  const DenseCall& call_;
  DType dtype_, lse_dtype_;
  Results results_;
  std::vector<Real> dk_, dv_, dk_part_, dv_part_, dbias_;
  std::vector<Real> keys_, values_, score_, derivative_, p_, dp_;
};

}  // namespace

template <typename Real>
Results standard_attention(const DenseCall& call, DType dtype, DType lse_dtype) {
  return Standard<Real>(call, dtype, lse_dtype).run();
}
template Results standard_attention<float>(const DenseCall&, DType, DType);
template Results standard_attention<double>(const DenseCall&, DType, DType);

Results standard_attention(const Call& call) {
  const DenseCall dense(call);
  const DType dtype = call.spec.dtype, lse_dtype = call.lse.dtype();
  return dtype == DType::float64 ? standard_attention<double>(dense, dtype, lse_dtype)
                                 : standard_attention<float>(dense, dtype, lse_dtype);
}

}  // namespace headrace::test
