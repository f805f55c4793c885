// The accuracy contract at real sizes and on hostile inputs.
//
// Inputs from N(0, 1): relative Frobenius error of out at most 2e-6 (float32), 1e-3 (float16), 8e-3
// (bfloat16), of gradients three times that; of lse, absolutely, 1e-5 and 1e-3. Any input: at most twice the error
// of standard attention with float32 scores and the same rounding of P; lse within 16 * 2^-24 of the largest logit.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <functional>

#include "support/compare.hpp"
#include "support/standard_attention.hpp"

namespace headrace::test {
namespace {

struct Contract {
  double out, gradient, lse;
};

Contract contract_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return {1e-13, 1e-12, 1e-13};
    case DType::float16:
      return {1e-3, 3e-3, 1e-3};
    case DType::bfloat16:
      return {8e-3, 2.4e-2, 1e-3};
    default:
      return {2e-6, 6e-6, 1e-5};
  }
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0.0;
  for (std::size_t n = 0; n < a.size(); ++n)
    if (a[n] != b[n]) largest = std::max(largest, std::abs(a[n] - b[n]));
  return largest;
}

double largest_of(const std::vector<double>& values) {
  double largest = 0.0;
  for (const double x : values) largest = std::max(largest, std::abs(x));
  return largest;
}

double square_sum(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double x : values) sum += x * x;
  return sum;
}

double square_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0.0;
  for (std::size_t n = 0; n < a.size(); ++n) sum += (a[n] - b[n]) * (a[n] - b[n]);
  return sum;
}

struct Member {
  const char* name;
  std::vector<double> Results::*values;
};
constexpr std::array<Member, 3> gradients{{{"dq", &Results::dq}, {"dk", &Results::dk}, {"dv", &Results::dv}}};

Spec spec_of(DType dtype, std::int64_t seqlen_q, std::int64_t seqlen_k, std::int64_t dim) {
  Spec spec{.seed = test_rng().bits(), .dtype = dtype, .lse_float64 = dtype == DType::float64};
  spec.seqlen_q = seqlen_q;
  spec.seqlen_k = seqlen_k;
  spec.head_dim = spec.value_dim = dim;
  spec.threads = 0;
  return spec;
}

class Normal : public ::testing::TestWithParam<DType> {
 protected:
  static void expect_contract(const Spec& spec) {
    Call call = make_call(spec);
    const Outcome outcome = run(call, Backend::cpu);
    ASSERT_EQ(outcome.failure, "");
    const Results exact = exact_results(call);
    const Contract contract = contract_of(spec.dtype);
    const double out = relative_difference(outcome.results.out, exact.out);
    const double lse = largest_difference(outcome.results.lse, exact.lse);
    std::printf("%s: out %.2e, lse %.2e", name_of(spec.dtype), out, lse);
    EXPECT_LE(out, contract.out) << spec.describe();
    EXPECT_LE(lse, contract.lse) << spec.describe();
    for (const auto& [name, member] : gradients) {
      const double error = relative_difference(outcome.results.*member, exact.*member);
      std::printf(", %s %.2e", name, error);
      EXPECT_LE(error, contract.gradient) << name << ' ' << spec.describe();
    }
    std::printf("\n");
  }
};

TEST_P(Normal, KeepsTheContract) {
  Spec spec = spec_of(GetParam(), 512, 512, 64);
  spec.group = 2;
  expect_contract(spec);
  spec.causal = Causal::bottom_right;
  expect_contract(spec);
  expect_contract(spec_of(GetParam(), 200, 1500, 128));
  expect_contract(spec_of(GetParam(), 300, 300, 512));
  expect_contract(spec_of(GetParam(), 600, 300, 7));
}

