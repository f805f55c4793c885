// Lengths: zero, odd, ragged, unused tails, many of them.
#include "cases/cases.hpp"

namespace headrace::test {
namespace {

using Lengths = BackendAndType;

bool all_zero(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double x) { return x == 0.0; });
}

TEST_P(Lengths, KeysBehindTheEnd_StayOutOfTheDenominator) {
  for (const std::int64_t seqlen_k : {1, 15, 16, 17, 63, 64, 65, 127, 129, 255, 257}) {
    for (const std::int64_t seqlen_q : {1, 3, 70}) {
      SCOPED_TRACE(testing::Message() << seqlen_q << " queries, " << seqlen_k << " keys");
      Call call = make_call(spec(1, 1, 2, seqlen_q, seqlen_k, 16));
      call.q.fill(constant(call.q, 0.0));
      call.v.fill(constant(call.v, 1.0));
      const Results results = run_and_expect_exact(call, backend());
      for (const double x : results.out) ASSERT_NEAR(x, 1.0, tolerance());
      for (const double x : results.lse) ASSERT_NEAR(x, std::log(static_cast<double>(seqlen_k)), 2e-6);
    }
  }
}

TEST_P(Lengths, Lse_IsTheNaturalLogarithm) {
  Call call = make_call(spec(1, 1, 1, 3, 64, 16));
  call.q.fill(constant(call.q, 0.0));
  for (const double x : run_and_expect_exact(call, backend()).lse) EXPECT_NEAR(x, 4.158883, 1e-6);
}

TEST_P(Lengths, NoBatch_NoQueries_NoHeads_WritesZeroGradients) {
  for (const auto& [batch, heads, seqlen_q, seqlen_k] :
       std::vector<std::tuple<int, int, int, int>>{{0, 2, 5, 7}, {2, 0, 5, 7}, {2, 2, 0, 7}, {0, 0, 0, 0}}) {
    for (const bool through_plan : {false, true}) {
      Spec s = spec(batch, heads, 1, seqlen_q, seqlen_k, 16);
      s.through_plan = through_plan;
      s.dlse = true;
      Call call = make_call(s);
      const Results results = run_and_expect_exact(call, backend());
      EXPECT_TRUE(all_zero(results.dk));
      EXPECT_TRUE(all_zero(results.dv));
    }
  }
}

TEST_P(Lengths, NoKeys_GivesZeroAndMinusInfLse) {
  for (const bool through_plan : {false, true}) {
    Spec s = spec(2, 2, 2, 5, 0, 16);
    s.through_plan = through_plan;
    s.dlse = true;
    Call call = make_call(s);
    const Results results = run_and_expect_exact(call, backend());
    EXPECT_TRUE(all_zero(results.out));
    EXPECT_TRUE(all_zero(results.dq));
    for (const double x : results.lse) EXPECT_EQ(x, -infinity);
  }
}

TEST_P(Lengths, EmptySegments_GiveExactZeros) {
  // Sequences without queries have keys and the other way round.
  for (const bool mirrored : {false, true}) {
    Spec s = spec(4, 1, 4, 0, 0, 64);
    s.ragged = true;
    s.lengths_q = {0, 0, 120, 84};
    s.lengths_k = {253, 174, 84, 307};
    if (mirrored) std::swap(s.lengths_q, s.lengths_k);
    s.causal = Causal::bottom_right;
    s.dlse = true;
    Call call = make_call(s);
    const Results results = run_and_expect_exact(call, backend());
    if (!mirrored) {
      const auto empty = static_cast<std::ptrdiff_t>((253 + 174) * 64);
      EXPECT_TRUE(all_zero({results.dk.begin(), results.dk.begin() + empty}));
      EXPECT_TRUE(all_zero({results.dv.begin(), results.dv.begin() + empty}));
    } else {
      const auto empty = static_cast<std::ptrdiff_t>((253 + 174) * 4 * 64);
      EXPECT_TRUE(all_zero({results.out.begin(), results.out.begin() + empty}));
      EXPECT_TRUE(all_zero({results.dq.begin(), results.dq.begin() + empty}));
      for (int h = 0; h < 4; ++h)
        for (int row = 0; row < 253 + 174; ++row) ASSERT_EQ(lse_of(call, results)(h, row), -infinity);
    }
  }
}

TEST_P(Lengths, EmptySegments_WithWideHeads) {
  Spec s = spec(4, 1, 4, 0, 0, 256);
  s.ragged = true;
  s.lengths_q = {0, 0, 60, 42};
  s.lengths_k = {126, 87, 42, 153};
  Call call = make_call(s);
  run_and_expect_exact(call, backend());
}

