// The accuracy contract of gradients on the GPU: at its sizes, by finite differences, and on hostile inputs.
//
// Inputs from N(0, 1): relative Frobenius error of dq, dk and dv at most three times that of out: 6e-6 (float32), 3e-3
// (float16), 2.4e-2 (bfloat16). Any input: at most twice the error of standard attention, every element within what
// rounding explains, and nothing finite becomes NaN or inf.
#include <algorithm>
#include <array>
#include <cstdio>
#include <mutex>

#include "accuracy.hpp"
#include "cross_check.hpp"
#include "support/standard_attention.hpp"

namespace headrace::test {
namespace {

struct Member {
  const char* name;
  Values Results::*values;
};
constexpr std::array<Member, 3> gradients{{{"dq", &Results::dq}, {"dk", &Results::dk}, {"dv", &Results::dv}}};

class BackwardAccuracy : public OnGpu {
 protected:
  // All at the same time, each on one thread.
  static void expect_contract(const std::vector<Spec>& specs) {
    std::mutex mutex;
    in_parallel(specs.size(), [&](std::size_t n) {
      const Spec& spec = specs[n];
      Call call = make_call(spec);
      const Outcome outcome = run_on_gpu(call, Passes::both);
      EXPECT_EQ(outcome.failure, "") << spec.describe();
      if (!outcome.failure.empty()) return;
      const Results exact = exact_on_cpu(call, 1, Passes::both);
      const std::lock_guard lock(mutex);
      std::printf("%-8s %3d/%-3d %4d,%-4d %-6s", name_of(spec.dtype), static_cast<int>(spec.head_dim),
                  static_cast<int>(spec.value_dim), static_cast<int>(spec.seqlen_q), static_cast<int>(spec.seqlen_k),
                  spec.causal == Causal::none ? "full" : "causal");
      for (const auto& [name, member] : gradients) {
        const double error = relative_difference(outcome.results.*member, exact.*member);
        std::printf(" %s %.2e", name, error);
        EXPECT_LE(error, 3.0 * contract_of(spec.dtype)) << name << ": " << spec.describe();
      }
      std::printf("\n");
    });
  }