TEST_P(Normal, KeepsTheContractHeavy) {
  if (!run_is_full()) GTEST_SKIP() << "HEADRACE_TEST_SCALE asks for less";
  Spec spec = spec_of(GetParam(), 2048, 2048, 64);
  expect_contract(spec);
  spec = spec_of(GetParam(), 1024, 1024, 128);
  spec.causal = Causal::bottom_right;
  spec.dlse = true;
  expect_contract(spec);
}

INSTANTIATE_TEST_SUITE_P(Inputs, Normal,
                         ::testing::Values(DType::float32, DType::float16, DType::bfloat16, DType::float64),
                         [](const auto& test) { return name_of(test.param); });

// float32, float16, bfloat16: what standard attention is measured in.
class Hostile : public ::testing::TestWithParam<DType> {
 protected:
  // Changes q, k, v, dout of a call; the rest follows.
  using Change = std::function<void(std::vector<double>& q, std::vector<double>& k, std::vector<double>& v,
                                    std::vector<double>& dout, Rng& rng)>;

  static Call call_of(const Spec& spec, const Change& change) {
    Call call = make_call(spec);
    std::vector<double> q = call.q.values(), k = call.k.values(), v = call.v.values(), dout = call.dout.values();
    Rng rng(spec.seed);
    change(q, k, v, dout, rng);
    call.q.fill(q);
    call.k.fill(k);
    call.v.fill(v);
    call.dout.fill(dout);
    return call;
  }

  // Finite everywhere, and at most twice the error of standard attention where that is above the contract; over
  // a few draws together, so that luck evens out.
  static void expect_as_good_as_standard(Spec spec, const Change& change) {
    constexpr std::array<Member, 4> members{
        {{"out", &Results::out}, {"dq", &Results::dq}, {"dk", &Results::dk}, {"dv", &Results::dv}}};
    const Contract contract = contract_of(spec.dtype);
    struct Squares {
      double got = 0.0, standard = 0.0, bounds = 0.0, exact = 0.0;
    };
    std::array<Squares, members.size()> sums;
    for (int draw = 0; draw < 4; ++draw, ++spec.seed) {
      Call call = call_of(spec, change);
      const Outcome outcome = run(call, Backend::cpu);
      ASSERT_EQ(outcome.failure, "");
      const Results exact = exact_results(call), standard = standard_attention(call);
      const Results bounds = error_bounds(DenseCall(call), exact, spec.dtype, call.lse.dtype(), call.bias.dtype());
      EXPECT_LE(largest_difference(outcome.results.lse, exact.lse),
                std::max(1e-5, 16.0 * 0x1p-24 * largest_of(exact.lse)))
          << "lse " << spec.describe();
      for (std::size_t n = 0; n < members.size(); ++n) {
        const std::vector<double>&got = outcome.results.*members[n].values, &right = exact.*members[n].values;
        for (const double x : got) ASSERT_TRUE(std::isfinite(x)) << members[n].name << ' ' << spec.describe();
        sums[n].got += square_difference(got, right);
        sums[n].standard += square_difference(standard.*members[n].values, right);
        sums[n].bounds += square_sum(bounds.*members[n].values);
        sums[n].exact += square_sum(right);
      }
    }
    std::printf("%s", name_of(spec.dtype));
    for (std::size_t n = 0; n < members.size(); ++n) {
      const double error = std::sqrt(sums[n].got), of_standard = std::sqrt(sums[n].standard);
      const double norm = std::sqrt(sums[n].exact), bound = std::sqrt(sums[n].bounds);
      std::printf("  %s %.2e (standard %.2e)", members[n].name, error / norm, of_standard / norm);
      // Where rounding alone explains more than there is, as in sums that cancel to nothing, the standard may be
      // exact by luck; then only the bounds mean something.
      const double in_contract = (n == 0 ? contract.out : contract.gradient) * norm;
      EXPECT_LE(error, bound > norm ? bound : std::max(in_contract, 2.0 * of_standard))
          << members[n].name << ", standard " << of_standard << ", exact " << norm << ": " << spec.describe();
    }
    std::printf("\n");
  }

