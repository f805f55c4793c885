#include "spot_check.hpp"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <sstream>

#include "support/dense_call.hpp"

namespace headrace::test {
namespace {

class SpotCheck {
 public:
  SpotCheck(const Call& call, const Results& results) : call_(call), results_(results) {
    // dout . out of every row
    const auto dv = static_cast<std::size_t>(call_.dv);
    for (std::size_t row = 0; row < results.out.size() / std::max<std::size_t>(dv, 1); ++row) {
      const auto at = static_cast<std::ptrdiff_t>(row * dv);
      dots_.push_back(std::inner_product(results.out.begin() + at, results.out.begin() + at + call_.dv,
                                         call_.dout.begin() + at, 0.0));
    }
  }

  [[nodiscard]] std::vector<double> dq(const DenseSequence& s, std::int64_t h, std::int64_t i) const {
    std::vector<double> sum(static_cast<std::size_t>(call_.d), 0.0);
    for (std::int64_t j = 0; j < s.k_len; ++j) add(sum, pair(s, h, i, j).ds, k(s, h, j), call_.d);
    return sum;
  }
  // Of head g of keys.
  [[nodiscard]] std::pair<std::vector<double>, std::vector<double>> dk_and_dv(const DenseSequence& s, std::int64_t g,
                                                                              std::int64_t j) const {
    std::vector<double> dk(static_cast<std::size_t>(call_.d), 0.0), dv(static_cast<std::size_t>(call_.dv), 0.0);
    for (std::int64_t h = g * call_.group; h < (g + 1) * call_.group; ++h)
      for (std::int64_t i = 0; i < s.q_len; ++i) {
        const Pair p = pair(s, h, i, j);
        add(dk, p.ds, q(s, h, i), call_.d);
        add(dv, p.weight, dout(s, h, i), call_.dv);
      }
    return {dk, dv};
  }
  [[nodiscard]] const DenseCall& call() const { return call_; }

 private:
  struct Pair {
    double weight = 0.0;  // p after dropout
    double ds = 0.0;      // the gradient of q . k
  };

  [[nodiscard]] std::size_t query_row(const DenseSequence& s, std::int64_t h, std::int64_t i) const {
    return static_cast<std::size_t>((s.q_begin + i) * call_.heads_q + h);
  }
  [[nodiscard]] const double* q(const DenseSequence& s, std::int64_t h, std::int64_t i) const {
    return call_.q.data() + query_row(s, h, i) * static_cast<std::size_t>(call_.d);
  }
  [[nodiscard]] const double* dout(const DenseSequence& s, std::int64_t h, std::int64_t i) const {
    return call_.dout.data() + query_row(s, h, i) * static_cast<std::size_t>(call_.dv);
  }
  [[nodiscard]] std::int64_t key_row(const DenseSequence& s, std::int64_t h, std::int64_t j) const {
    return (s.k_begin + j) * call_.heads_kv + h / call_.group;
  }
  [[nodiscard]] const double* k(const DenseSequence& s, std::int64_t h, std::int64_t j) const {
    return call_.k.data() + key_row(s, h, j) * call_.d;
  }
  [[nodiscard]] const double* v(const DenseSequence& s, std::int64_t h, std::int64_t j) const {
    return call_.v.data() + key_row(s, h, j) * call_.dv;
  }
  static void add(std::vector<double>& sum, double factor, const double* row, std::int64_t n) {
    if (factor == 0.0) return;
    for (std::int64_t c = 0; c < n; ++c) sum[static_cast<std::size_t>(c)] += factor * row[c];
  }

  [[nodiscard]] Pair pair(const DenseSequence& s, std::int64_t h, std::int64_t i, std::int64_t j) const {
    if (!call_.visible(s, h, i, j)) return {};
    double score = call_.scale * std::inner_product(q(s, h, i), q(s, h, i) + call_.d, k(s, h, j), 0.0);
    double derivative = call_.scale;
    if (call_.softcap > 0.0) {
      const double t = std::tanh(score / call_.softcap);
      score = call_.softcap * t;
      derivative *= 1.0 - t * t;
    }
    score += call_.bias(s.b, h, i, j) - call_.alibi(s, h, i, j);
    const double p = std::exp(score - results_.lse[call_.lse_at(s.q_begin + i, h)]);
    const double factor = call_.dropout_factor(s.b, h, i, j);
    const double dp = std::inner_product(dout(s, h, i), dout(s, h, i) + call_.dv, v(s, h, j), 0.0);
    return {p * factor, p * (factor * dp - dots_[query_row(s, h, i)]) * derivative};
  }

  DenseCall call_;
  const Results& results_;
  std::vector<double> dots_;
};

// Of drawn rows of a gradient.
struct Sum {
  double difference = 0.0, norm = 0.0;
  void add(const std::vector<double>& exact, const std::vector<double>& got, std::size_t row) {
    for (std::size_t c = 0; c < exact.size(); ++c) {
      const double x = got[row * exact.size() + c];
      difference += (x - exact[c]) * (x - exact[c]);
      norm += exact[c] * exact[c];
    }
  }
  [[nodiscard]] double error() const { return std::sqrt(difference / norm); }
};

std::int64_t drawn(Rng& rng, std::int64_t n, std::int64_t size) {
  return n == 0 ? 0 : n == 1 ? size - 1 : rng.integer(0, size - 1);
}

}  // namespace

std::string spot_check(const Call& call, const Results& results, std::int64_t count, double tolerance) {
  const SpotCheck check(call, results);
  const Spec& spec = call.spec;
  Sum dq, dk, dv;
  std::mutex mutex;
  in_parallel(static_cast<std::size_t>(count), [&](std::size_t n) {
    Rng rng(mix(spec.seed, n));
    const DenseSequence& s = check.call().sequences[static_cast<std::size_t>(rng.integer(0, spec.batch - 1))];
    const std::int64_t h = rng.integer(0, spec.heads_q() - 1), g = rng.integer(0, spec.heads_kv - 1);
    const std::int64_t i = drawn(rng, static_cast<std::int64_t>(n), spec.seqlen_q);
    const std::int64_t j = drawn(rng, static_cast<std::int64_t>(n), spec.seqlen_k);
    const std::vector<double> of_query = check.dq(s, h, i);
    const auto [of_key, of_value] = check.dk_and_dv(s, g, j);
    const std::lock_guard lock(mutex);
    dq.add(of_query, results.dq, static_cast<std::size_t>((s.q_begin + i) * spec.heads_q() + h));
    const auto key = static_cast<std::size_t>((s.k_begin + j) * spec.heads_kv + g);
    dk.add(of_key, results.dk, key);
    dv.add(of_value, results.dv, key);
  });
  std::printf("%s: dq %.2e, dk %.2e, dv %.2e of %d rows\n", spec.describe().c_str(), dq.error(), dk.error(), dv.error(),
              static_cast<int>(count));
  std::ostringstream wrong;
  for (const auto& [name, sum] : {std::pair("dq", &dq), std::pair("dk", &dk), std::pair("dv", &dv)})
    if (!(sum->error() <= tolerance)) wrong << "  " << name << ": the relative error is " << sum->error() << '\n';
  return wrong.str();
}

}  // namespace headrace::test