  static std::vector<Spec> specs_of(std::int64_t seqlen_q, std::int64_t seqlen_k) {
    std::vector<Spec> specs;
    for (const auto& [head_dim, value_dim] : tile_dims) {
      for (const DType dtype : dtypes) {
        for (const Causal causal : {Causal::none, Causal::bottom_right}) {
          Spec spec = dense_spec(dtype, seqlen_q, seqlen_k, head_dim);
          spec.value_dim = value_dim;
          spec.causal = causal;
          spec.deterministic = specs.size() % 3 == 0;
          specs.push_back(spec);
        }
      }
    }
    return specs;
  }
};

TEST_F(BackwardAccuracy, NormalInputsKeepTheContract) {
  expect_contract(run_is_full() ? specs_of(1000, 1500) : specs_of(200, 300));
}

TEST_F(BackwardAccuracy, NormalInputsOfLongSequencesKeepTheContract) {
  if (!run_is_full()) GTEST_SKIP() << "HEADRACE_TEST_SCALE asks for less";
  std::vector<Spec> specs;
  for (const DType dtype : dtypes) {
    for (const std::int64_t dim : {64, 128}) {
      specs.push_back(dense_spec(dtype, 4096, 4096, dim));
      specs.back().causal = Causal::bottom_right;
      specs.push_back(dense_spec(dtype, 2048, 2048, dim));
      specs.back().group = 2;
    }
    specs.push_back(dense_spec(dtype, 2048, 2048, 256));
  }
  expect_contract(specs);
}

// -- finite differences of the forward pass on the GPU, in float32 --

// sum(dout * out) + sum(dlse * lse); a row with lse = -inf has no gradient from its lse.
double loss_of(Call& call, const GpuStream& stream) {
  GpuCall on_gpu(call, stream.get());
  on_gpu.upload();
  run_pass(call.spec, on_gpu.attention(), stream, Pass::forward);
  EXPECT_EQ(on_gpu.download(), "");
  double sum = 0.0;
  const Values out = call.out.values(), dout = call.dout.values(), lse = call.lse.values(), dlse = call.dlse.values();
  for (std::size_t n = 0; n < out.size(); ++n) sum += out[n] * dout[n];
  for (std::size_t n = 0; n < dlse.size(); ++n)
    if (lse[n] != -infinity) sum += lse[n] * dlse[n];
  return sum;
}

// The derivative along `direction`, from five points: the error is of order step^4.
double numeric_derivative(Call& call, Array& input, const Values& direction, const GpuStream& stream) {
  constexpr double step = 0x1p-5;
  const Values values = input.values();
  const auto loss_at = [&](double steps) {
    Values moved = values;
    for (std::size_t n = 0; n < moved.size(); ++n) moved[n] += steps * step * direction[n];
    input.fill(moved);
    return loss_of(call, stream);
  };
  const double derivative = (8.0 * (loss_at(1) - loss_at(-1)) - (loss_at(2) - loss_at(-2))) / (12.0 * step);
  input.fill(values);
  return derivative;
}

void expect_derivative(Call& call, Array& input, const Values& gradient, const char* name, Rng& rng,
                       const GpuStream& stream) {
  const Values values = input.values();
  for (int repeat = 0; repeat < 2; ++repeat) {
    // Along so many elements that the derivative is large beside the rounding of the loss.
    Values direction(values.size(), 0.0);
    double expected = 0.0, norm = 0.0;
    for (std::size_t n = 0; n < values.size(); ++n) {
      if (values[n] == -infinity) continue;
      direction[n] = rng.chance(0.9) ? std::copysign(1.0, gradient[n]) : rng.pick({-1.0, 1.0});
      if (repeat == 1) direction[n] *= rng.chance(0.5) ? 1.0 : 0.0;
      direction[n] /= 4.0;
      expected += gradient[n] * direction[n];
      norm += direction[n] * direction[n];
    }
    const double numeric = numeric_derivative(call, input, direction, stream);
    EXPECT_NEAR(expected, numeric, 3e-3 * std::abs(numeric) + 2e-3 * std::sqrt(norm))
        << name << ": " << call.spec.describe();
  }
}

TEST_F(BackwardAccuracy, FiniteDifferencesOfEachOption) {
  Spec plain = dense_spec(DType::float32, 11, 13, 16);
  plain.dlse = true;
  plain.batch = 2, plain.heads_kv = 2;
  std::vector<Spec> specs(14, plain);
  specs[1].group = 3;
  specs[2].causal = Causal::bottom_right;
  specs[3].causal = Causal::top_left;
  specs[4].window_left = 2, specs[4].window_right = 1;
  specs[5].softcap = 1.0;
  specs[6].alibi = Alibi::batch_heads;
  specs[7].sinks = Sinks::normal, specs[7].dsinks = true;
  specs[8].dropout_p = 0.4;
  specs[9].blocks.present = true, specs[9].blocks.block_q = 2, specs[9].blocks.block_k = 3;
  specs[10].mask.present = true, specs[10].mask.full = {true, true, true, true}, specs[10].mask.hidden = 0.4;
  specs[11].bias.present = specs[11].dbias = true, specs[11].bias.full = {false, true, true, true};
  specs[12].bias.present = specs[12].dbias = true, specs[12].bias.full = {true, false, false, true};
  specs[13].scale = -0.3;
  in_parallel(specs.size(), [&](std::size_t n) {
    Spec& spec = specs[n];
    spec.seed = mix(spec.seed, n);
    spec.dropout_seed = mix(spec.seed, 1);
    const ContextScope scope(0);
    const GpuStream stream;
    Rng rng(spec.seed);
    Call call = make_call(spec);
    const Outcome outcome = run_on_gpu(call, Passes::both);
    EXPECT_EQ(outcome.failure, "") << spec.describe();
    if (!outcome.failure.empty()) return;
    const Results& results = outcome.results;
    expect_derivative(call, call.q, results.dq, "dq", rng, stream);
    expect_derivative(call, call.k, results.dk, "dk", rng, stream);
    expect_derivative(call, call.v, results.dv, "dv", rng, stream);
    if (spec.dbias) expect_derivative(call, call.bias, results.dbias, "dbias", rng, stream);
    if (spec.dsinks) expect_derivative(call, call.sinks, results.dsinks, "dsinks", rng, stream);
  });
}

// -- hostile inputs --

class BackwardHostile : public OnGpu {
 protected:
  struct Job {
    Spec spec;
    std::string what;
    ChangeAll change;
  };