  static void scale(std::vector<double>& values, double factor) {
    for (double& x : values) x *= factor;
  }
};

TEST_P(Hostile, LargeLogits) {
  expect_as_good_as_standard(spec_of(GetParam(), 150, 600, 64), [](auto& q, auto& k, auto&, auto&, Rng&) {
    scale(q, 10.0);
    scale(k, 10.0);
  });
}

TEST_P(Hostile, OneDominantKey) {
  expect_as_good_as_standard(spec_of(GetParam(), 150, 600, 64), [](auto& q, auto& k, auto&, auto&, Rng&) {
    for (double& x : q) x += 1.0;
    for (std::size_t c = 0; c < 64; ++c) k[313 * 64 + c] += 1.3;
  });
}

TEST_P(Hostile, LogitsOffsetBy1e4) {
  expect_as_good_as_standard(spec_of(GetParam(), 150, 600, 64), [](auto& q, auto& k, auto&, auto&, Rng&) {
    for (std::size_t n = 0; n < q.size(); n += 64) q[n] = 16.0;
    for (std::size_t n = 0; n < k.size(); n += 64) k[n] = 5000.0;
  });
}

TEST_P(Hostile, ValuesOffsetBy1e4) {
  expect_as_good_as_standard(spec_of(GetParam(), 150, 600, 64), [](auto&, auto&, auto& v, auto&, Rng&) {
    for (double& x : v) x += 1e4;
  });
}

TEST_P(Hostile, WindowOfOneKey) {
  Spec spec = spec_of(GetParam(), 600, 600, 64);
  spec.window_left = spec.window_right = 0;
  Call call = make_call(spec);
  const Outcome outcome = run(call, Backend::cpu);
  ASSERT_EQ(outcome.failure, "");
  EXPECT_EQ(outcome.results.out, call.v.values());
  EXPECT_EQ(outcome.results.dv, call.dout.values());
  // No choice, no gradient: dq and dk are what is left of sums that cancel.
  const double left = largest_of(call.q.values()) * largest_of(call.k.values()) * 64 * 0x1p-22;
  EXPECT_LE(largest_of(outcome.results.dq), left);
  EXPECT_LE(largest_of(outcome.results.dk), left);
}

TEST_P(Hostile, AllScoresEqual_Heavy) {
  for (const std::int64_t dim : {64, 128, 512}) {
    const std::int64_t seqlen_k = 1500;
    Spec spec = spec_of(GetParam(), 20, seqlen_k, dim);
    expect_as_good_as_standard(spec, [](auto& q, auto& k, auto& v, auto&, Rng& rng) {
      std::fill(q.begin(), q.end(), 0.5 + rng.uniform());
      std::fill(k.begin(), k.end(), 0.5 + rng.uniform());
      std::fill(v.begin(), v.end(), 0.5 + rng.uniform());
    });
  }
}

TEST_P(Hostile, AllScoresEqual_OverLongKeys) {
  // Sums of equal terms: every rounding goes the same way.
  Spec spec = spec_of(GetParam(), 130, 30000, 8);
  Call call = call_of(spec, [](auto& q, auto&, auto& v, auto&, Rng& rng) {
    std::fill(q.begin(), q.end(), 0.0);
    std::fill(v.begin(), v.end(), 1.0 + rng.uniform());
  });
  Attention attention = call.attention(Backend::cpu);
  forward(attention);
  const double v = call.v.values()[0];
  for (const double x : call.out.values()) ASSERT_NEAR(x, v, v * 10.0 * contract_of(GetParam()).out);
  for (const double x : call.lse.values()) ASSERT_NEAR(x, std::log(30000.0), 1e-5);
}

