#include "support/error_bounds.hpp"

#include <algorithm>

namespace headrace::test {
namespace {

// Half the distance from 1 to the next number.
double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return 0x1p-53;
    case DType::float16:
      return 0x1p-11;
    case DType::bfloat16:
      return 0x1p-8;
    default:
      return 0x1p-24;
  }
}

// Half the distance between the smallest numbers, or what arithmetic that flushes them, and what is about as small, to
// zero loses.
double underflow(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return 0x1p-1021;
    case DType::float16:
      return 0x1p-25;
    case DType::bfloat16:
      return 0x1p-121;  // products of pairs flush their operands too, of which a sum has many
    default:
      return 0x1p-125;
  }
}

// Relative error, in unit roundoffs, of a sum of n terms. Equal terms added to a large one may all round the
// same way; beyond a tile, sums are of partial sums.
double sum_growth(std::int64_t n) { return 8.0 + static_cast<double>(std::min<std::int64_t>(n, 64) + n / 8); }

class Bounds {
 public:
  Bounds(const DenseCall& call, const Results& exact, DType dtype, DType lse_dtype, DType bias_dtype)
      : call_(call),
        exact_(exact),
        u_(unit_roundoff(dtype == DType::float64 ? DType::float64 : DType::float32)),
        u_store_(unit_roundoff(dtype)),
        u_lse_(unit_roundoff(lse_dtype)),
        u_bias_(unit_roundoff(bias_dtype)),
        floor_(underflow(dtype)),
        floor_accumulator_(underflow(dtype == DType::float64 ? DType::float64 : DType::float32)),
        floor_bias_(underflow(bias_dtype)),
        bounds_(call.empty_results()) {
    std::fill(bounds_.lse.begin(), bounds_.lse.end(), 0.0);
    absolute_dk_ = bounds_.dk;
    absolute_dv_ = bounds_.dv;
    absolute_dbias_ = bounds_.dbias;
    absolute_dsinks_ = bounds_.dsinks;
  }

  Results run() {
    for (const DenseSequence& s : call_.sequences) {
      for (std::int64_t g = 0; g < call_.heads_kv; ++g) {
        keys_ = columns<double>(call_.k, call_.heads_kv, g, call_.d, s.k_begin, s.k_len);
        values_ = columns<double>(call_.v, call_.heads_kv, g, call_.dv, s.k_begin, s.k_len);
        absolute_keys_ = keys_;
        absolute_values_ = values_;
        for (std::vector<double>* matrix : {&absolute_keys_, &absolute_values_})
          for (double& x : *matrix) x = std::abs(x);
        for (std::vector<double>* row : {&score_, &derivative_, &magnitude_, &dp_, &absolute_dp_, &p_, &p_error_, &ds_,
                                         &ds_error_, &factor_, &score_error_})
          row->assign(static_cast<std::size_t>(s.k_len), 0.0);
        for (std::int64_t h = g * call_.group; h < (g + 1) * call_.group; ++h)
          for (std::int64_t i = 0; i < s.q_len; ++i) row(s, g, h, i);
      }
    }
    const std::int64_t rows = call_.rows_q * call_.group;
    const std::int64_t pairs = call_.rows_q * call_.heads_q * call_.rows_k;
    finish_sums(bounds_.dk, absolute_dk_, exact_.dk, rows, u_store_, floor_);
    finish_sums(bounds_.dv, absolute_dv_, exact_.dv, rows, u_store_, floor_);
    if (!bounds_.dbias.empty())
      finish_sums(bounds_.dbias, absolute_dbias_, exact_.dbias, pairs / static_cast<std::int64_t>(bounds_.dbias.size()),
                  u_bias_, floor_bias_);
    finish_sums(bounds_.dsinks, absolute_dsinks_, exact_.dsinks, rows, 0x1p-24, 0x1p-126);
    return std::move(bounds_);
  }