  // Every element within what rounding explains, and together at most twice as far off as standard attention where that
  // is above the contract; and p, which standard attention has from its scores, is rebuilt here from an lse that may be
  // off by 16 * 2^-24 of the largest logit.
  static void expect_as_good_as_standard(const Job& job) {
    Call call = changed(job.spec, job.change);
    const Outcome outcome = run_on_gpu(call, Passes::both);
    const Results exact = exact_on_cpu(call, 1, Passes::both);
    const std::string failure = judge(call, outcome, exact, Passes::both);
    EXPECT_EQ(failure, "") << job.what << ": " << call.spec.describe();
    if (!failure.empty()) return;
    const Results standard = standard_attention(call);
    const Results bounds = error_bounds(DenseCall(call), exact, call.spec.dtype, DType::float32, call.bias.dtype());
    const double of_lse = 16 * 0x1p-24 * largest_of(exact.lse);
    for (const auto& [name, member] : gradients) {
      const double error = relative_difference(outcome.results.*member, exact.*member);
      // Where rounding alone explains more than there is, as in sums that cancel to nothing, the standard may be exact
      // by luck; then only the bounds mean something.
      if (error <= 3.0 * contract_of(call.spec.dtype) || norm_of(bounds.*member) > norm_of(exact.*member)) continue;
      EXPECT_LE(error, 2.0 * relative_difference(standard.*member, exact.*member) + of_lse)
          << name << ", " << job.what << ": " << call.spec.describe();
    }
  }
  static double norm_of(const Values& values) {
    double sum = 0.0;
    for (const double x : values) sum += x * x;
    return std::sqrt(sum);
  }