TEST_P(Hostile, LseFarBelowMinus88) {
  Spec spec = spec_of(GetParam(), 150, 600, 64);
  expect_as_good_as_standard(spec, [](auto& q, auto& k, auto&, auto&, Rng&) {
    scale(q, 0.1);
    scale(k, 0.1);
    for (std::size_t n = 0; n < q.size(); n += 64) q[n] = 4.0;
    for (std::size_t n = 0; n < k.size(); n += 64) k[n] = -500.0;  // scores near -250
  });
}

TEST_P(Hostile, SoftcapLargeAndSmall) {
  for (const double cap : {0.1, 1.0, 50.0, 1e4, 1e8}) {
    if (!run_is_full() && cap != 50.0) continue;
    SCOPED_TRACE(cap);
    Spec spec = spec_of(GetParam(), 200, 300, 64);
    spec.softcap = cap;
    expect_as_good_as_standard(spec, [](auto& q, auto& k, auto&, auto&, Rng&) {
      scale(q, 4.0);
      scale(k, 4.0);
    });
  }
}

TEST_P(Hostile, SoftcapBeyondFloat32_ActsLikeItsLimit) {
  Spec spec = spec_of(GetParam(), 40, 300, 16);
  for (const double cap : {1e-300, 1e-42, 1e42, 1e300}) {
    SCOPED_TRACE(cap);
    spec.softcap = cap;
    Call call = make_call(spec);
    const Outcome outcome = run(call, Backend::cpu);
    ASSERT_EQ(outcome.failure, "");
    const Results exact = exact_results(call);
    EXPECT_LE(relative_difference(outcome.results.out, exact.out), contract_of(GetParam()).out);
    EXPECT_LE(relative_difference(outcome.results.dv, exact.dv), contract_of(GetParam()).gradient);
    EXPECT_LE(largest_difference(outcome.results.lse, exact.lse), 1e-5);
    for (const Member& gradient : gradients)
      for (const double x : outcome.results.*gradient.values) ASSERT_TRUE(std::isfinite(x)) << gradient.name;
  }
}

TEST_P(Hostile, TinyInputs) {
  const double factor = GetParam() == DType::float16 ? 1e-4 : 1e-15;
  Spec spec = spec_of(GetParam(), 200, 300, 64);
  spec.scale = 1.0;
  Call call = call_of(spec, [factor](auto& q, auto& k, auto& v, auto& dout, Rng&) {
    for (std::vector<double>* values : {&q, &k, &v, &dout}) scale(*values, factor);
  });
  const Results results = run_and_expect_exact(call, Backend::cpu);
  EXPECT_NE(largest_of(results.out), 0.0);
  EXPECT_NE(largest_of(results.dv), 0.0);
}

TEST_P(Hostile, LargeValuesAndGradients_AverageWithoutOverflow) {
  // Near the largest of the dtype; the average of such values is as large, their sum would not fit.
  const double largest = GetParam() == DType::float16 ? 65504.0 : 3e38;
  Spec spec = spec_of(GetParam(), 40, 700, 16);
  Call call = call_of(spec, [largest](auto&, auto&, auto& v, auto& dout, Rng&) {
    for (double& x : v) x = largest;
    scale(dout, 0.0);
  });
  const Outcome outcome = run(call, Backend::cpu);
  ASSERT_EQ(outcome.failure, "");
  const double v = call.v.values()[0];
  for (const double x : outcome.results.out) ASSERT_NEAR(x / v, 1.0, 2.0 * contract_of(GetParam()).out);
  for (const auto& [name, member] : gradients)
    for (const double x : outcome.results.*member) ASSERT_EQ(x, 0.0) << name;
}

INSTANTIATE_TEST_SUITE_P(Inputs, Hostile, ::testing::Values(DType::float32, DType::float16, DType::bfloat16),
                         [](const auto& test) { return name_of(test.param); });