 private:
  void row(const DenseSequence& s, std::int64_t g, std::int64_t h, std::int64_t i) {
    const std::int64_t row_of_q = s.q_begin + i, d = call_.d, dv = call_.dv;
    const auto n = static_cast<std::size_t>(s.k_len);
    const double* q = call_.q.data() + (row_of_q * call_.heads_q + h) * d;
    const double lse = exact_.lse[call_.lse_at(row_of_q, h)];
    if (lse == -infinity) return;  // exact zeros

    // Scores: each term of q . k, bias and ALiBi leaves its rounding error.
    dots(q, keys_, d, score_);
    finish_scores(call_, s, h, i, score_, derivative_);
    absolute_q_.assign(q, q + d);
    for (double& x : absolute_q_) x = std::abs(x);
    dots(absolute_q_.data(), absolute_keys_, d, magnitude_);
    double lse_error = 0.0;
    std::int64_t visible = 0;
    for (std::size_t j = 0; j < n; ++j) {
      if (score_[j] == -infinity) continue;
      const auto key = static_cast<std::int64_t>(j);
      ++visible;
      double error = sum_growth(d) * u_ * std::abs(call_.scale) * magnitude_[j] + floor_accumulator_;
      if (call_.softcap > 0.0) {
        // tanh: as its argument is wrong, and a few units of its own.
        const double slope = call_.scale != 0.0 ? derivative_[j] / call_.scale : 1.0;
        error = std::min(error * slope + 8.0 * u_ * std::abs(call_.softcap), 2.0 * call_.softcap);
      }
      error += 4.0 * u_ * (std::abs(score_[j]) + std::abs(call_.bias(s.b, h, i, key)) + call_.alibi(s, h, i, key));
      score_error_[j] = error;
      p_[j] = std::exp(score_[j] - lse);
      lse_error += p_[j] * error;
      factor_[j] = call_.dropout_factor(s.b, h, i, key);
    }
    const double sink = call_.sink(h);
    const double p_sink = sink == -infinity ? 0.0 : std::exp(sink - lse);
    // The sum of exponentials, log, the final addition.
    const double n_growth = sum_growth(visible);
    lse_error += n_growth * u_ + 4.0 * u_ * std::abs(lse);
    bounds_.lse[call_.lse_at(row_of_q, h)] = lse_error + u_lse_ * std::abs(lse);
    // P of the backward pass is exp(s - lse) with the lse that the forward pass rounded and stored.
    const double backward_error = 2.0 * lse_error + 2.0 * u_lse_ * std::abs(lse) + 16.0 * u_;

    double* out_bound = bounds_.out.data() + (row_of_q * call_.heads_q + h) * dv;
    const double* out = exact_.out.data() + (row_of_q * call_.heads_q + h) * dv;
    const double* dout = call_.dout.data() + (row_of_q * call_.heads_q + h) * dv;
    for (std::size_t j = 0; j < n; ++j)
      p_error_[j] = score_[j] == -infinity ? 0.0 : weight_error(p_[j], score_error_[j] + lse_error + 16.0 * u_);
    for (std::int64_t c = 0; c < dv; ++c) {
      const double* column = absolute_values_.data() + static_cast<std::size_t>(c) * n;
      double sum = 0.0, absolute = 0.0;
      for (std::size_t j = 0; j < n; ++j) {
        if (score_[j] == -infinity) continue;
        sum += factor_[j] * p_error_[j] * column[j];
        absolute += factor_[j] * p_[j] * column[j];
      }
      out_bound[c] = sum + n_growth * u_ * absolute + u_store_ * std::abs(out[c]) + floor_;
    }

    // Backward.
    const double dlse = call_.dlse.empty() ? 0.0 : call_.dlse[call_.lse_at(row_of_q, h)];
    double dot = -dlse, dot_error = u_ * std::abs(dlse);
    for (std::int64_t c = 0; c < dv; ++c) {
      dot += dout[c] * out[c];
      dot_error += std::abs(dout[c]) * (out_bound[c] + sum_growth(dv) * u_ * std::abs(out[c]));
    }
    dot_error += floor_accumulator_;
    dots(dout, values_, dv, dp_);
    absolute_q_.assign(dout, dout + dv);
    for (double& x : absolute_q_) x = std::abs(x);
    dots(absolute_q_.data(), absolute_values_, dv, absolute_dp_);
    for (std::size_t j = 0; j < n; ++j) {
      ds_[j] = ds_error_[j] = 0.0;
      if (score_[j] == -infinity) continue;
      const double p = p_[j], error = weight_error(p, score_error_[j] + backward_error);
      p_error_[j] = error;
      const double gradient = factor_[j] * dp_[j] - dot;
      const double gradient_error = factor_[j] * sum_growth(dv) * u_ * absolute_dp_[j] + dot_error +
                                    4.0 * u_ * (std::abs(factor_[j] * dp_[j]) + std::abs(dot)) + floor_accumulator_;
      const double before_cap = p * gradient;
      const double before_cap_error =
          error * (std::abs(gradient) + gradient_error) + p * gradient_error + u_store_ * std::abs(before_cap) + floor_;
      if (!bounds_.dbias.empty()) {
        const std::size_t at = call_.bias_at(s.b, h, i, static_cast<std::int64_t>(j));
        bounds_.dbias[at] += before_cap_error;
        absolute_dbias_[at] += std::abs(before_cap);
      }
      // 1 - t^2 loses digits where tanh saturates, and follows the error of its argument.
      double derivative_error = 4.0 * u_ * std::abs(derivative_[j]);
      if (call_.softcap > 0.0) {
        const double argument_error = sum_growth(d) * u_ * std::abs(call_.scale) * magnitude_[j] / call_.softcap;
        derivative_error +=
            std::abs(call_.scale) *
            std::min(1.0, 16.0 * u_ + 2.0 * argument_error * std::abs(derivative_[j] / nonzero(call_.scale)));
      }
      ds_[j] = before_cap * derivative_[j];
      ds_error_[j] = before_cap_error * (std::abs(derivative_[j]) + derivative_error) +
                     std::abs(before_cap) * derivative_error + u_store_ * std::abs(ds_[j]) + floor_;
    }
    double* dq_bound = bounds_.dq.data() + (row_of_q * call_.heads_q + h) * d;
    const double* dq = exact_.dq.data() + (row_of_q * call_.heads_q + h) * d;
    for (std::int64_t c = 0; c < d; ++c) {
      const double* column = absolute_keys_.data() + static_cast<std::size_t>(c) * n;
      double sum = 0.0, absolute = 0.0;
      for (std::size_t j = 0; j < n; ++j) {
        if (score_[j] == -infinity) continue;
        sum += ds_error_[j] * column[j];
        absolute += std::abs(ds_[j]) * column[j];
      }
      dq_bound[c] = sum + n_growth * u_ * absolute + u_store_ * std::abs(dq[c]) + floor_;
    }
    for (std::size_t j = 0; j < n; ++j) {
      if (score_[j] == -infinity) continue;
      const auto key = static_cast<std::size_t>((s.k_begin + static_cast<std::int64_t>(j)) * call_.heads_kv + g);
      add_scaled(ds_error_[j], q, d, bounds_.dk.data() + key * static_cast<std::size_t>(d));
      add_scaled(ds_[j], q, d, absolute_dk_.data() + key * static_cast<std::size_t>(d));
      add_scaled(factor_[j] * p_error_[j], dout, dv, bounds_.dv.data() + key * static_cast<std::size_t>(dv));
      add_scaled(factor_[j] * p_[j], dout, dv, absolute_dv_.data() + key * static_cast<std::size_t>(dv));
    }
    if (!bounds_.dsinks.empty() && p_sink > 0.0) {
      const auto at = static_cast<std::size_t>(h);
      const double error = weight_error(p_sink, 4.0 * u_ * std::abs(sink) + backward_error);
      bounds_.dsinks[at] += error * (std::abs(dot) + dot_error) + p_sink * dot_error;
      absolute_dsinks_[at] += p_sink * std::abs(dot);
    }
  }

