// What the other tests judge by is judged here.
#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/standard_attention.hpp"

namespace headrace::test {
namespace {

constexpr double max_cost = 4e5;

// Two implementations that share nothing agree.
TEST(Oracle, ReferenceAgreesWithStandardAttentionInFloat64) {
  Rng rng = test_rng();
  for (int n = 0; n < scaled(200); ++n) {
    Spec spec = random_spec(rng, max_cost);
    spec.dtype = DType::float64;
    spec.lse_float64 = true;
    const Call call = make_call(spec);
    const Results exact = exact_results(call);
    const Results bounds = error_bounds(DenseCall(call), exact, spec.dtype, DType::float64, DType::float64);
    const std::string failure = differences(call, standard_attention(call), exact, bounds);
    ASSERT_EQ(failure, "") << spec.describe();
  }
}

// The bounds admit a correct implementation in each dtype ...
TEST(Oracle, BoundsAdmitStandardAttention) {
  Rng rng = test_rng();
  for (int n = 0; n < scaled(400); ++n) {
    const Spec spec = random_spec(rng, max_cost);
    const Call call = make_call(spec);
    const Results exact = exact_results(call);
    const Results bounds = error_bounds(DenseCall(call), exact, spec.dtype, call.lse.dtype(), call.bias.dtype());
    const std::string failure = differences(call, standard_attention(call), exact, bounds);
    ASSERT_EQ(failure, "") << spec.describe();
  }
}

// ... and not one that gets a term wrong.
TEST(Oracle, BoundsRefuseAWrongScaleMaskOrHead) {
  const auto noticed = [](const Spec& right, const Spec& wrong) {
    const Call call = make_call(right);
    const Results exact = exact_results(call);
    const Results bounds = error_bounds(DenseCall(call), exact, right.dtype, call.lse.dtype(), call.bias.dtype());
    Call other = make_call(right);  // the same data
    other.spec = wrong;
    return !differences(call, standard_attention(other), exact, bounds).empty();
  };
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16, DType::float64}) {
    Spec right{.dtype = dtype, .batch = 2, .heads_kv = 2, .seqlen_q = 20, .seqlen_k = 24};
    right.causal = Causal::bottom_right;
    right.window_left = 7;
    right.softcap = 15.0;
    right.dropout_p = 0.1;
    EXPECT_FALSE(noticed(right, right)) << name_of(dtype);
    const auto expect_noticed = [&](const char* what, auto&& change) {
      Spec wrong = right;
      change(wrong);
      EXPECT_TRUE(noticed(right, wrong)) << what << ' ' << name_of(dtype);
    };
    expect_noticed("scale", [](Spec& s) { s.scale = 0.26; });
    expect_noticed("causal", [](Spec& s) { s.causal = Causal::top_left; });
    expect_noticed("window", [](Spec& s) { s.window_left = 8; });
    expect_noticed("softcap", [](Spec& s) { s.softcap = 14.0; });
    expect_noticed("dropout seed", [](Spec& s) { s.dropout_seed = 1; });
    expect_noticed("dropout rate", [](Spec& s) { s.dropout_p = 0.11; });
  }
}

}  // namespace
}  // namespace headrace::test
