// The accuracy contract on the GPU: at its sizes, and on inputs that force the kernel off its fast path.
//
// Inputs from N(0, 1): relative Frobenius error of out at most 2e-6 (float32), 1e-3 (float16), 8e-3 (bfloat16), lse
// within 1e-5 (float32) and 1e-3. Any input: at most twice the error of standard attention, lse within 16 * 2^-24 of
// the largest logit, every element within what rounding explains, and nothing finite becomes NaN or inf.
#include <algorithm>
#include <cstdio>
#include <limits>
#include <mutex>

#include "accuracy.hpp"
#include "cross_check.hpp"
#include "support/standard_attention.hpp"

namespace headrace::test {
namespace {

// Adds a failure that names `what`. Returns the relative error of out.
double expect_as_good_as_standard(Call& call, const std::string& what, int threads) {
  const Spec& spec = call.spec;
  const Outcome outcome = run_on_gpu(call);
  const Results exact = exact_on_cpu(call, threads);
  const std::string failure = judge(call, outcome, exact);
  if (!failure.empty()) {
    ADD_FAILURE() << what << ": " << spec.describe() << '\n' << failure;
    return 0.0;
  }
  // Tensor cores truncate the sum of every 16 products: up to 2^-23 for each of head_dim / 16 sums.
  const double truncated = static_cast<double>(spec.head_dim) * 0x1p-27 * largest_of(exact.lse);
  // Of the largest logit: lse is none where biases or slopes cancel it.
  if (!spec.bias.present && spec.alibi == Alibi::none) {
    const double lse = largest_difference(outcome.results.lse, exact.lse);
    EXPECT_LE(lse, std::max({1e-5, 0x1p-20 * largest_of(exact.lse), truncated}))
        << "lse, " << what << ": " << spec.describe();
  }
  const double error = relative_difference(outcome.results.out, exact.out);
  if (error > contract_of(spec.dtype)) {
    // Beside a sink no error of a score is divided out. Of one row's the standard may have none by luck.
    const double of_scores = spec.sinks == Sinks::none ? 0.0 : truncated;
    const double standard = relative_difference(standard_attention(call).out, exact.out);
    EXPECT_LE(error, 2.0 * standard + of_scores) << "out, " << what << ": " << spec.describe();
  }
  return error;
}

class ForwardAccuracy : public OnGpu {};

TEST_F(ForwardAccuracy, NormalInputsKeepTheContract) {
  for (const auto& [head_dim, value_dim] : tile_dims) {
    for (const DType dtype : dtypes) {
      for (const Causal causal : {Causal::none, Causal::bottom_right}) {
        Spec spec = dense_spec(dtype, run_is_full() ? 1500 : 300, run_is_full() ? 2100 : 500, head_dim);
        spec.value_dim = value_dim;
        spec.causal = causal;
        Call call = make_call(spec);
        const Outcome outcome = run_on_gpu(call);
        ASSERT_EQ(outcome.failure, "") << spec.describe();
        const Results exact = exact_on_cpu(call, 0);
        const double out = relative_difference(outcome.results.out, exact.out);
        const double lse = largest_difference(outcome.results.lse, exact.lse);
        std::printf("%-8s %3d/%-3d %-6s out %.2e, lse %.2e\n", name_of(dtype), static_cast<int>(head_dim),
                    static_cast<int>(value_dim), causal == Causal::none ? "full" : "causal", out, lse);
        EXPECT_LE(out, contract_of(dtype)) << spec.describe();
        EXPECT_LE(lse, dtype == DType::float32 ? 1e-5 : 1e-3) << spec.describe();
      }
    }
  }
}

// -- scores that rise above the reference of the first block; keys are visited from the last to the first --

// The score of query i and key j is this, and a little noise; by rows that take part.
struct Scores {
  std::string name{};
  std::function<double(std::int64_t key)> of_key{};
  std::function<bool(std::int64_t row)> row{};
  bool large_values = false;  // near the largest number
};

std::vector<Scores> hostile_scores(std::int64_t seqlen_k) {
  const auto every_row = [](std::int64_t) { return true; };
  const auto one_row = [](std::int64_t i) { return i == 137; };
  const auto some_rows = [](std::int64_t i) { return i % 50 == 3; };
  std::vector<Scores> all;
  const std::int64_t last = seqlen_k - 1;
  // In the first, a middle and the last block that is visited, and at the edges of blocks.
  int n = 0, kind = 0;
  for (const std::int64_t key : {last, last - 70, seqlen_k / 2, std::int64_t{128}, std::int64_t{79}, std::int64_t{2}}) {
    // Above it: 2^14 at 9.7 and the largest float16 at 11.1, the largest float32 at 88.7 as a factor.
    for (const double height : {6.0, 9.5, 11.0, 12.0, 30.0, 80.0, 88.0, 89.0, 95.0, 180.0, 1000.0, 30000.0}) {
      if ((++n + static_cast<int>(key)) % 2 == 0) continue;  // every other one
      const bool kinds[3] = {kind % 3 == 0, kind % 3 == 1, kind % 3 == 2};
      Scores s{.name = "a score of " + std::to_string(height) + " at key " + std::to_string(key) +
                       (kinds[0]   ? ", all rows"
                        : kinds[1] ? ", row 137"
                                   : ", some rows"),
               .of_key = [=](std::int64_t j) { return j == key ? height : 0.0; }};
      if (kinds[0]) s.row = every_row;
      if (kinds[1]) s.row = one_row;
      if (kinds[2]) s.row = some_rows;
      s.large_values = kind % 4 == 3;
      all.push_back(std::move(s));
      ++kind;
    }
  }
  for (const double slope : {0.02, 0.1, 0.5, 5.0, 60.0}) {
    all.push_back({.name = "scores that rise by " + std::to_string(slope) + " a key, to the first",
                   .of_key = [=](std::int64_t j) { return slope * static_cast<double>(last - j); },
                   .row = every_row});
    all.push_back({.name = "scores that fall by " + std::to_string(slope) + " a key, to the first",
                   .of_key = [=](std::int64_t j) { return slope * static_cast<double>(j); },
                   .row = every_row});
  }
  for (const double height : {5.0, 9.0, 40.0, 87.0, 90.0, 300.0}) {
    all.push_back({.name = "steps of " + std::to_string(height) + " every 90 keys",
                   .of_key = [=](std::int64_t j) { return height * static_cast<double>((last - j) / 90); },
                   .row = some_rows});
  }
  all.push_back(
      {.name = "large values", .of_key = [](std::int64_t) { return 0.0; }, .row = every_row, .large_values = true});
  all.push_back({.name = "large values, rising scores",
                 .of_key = [=](std::int64_t j) { return 0.2 * static_cast<double>(last - j); },
                 .row = every_row,
                 .large_values = true});
  all.push_back({.name = "all scores far below 0", .of_key = [](std::int64_t) { return -30000.0; }, .row = every_row});
  return all;
}

Call call_of(const Spec& spec, const Scores& scores) {
  Call call = make_call(spec);
  Values q = call.q.values(), k = call.k.values(), v = call.v.values();
  const auto d = static_cast<std::size_t>(spec.head_dim);
  for (Values* values : {&q, &k})
    for (double& x : *values) x *= 0.3;
  for (std::size_t i = 0; i < q.size() / d; ++i) q[i * d] = scores.row(static_cast<std::int64_t>(i)) ? 1.0 : 0.0;
  for (std::size_t j = 0; j < k.size() / d; ++j) k[j * d] = scores.of_key(static_cast<std::int64_t>(j));
  if (scores.large_values) {
    const double largest = largest_number(spec.dtype);
    for (double& x : v) x = largest * std::clamp(0.9 + 0.05 * x, -1.0, 1.0);
  }
  call.q.fill(q);
  call.k.fill(k);
  call.v.fill(v);
  return call;
}

class ForwardHostile : public OnGpu {
 protected:
  // Every one of the scores through each kernel that `specs` name.
  static void expect_all(const std::vector<Spec>& specs) {
    struct Job {
      Spec spec;
      Scores scores;
    };
    std::vector<Job> jobs;
    for (const Spec& spec : specs)
      for (Scores& scores : hostile_scores(spec.seqlen_k)) jobs.push_back({spec, std::move(scores)});
    std::mutex mutex;
    double worst[3] = {0.0, 0.0, 0.0};
    in_parallel(jobs.size(), [&](std::size_t n) {
      if (HasFailure() && n > jobs.size() / 4) return;  // enough is known
      Call call = call_of(jobs[n].spec, jobs[n].scores);
      const double error = expect_as_good_as_standard(call, jobs[n].scores.name, 1);
      const std::lock_guard lock(mutex);
      double& w = worst[std::find(std::begin(dtypes), std::end(dtypes), jobs[n].spec.dtype) - std::begin(dtypes)];
      w = std::max(w, error);
    });
    std::printf("%zu problems; largest relative error: bfloat16 %.2e, float16 %.2e, float32 %.2e\n", jobs.size(),
                worst[0], worst[1], worst[2]);
  }