  // Of a weight p whose exponent is wrong by `exponent_error`, then rounded for the product with V.
  [[nodiscard]] double weight_error(double p, double exponent_error) const {
    const double relative = std::expm1(std::min(exponent_error, 40.0));
    return std::min(1.0, p * relative + floor_accumulator_) + u_store_ * p + (u_store_ > u_ ? floor_ : 0.0);
  }

  static double nonzero(double x) { return x == 0.0 ? 1.0 : x; }

  static void add_scaled(double factor, const double* row, std::int64_t n, double* sum) {
    factor = std::abs(factor);
    for (std::int64_t c = 0; c < n; ++c) sum[c] += factor * std::abs(row[c]);
  }

  // Adds what the sums over `terms` rows or pairs and the last rounding lose.
  void finish_sums(std::vector<double>& bounds, const std::vector<double>& absolute, const std::vector<double>& exact,
                   std::int64_t terms, double u, double floor) const {
    const double growth = sum_growth(terms);
    for (std::size_t at = 0; at < bounds.size(); ++at) {
      // An element that nothing reached is an exact zero.
      if (bounds[at] == 0.0 && absolute[at] == 0.0) continue;
      bounds[at] += growth * u_ * absolute[at] + u * std::abs(exact[at]) + floor;
    }
  }

  const DenseCall& call_;
  const Results& exact_;
  double u_, u_store_, u_lse_, u_bias_;
  double floor_, floor_accumulator_, floor_bias_;
  Results bounds_;
  std::vector<double> absolute_dk_, absolute_dv_, absolute_dbias_, absolute_dsinks_;
  std::vector<double> keys_, values_, absolute_keys_, absolute_values_, absolute_q_;
  std::vector<double> score_, derivative_, magnitude_, score_error_, p_, p_error_, factor_;
  std::vector<double> dp_, absolute_dp_, ds_, ds_error_;
};

}  // namespace

Results error_bounds(const DenseCall& call, const Results& exact, DType dtype, DType lse_dtype, DType bias_dtype) {
  return Bounds(call, exact, dtype, lse_dtype, bias_dtype).run();
}

}  // namespace headrace::test