  static void expect_all(const std::vector<Job>& jobs) {
    in_parallel(jobs.size(), [&](std::size_t n) { expect_as_good_as_standard(jobs[n]); });
  }
};

TEST_F(BackwardHostile, KnownDistributions) {
  std::vector<Job> jobs;
  for (const auto& [head_dim, value_dim] : tile_dims) {
    for (const DType dtype : dtypes) {
      Spec spec = dense_spec(dtype, 150, 600, head_dim);
      spec.value_dim = value_dim;
      const std::int64_t d = head_dim;
      const auto add = [&](const char* what, ChangeAll change) {
        spec.deterministic = jobs.size() % 2 == 0;
        spec.causal = jobs.size() % 3 == 0 ? Causal::bottom_right : Causal::none;
        jobs.push_back({spec, what, std::move(change)});
      };
      add("large logits", [](Values& q, Values& k, Values&, Values&) { multiply(q, 10.0), multiply(k, 10.0); });
      add("huge logits", [](Values& q, Values& k, Values&, Values&) { multiply(q, 100.0), multiply(k, 100.0); });
      add("one dominant key", [=](Values& q, Values& k, Values&, Values&) {
        for (double& x : q) x += 1.0;
        for (std::int64_t c = 0; c < d; ++c) k[static_cast<std::size_t>(313 * d + c)] += 1.3;
      });
      // Scores, and lse, near an eighth of these.
      for (const double height : {1000.0, -1000.0, 5000.0, -5000.0, 8e4, -8e4})
        add("offset logits", [=](Values& q, Values& k, Values&, Values&) {
          multiply(q, 0.3), multiply(k, 0.3);
          set_first(q, d, 4.0), set_first(k, d, height * std::sqrt(static_cast<double>(d)) / 4.0 / 8.0);
        });
      add("values offset by 1e4", [](Values&, Values&, Values& v, Values&) {
        for (double& x : v) x += 1e4;
      });
      add("equal scores and values", [](Values& q, Values& k, Values& v, Values&) {
        std::fill(q.begin(), q.end(), 0.7);
        std::fill(k.begin(), k.end(), 0.6);
        std::fill(v.begin(), v.end(), 1.375);
      });
      add("small gradients",
          [=](Values&, Values&, Values&, Values& dout) { multiply(dout, dtype == DType::float16 ? 1e-4 : 1e-12); });
      add("large gradients",
          [=](Values&, Values&, Values&, Values& dout) { multiply(dout, dtype == DType::float16 ? 100.0 : 1e12); });
      add("scores that rise with the keys", [=](Values& q, Values& k, Values&, Values&) {
        multiply(q, 0.3), multiply(k, 0.3);
        set_first(q, d, 1.0);
        for (std::size_t j = 0; j < k.size() / static_cast<std::size_t>(d); ++j)
          k[j * static_cast<std::size_t>(d)] = 2.0 * static_cast<double>(j);
      });
    }
  }
  expect_all(jobs);
}

TEST_F(BackwardHostile, LargeAndSmallSoftcaps) {
  std::vector<Job> jobs;
  for (const DType dtype : dtypes) {
    for (const double cap : {1e-3, 0.1, 1.0, 50.0, 1e4, 1e8}) {
      Spec spec = dense_spec(dtype, 200, 300, 64);
      spec.softcap = cap;
      jobs.push_back(
          {spec, "softcap", [](Values& q, Values& k, Values&, Values&) { multiply(q, 4.0), multiply(k, 4.0); }});
    }
  }
  expect_all(jobs);
}

// No choice, no gradient: dq and dk are what is left of sums that cancel.
TEST_F(BackwardHostile, WindowOfOneKeyGivesItTheGradient) {
  for (const DType dtype : dtypes) {
    for (const auto& [head_dim, value_dim] : tile_dims) {
      Spec spec = dense_spec(dtype, 500, 500, head_dim);
      spec.value_dim = value_dim;
      spec.window_left = spec.window_right = 0;
      Call call = make_call(spec);
      const Outcome outcome = run_on_gpu(call, Passes::both);
      EXPECT_EQ(outcome.failure, "") << spec.describe();
      if (!outcome.failure.empty()) continue;
      EXPECT_LE(relative_difference(outcome.results.dv, call.dout.values()), 3.0 * contract_of(dtype))
          << spec.describe();
      const double left = largest_of(call.q.values()) * largest_of(call.k.values()) * static_cast<double>(head_dim) *
                          (dtype == DType::float32 ? 0x1p-18 : 0x1p-20);
      for (const Values* values : {&outcome.results.dq, &outcome.results.dk})
        EXPECT_LE(largest_of(*values), left) << spec.describe();
    }
  }
}

// Beyond the |lse| that a float32 keeps apart from its neighbours gradients are wrong, but finite.
TEST_F(BackwardHostile, HugeLogitsGiveFiniteGradients) {
  for (const DType dtype : dtypes) {
    for (const double sign : {1.0, -1.0}) {
      Spec spec = dense_spec(dtype, 70, 300, 64);
      spec.scale = dtype == DType::float16 ? 1e4 : 1.0;
      const double size = dtype == DType::float16 ? 3e4 : 1e17;
      Call call = changed(spec, ChangeAll([=](Values& q, Values& k, Values&, Values&) {
                            set_first(q, 64, size), set_first(k, 64, sign * size);
                          }));
      const Outcome outcome = run_on_gpu(call, Passes::both);
      EXPECT_EQ(outcome.failure, "") << spec.describe();
      for (const auto& [name, member] : gradients) {
        const Values& values = outcome.results.*member;
        const auto bad = std::count_if(values.begin(), values.end(), [](double x) { return std::isnan(x); });
        EXPECT_EQ(bad, 0) << name << ", NaN: " << spec.describe();
      }
      for (const double x : outcome.results.dv) ASSERT_TRUE(std::isfinite(x)) << spec.describe();
    }
  }
}

TEST_F(BackwardHostile, Float16GradientsBeyondItsRangeAreInfinite) {
  Spec spec = dense_spec(DType::float16, 300, 20, 64);
  Call call = changed(
      spec, ChangeAll([](Values&, Values&, Values&, Values& dout) { std::fill(dout.begin(), dout.end(), 6e4); }));
  const Outcome outcome = run_on_gpu(call, Passes::both);
  ASSERT_EQ(outcome.failure, "") << spec.describe();
  for (const double x : outcome.results.dv) EXPECT_EQ(x, infinity);  // the sum of 300 / 20 rows
  for (const Values* values : {&outcome.results.dq, &outcome.results.dk})
    for (const double x : *values) ASSERT_FALSE(std::isnan(x));
}

}  // namespace
}  // namespace headrace::test