TEST_P(Lengths, TokensBehindCuSeqlens_GetZerosAndGiveNothing) {
  Spec s = spec(3, 2, 1, 0, 0, 64);
  s.ragged = true;
  s.lengths_q = s.lengths_k = {44, 88, 112};
  s.slack_q = s.slack_k = 3;
  s.dlse = true;
  Call call = make_call(s);
  const std::size_t used = (44 + 88 + 112) * 2 * 64;
  for (Array Call::*tensor : {&Call::q, &Call::k, &Call::v, &Call::dout}) {
    std::vector<double> values = (call.*tensor).values();
    std::fill(values.begin() + static_cast<std::ptrdiff_t>(used), values.end(), std::nan(""));
    (call.*tensor).fill(values);
  }
  const Results results = run_and_expect_exact(call, backend());
  for (const std::vector<double>* values : {&results.out, &results.dq, &results.dk, &results.dv})
    EXPECT_TRUE(all_zero({values->begin() + static_cast<std::ptrdiff_t>(used), values->end()}));
  for (int h = 0; h < 2; ++h)
    for (int row = 244; row < 247; ++row) EXPECT_EQ(lse_of(call, results)(h, row), -infinity);
}

TEST_P(Lengths, KeysAndValuesOfDifferentLengths_AreRefused) {
  for (const std::int64_t length_of_v : {4, 6}) {
    Call call = make_call(spec(1, 1, 1, 3, 5, 8));
    call.v = Array(dtype(), {1, length_of_v, 1, 8});
    call.v.fill(constant(call.v, 1.0));
    const Outcome outcome = run(call, backend());
    EXPECT_NE(outcome.failure.find(std::to_string(length_of_v)), std::string::npos) << outcome.failure;
    EXPECT_NE(outcome.failure.find('5'), std::string::npos) << outcome.failure;
    // Nothing was written: run() found everything as it was, and out still holds its poison.
    EXPECT_EQ(outcome.failure.find("writes"), std::string::npos) << outcome.failure;
  }
}

TEST_P(Lengths, GapsBetweenPackedSequences_ActLikeSeparateCalls) {
  Spec s = spec(2, 2, 1, 0, 0, 64);
  s.ragged = true;
  s.lengths_q = s.lengths_k = {16, 16};
  s.used_q = s.used_k = {5, 9};
  s.causal = Causal::bottom_right;
  Call call = make_call(s);
  const Results results = run_and_expect_exact(call, backend());
  const std::ptrdiff_t token = 2 * 64;
  for (int b = 0; b < 2; ++b) {
    const std::ptrdiff_t first = b * 16 * token, length = b == 0 ? 5 : 9;
    Spec alone = spec(1, 2, 1, length, length, 64);
    alone.causal = Causal::bottom_right;
    alone.batch_invariant = false;
    Call single = make_call(alone);
    const auto part = [&](const std::vector<double>& values, std::ptrdiff_t begin, std::ptrdiff_t end) {
      return std::vector<double>(values.begin() + first + begin * token, values.begin() + first + end * token);
    };
    for (Array Call::*tensor : {&Call::q, &Call::k, &Call::v, &Call::dout})
      (single.*tensor).fill(part((call.*tensor).values(), 0, length));
    const Results separate = run_and_expect_exact(single, backend());
    EXPECT_LE(relative_difference(part(results.out, 0, length), separate.out), tolerance());
    EXPECT_LE(relative_difference(part(results.dq, 0, length), separate.dq), 3 * tolerance());
    EXPECT_LE(relative_difference(part(results.dk, 0, length), separate.dk), 3 * tolerance());
    EXPECT_LE(relative_difference(part(results.dv, 0, length), separate.dv), 3 * tolerance());
    for (const std::vector<double>* values : {&results.out, &results.dq, &results.dk, &results.dv})
      EXPECT_TRUE(all_zero(part(*values, length, 16)));
  }
}

// More sequences or heads than 16 bits count.
TEST_P(Lengths, ManyTinyAttentions) {
  for (const auto& [batch, heads, dim] : std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>{
           {70000, 1, 16}, {2, 40000, 4}, {4200, 16, 8}}) {
    Call call = make_call(spec(batch, heads, 1, 1, 1, dim));
    const Outcome outcome = run(call, backend());
    ASSERT_EQ(outcome.failure, "");
    const Results& results = outcome.results;
    EXPECT_EQ(results.out, call.v.values());
    EXPECT_EQ(results.dv, call.dout.values());
    // dq and dk are differences of equal sums, in other orders.
    double largest = 0.0;
    for (const std::vector<double>* values : {&results.dq, &results.dk})
      for (const double x : *values) largest = std::max(largest, std::abs(x));
    EXPECT_LE(largest, 500.0 * (dtype() == DType::float64 ? 0x1p-53 : 0x1p-24));
  }
}

HEADRACE_CASES(Lengths, Backend::cpu, Backend::reference);

}  // namespace
}  // namespace headrace::test