  static std::vector<Spec> plain_specs() {
    std::vector<Spec> specs;
    for (const auto& [head_dim, value_dim] : tile_dims) {
      for (const DType dtype : dtypes) {
        for (const Causal causal : {Causal::none, Causal::bottom_right}) {
          Spec spec = dense_spec(dtype, 150, 700, head_dim);
          spec.value_dim = value_dim;
          spec.causal = causal;
          spec.scale = 1.0;
          specs.push_back(spec);
        }
      }
    }
    return specs;
  }

  static void expect_good(const Spec& spec, const std::string& what, const Change& change) {
    Call call = changed(spec, change);
    expect_as_good_as_standard(call, what, 0);
  }
};

TEST_F(ForwardHostile, PlainKernels) { expect_all(plain_specs()); }

// With a maximum of every block, or of some.
TEST_F(ForwardHostile, KernelsWithOptions) {
  std::vector<Spec> specs;
  int n = 0;
  for (Spec spec : plain_specs()) {
    if (spec.head_dim != 64 && spec.head_dim != 128) continue;
    if (spec.causal == Causal::bottom_right) continue;
    switch (n++ % 4) {
      case 0:
        spec.bias.present = true;
        spec.bias.full = {false, false, false, true};
        break;
      case 1:
        spec.sinks = Sinks::large;
        break;
      case 2:
        spec.blocks.present = true;
        spec.blocks.block_q = spec.blocks.block_k = 32;
        spec.blocks.hidden = 0.3;
        break;
      default:
        spec.alibi = Alibi::heads;
        break;
    }
    specs.push_back(spec);
  }
  expect_all(specs);
}

TEST_F(ForwardHostile, KnownDistributions) {
  for (const DType dtype : dtypes) {
    const Spec spec = dense_spec(dtype, 300, 900, 64);
    expect_good(spec, "large logits", [&](Values& q, Values& k, Values&) { multiply(q, 10.0), multiply(k, 10.0); });
    expect_good(spec, "huge logits", [&](Values& q, Values& k, Values&) { multiply(q, 100.0), multiply(k, 100.0); });
    expect_good(spec, "one dominant key", [&](Values& q, Values& k, Values&) {
      for (double& x : q) x += 1.0;
      for (std::size_t c = 0; c < 64; ++c) k[313 * 64 + c] += 1.3;
    });
    expect_good(spec, "logits offset by 1e4",
                [&](Values& q, Values& k, Values&) { set_first(q, 64, 16.0), set_first(k, 64, 5000.0); });
    expect_good(spec, "logits offset by -1e4",
                [&](Values& q, Values& k, Values&) { set_first(q, 64, 16.0), set_first(k, 64, -5000.0); });
    expect_good(spec, "values offset by 1e4", [&](Values&, Values&, Values& v) {
      for (double& x : v) x += 1e4;
    });
    expect_good(spec, "lse far below -88", [&](Values& q, Values& k, Values&) {
      multiply(q, 0.1), multiply(k, 0.1);
      set_first(q, 64, 4.0), set_first(k, 64, -500.0);
    });
    Spec tiny = spec;
    tiny.scale = 1.0;
    const double factor = dtype == DType::float16 ? 1e-4 : 1e-15;
    expect_good(tiny, "tiny inputs", [&](Values& q, Values& k, Values& v) {
      multiply(q, factor), multiply(k, factor), multiply(v, factor);
    });
    expect_good(dense_spec(dtype, 70, 20000, 64), "equal scores over long keys", [](Values& q, Values&, Values& v) {
      std::fill(q.begin(), q.end(), 0.0);
      std::fill(v.begin(), v.end(), 1.375);
    });
  }
}

TEST_F(ForwardHostile, WindowOfOneKeyIsItsValue) {
  for (const DType dtype : dtypes) {
    for (const auto& [head_dim, value_dim] : tile_dims) {
      Spec spec = dense_spec(dtype, 500, 500, head_dim);
      spec.value_dim = value_dim;
      spec.window_left = spec.window_right = 0;
      Call call = make_call(spec);
      const Outcome outcome = run_on_gpu(call);
      ASSERT_EQ(outcome.failure, "") << spec.describe();
      if (dtype == DType::float32) {  // parts of 22 bits
        EXPECT_LE(relative_difference(outcome.results.out, call.v.values()), contract_of(dtype)) << spec.describe();
      } else {
        EXPECT_EQ(outcome.results.out, call.v.values()) << spec.describe();
      }
    }
  }
}

TEST_F(ForwardHostile, AveragesOfTheLargestNumberAreFinite) {
  for (const DType dtype : dtypes) {
    for (const std::int64_t seqlen_k : {1, 100, 700, 5000}) {
      const double largest = largest_number(dtype);
      const Spec spec = dense_spec(dtype, 70, seqlen_k, 128);
      Call call = changed(spec, [&](Values&, Values&, Values& v) { std::fill(v.begin(), v.end(), largest); });
      const Outcome outcome = run_on_gpu(call);
      ASSERT_EQ(outcome.failure, "") << spec.describe();
      for (const double x : outcome.results.out) ASSERT_NEAR(x / largest, 1.0, contract_of(dtype)) << spec.describe();
    }
  }
}

TEST_F(ForwardHostile, LargeAndSmallSoftcaps) {
  std::vector<Spec> variants(3, dense_spec(DType::bfloat16, 200, 300, 64));
  variants[1].dtype = DType::float16;
  variants[2].dtype = DType::float32;
  for (Spec& spec : variants) spec.softcap = 1.0;
  load_variants(variants);
  for (const DType dtype : dtypes) {
    for (const double cap : {1e-300, 1e-3, 0.1, 1.0, 50.0, 1e4, 1e8, 1e42, 1e300}) {
      Spec spec = dense_spec(dtype, 200, 300, 64);
      spec.softcap = cap;
      Call call = changed(spec, [](Values& q, Values& k, Values&) {
        for (Values* values : {&q, &k})
          for (double& x : *values) x *= 4.0;
      });
      const Outcome outcome = run_on_gpu(call);
      ASSERT_EQ(outcome.failure, "") << spec.describe();
      const Results exact = exact_on_cpu(call, 0);
      EXPECT_LE(relative_difference(outcome.results.out, exact.out), contract_of(dtype)) << spec.describe();
      EXPECT_LE(largest_difference(outcome.results.lse, exact.lse),
                std::max(1e-5, 16 * 0x1p-24 * largest_of(exact.lse)))
          << spec.describe();
    }
  }
}

// The type's lowest number is a finite bias: it hides no key, and where all keys have it they count alike.
TEST_F(ForwardHostile, TheLowestBiasHidesNothing) {
  std::vector<Spec> specs(2, dense_spec(DType::bfloat16, 70, 300, 64));
  for (Spec& spec : specs) {
    spec.bias.present = true;
    spec.bias.full = {false, false, true, true};
  }
  specs[1].bias.of_input_dtype = true;
  load_variants(specs);
  for (const Spec& spec : specs) {
    const bool of_input_dtype = spec.bias.of_input_dtype;
    Call call = make_call(spec);
    const double lowest = of_input_dtype ? -0x1.FEp127 : static_cast<double>(std::numeric_limits<float>::lowest());
    Values bias = call.bias.values();
    for (std::size_t i = 0; i < 70; ++i)
      for (std::size_t j = 0; j < 300; ++j)
        if (i < 40 || j % 2 == 0) bias[i * 300 + j] = lowest;
    call.bias.fill(bias);
    expect_as_good_as_standard(call, "the lowest number as bias", 0);
  }
}

TEST_F(ForwardHostile, ScoresNearTheLargestFloat) {
  for (const double sign : {1.0, -1.0}) {
    Spec spec = dense_spec(DType::bfloat16, 9, 300, 64);
    spec.scale = 1.0;
    Call call = changed(spec, [&](Values& q, Values& k, Values&) {
      std::fill(q.begin(), q.end(), 0.0);
      std::fill(k.begin(), k.end(), 0.0);
      for (std::size_t n = 0; n < q.size(); n += 64) q[n] = 3e19;
      for (std::size_t n = 0; n < k.size(); n += 64) k[n] = sign * 1e19;
      k[123 * 64] = sign > 0 ? 1.1e19 : -0.9e19;
    });
    const Outcome outcome = run_on_gpu(call);
    ASSERT_EQ(outcome.failure, "");
    const Results exact = exact_on_cpu(call, 0);
    EXPECT_EQ(outcome.results.out, exact.out) << "sign " << sign;
    for (std::size_t i = 0; i < 9; ++i)
      EXPECT_NEAR(outcome.results.lse[i] / exact.lse[i], 1.0, 1e-6) << "sign " << sign;
  }
}

TEST_F(ForwardHostile, ScaleAndProductsThatMeetInTheMiddle) {
  struct Extreme {
    double q, k, scale;
  };
  // Products of 64 numbers stay below 2^128: beyond, standard attention in float32 has infinite scores too.
  for (const Extreme& e : {Extreme{1e18, 1e18, 1e-37}, Extreme{1e-20, 1e-18, 3e38}, Extreme{1e-18, 1e15, 1e3},
                           Extreme{1e18, 1e-15, 1e-3}, Extreme{1e9, 1e27, 1e-37}, Extreme{1e27, 1e9, 1e-37}}) {
    Spec spec = dense_spec(DType::bfloat16, 20, 300, 64);
    spec.scale = e.scale;
    Call call = changed(spec, [&](Values& q, Values& k, Values&) {
      for (double& x : q) x *= e.q;
      for (double& x : k) x *= e.k;
    });
    const Outcome outcome = run_on_gpu(call);
    ASSERT_EQ(outcome.failure, "") << spec.describe();
    const Results exact = exact_on_cpu(call, 0);
    EXPECT_LE(relative_difference(outcome.results.out, exact.out), 8e-3)
        << "q times " << e.q << ", k times " << e.k << ": " << spec.describe();
    EXPECT_LE(largest_difference(outcome.results.lse, exact.lse), 1e-3)
        << "q times " << e.q << ", k times " << e.k << ": " << spec.describe();
  }
}

// -- what is not finite shows, where it is visible, and nowhere else --

TEST_F(ForwardHostile, NotANumberShows) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  for (const auto& [head_dim, value_dim] : tile_dims) {
    for (const DType dtype : dtypes) {
      // Full attention: every row sees every key, so that the reference says all.
      Spec spec = dense_spec(dtype, 200, 500, head_dim);
      spec.value_dim = value_dim;
      const auto d = static_cast<std::size_t>(head_dim), dv = static_cast<std::size_t>(value_dim);
      for (const std::size_t key : {std::size_t{499}, std::size_t{250}, std::size_t{1}}) {
        SCOPED_TRACE(testing::Message() << "key " << key << ": " << spec.describe());
        const auto expect_class = [&](const char* what, const Change& change) {
          Call call = changed(spec, change);
          const Outcome outcome = run_on_gpu(call);
          ASSERT_EQ(outcome.failure, "");
          const Results exact = exact_on_cpu(call, 0);
          std::size_t wrong = 0;
          for (std::size_t n = 0; n < exact.out.size(); ++n) {
            const double got = outcome.results.out[n], right = exact.out[n];
            if (std::isnan(right) ? std::isnan(got) : std::isinf(right) ? got == right : std::isfinite(got)) continue;
            if (wrong++ == 0)
              ADD_FAILURE() << what << ": out element " << n << " is " << got << ", the reference has " << right;
          }
          EXPECT_EQ(wrong, 0u) << what << ", elements of another class";
        };
        expect_class("NaN in v", [&](Values&, Values&, Values& v) { v[key * dv + 3] = nan; });
        expect_class("inf in v", [&](Values&, Values&, Values& v) { v[key * dv + 3] = infinity; });
        expect_class("inf and -inf in v", [&](Values&, Values&, Values& v) {
          v[key * dv + 3] = infinity;
          v[(key == 1 ? 7 : key - 1) * dv + 3] = -infinity;
        });
        expect_class("NaN in k", [&](Values&, Values& k, Values&) { k[key * d + 5] = nan; });
        expect_class("NaN in q", [&](Values& q, Values&, Values&) { q[(key % 200) * d + 5] = nan; });
        expect_class("inf in k", [&](Values& q, Values& k, Values&) {
          for (std::size_t i = 0; i < 200; ++i) q[i * d + 5] = 1.0;
          k[key * d + 5] = infinity;
        });
        expect_class("-inf in k", [&](Values& q, Values& k, Values&) {
          for (std::size_t i = 0; i < 200; ++i) q[i * d + 5] = 1.0;
          k[key * d + 5] = -infinity;
        });
      }
    }
  }
}

}  // namespace
}  // namespace headrace::test