// Scores at the ends of float32. A factor such as log2(e) on top of them would overflow.
TEST(ExtremeScores, NearTheLargestFloat) {
  for (const double sign : {1.0, -1.0}) {
    SCOPED_TRACE(sign);
    Spec spec = spec_of(DType::float32, 9, 300, 8);
    spec.scale = 1.0;
    Call call = make_call(spec);
    std::vector<double> q(call.q.values().size(), 0.0), k(call.k.values().size(), 0.0);
    for (std::size_t n = 0; n < q.size(); n += 8) q[n] = 3e19;
    // All keys but one at +-3e38; key 123 is where the score is larger.
    for (std::size_t n = 0; n < k.size(); n += 8) k[n] = sign * 1e19;
    k[123 * 8] = sign > 0 ? 1.1e19 : -0.9e19;
    call.q.fill(q);
    call.k.fill(k);
    const Outcome outcome = run(call, Backend::cpu);
    ASSERT_EQ(outcome.failure, "");
    const std::vector<double> v = call.v.values();
    const double score = 3e19 * k[123 * 8];
    for (std::size_t i = 0; i < 9; ++i) {
      EXPECT_NEAR(outcome.results.lse[i] / score, 1.0, 1e-6);
      for (std::size_t c = 0; c < 8; ++c) EXPECT_EQ(outcome.results.out[i * 8 + c], v[123 * 8 + c]);
    }
    for (const auto& [name, member] : gradients)
      for (const double x : outcome.results.*member) EXPECT_TRUE(std::isfinite(x)) << name;
  }
}

TEST(ExtremeScores, ScaleAndProductsThatMeetInTheMiddle) {
  // q . k beyond float32 with a scale that brings it back, and a scale beyond what log2(e) may multiply.
  struct Extreme {
    double q, k, scale;
  };
  for (const Extreme& e :
       {Extreme{1e19, 1e18, 1e-37}, Extreme{1e20, 1e20, 1e-40}, Extreme{1e-20, 1e-18, 3e38}, Extreme{1e-18, 1e15, 1e3},
        Extreme{1e18, 1e-15, 1e-3}, Extreme{1e10, 1e28, 1e-38}, Extreme{1e28, 1e10, 1e-38}}) {
    SCOPED_TRACE(testing::Message() << "q " << e.q << " k " << e.k << " scale " << e.scale);
    Spec spec = spec_of(DType::float32, 20, 300, 16);
    spec.scale = e.scale;
    Call call = make_call(spec);
    std::vector<double> q = call.q.values(), k = call.k.values();
    for (double& x : q) x *= e.q;
    for (double& x : k) x *= e.k;
    call.q.fill(q);
    call.k.fill(k);
    const Outcome outcome = run(call, Backend::cpu);
    ASSERT_EQ(outcome.failure, "");
    const Results exact = exact_results(call);
    // Near and below 1e-38 float32 has few bits left.
    const double tolerance = e.scale < 1e-38 ? 1e-3 : e.q * e.k < 1e-37 ? 1e-4 : 1e-5;
    EXPECT_LE(relative_difference(outcome.results.out, exact.out), tolerance);
    EXPECT_LE(relative_difference(outcome.results.dv, exact.dv), tolerance);
    EXPECT_LE(largest_difference(outcome.results.lse, exact.lse), tolerance);
  }
}

TEST(ExtremeScores, Float16GradientsBeyondItsRangeAreInfinite) {
  Spec spec = spec_of(DType::float16, 300, 20, 16);
  Call call = make_call(spec);
  std::vector<double> dout = call.dout.values();
  for (double& x : dout) x = 6e4;
  call.dout.fill(dout);
  const Outcome outcome = run(call, Backend::cpu);
  ASSERT_EQ(outcome.failure, "");
  // dv sums 300 / 20 rows of 6e4.
  for (const double x : outcome.results.dv) EXPECT_EQ(x, infinity);
  for (const double x : outcome.results.dq) EXPECT_FALSE(std::isnan(x));
  for (const double x : outcome.results.dk) EXPECT_FALSE(std::isnan(x));
}

}  // namespace
}  // namespace headrace::test
