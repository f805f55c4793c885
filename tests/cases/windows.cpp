// Which keys a query sees by position: causal in both alignments, windows with signed bounds.
#include "cases/cases.hpp"

namespace headrace::test {
namespace {

using Windows = BackendAndType;

// Runs a call that shows its visible keys and expects those of `visible`.
template <typename Visible>
void expect_visible(Spec s, Backend backend, double tolerance, Visible&& visible) {
  s.value_dim = s.seqlen_k;
  Call call = make_call(s);
  show_visible_keys(call);
  const Results results = run_and_expect_exact(call, backend);
  expect_visible_keys(call, results, tolerance, visible);
}

TEST_P(Windows, Causal_BottomRightAndTopLeft) {
  for (const auto& [seqlen_q, seqlen_k] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{2, 6}, {6, 2}, {1, 5}, {5, 1}, {129, 64}, {64, 129}}) {
    SCOPED_TRACE(testing::Message() << seqlen_q << " queries, " << seqlen_k << " keys");
    Spec s = spec(1, 1, 2, seqlen_q, seqlen_k, 8);
    const std::int64_t shift = seqlen_k - seqlen_q;
    s.causal = Causal::bottom_right;
    expect_visible(s, backend(), tolerance(), [&](std::int64_t i, std::int64_t j) { return j <= i + shift; });
    s.causal = Causal::top_left;
    expect_visible(s, backend(), tolerance(), [](std::int64_t i, std::int64_t j) { return j <= i; });
  }
}

TEST_P(Windows, CausalBottomRight_OfOneQueryHidesNothing) {
  Spec s = spec(2, 2, 2, 1, 37, 16);
  Call whole = make_call(s);
  const Results plain = run_and_expect_exact(whole, backend());
  s.causal = Causal::bottom_right;
  Call causal = make_call(s);
  EXPECT_EQ(run_and_expect_exact(causal, backend()).out, plain.out);
}

TEST_P(Windows, EmptyWindow_SeesNothing) {
  Spec s = spec(1, 1, 1, 16, 16, 8);
  s.window_left = 7;
  s.window_right = -8;
  expect_visible(s, backend(), tolerance(), [](std::int64_t, std::int64_t) { return false; });
}

TEST_P(Windows, NegativeBounds_AreHonoured) {
  Spec s = spec(1, 1, 1, 16, 16, 8);
  s.window_right = -1;  // strictly the past
  expect_visible(s, backend(), tolerance(), [](std::int64_t i, std::int64_t j) { return j < i; });
  s.window_right.reset();
  s.window_left = -1;  // strictly the future
  expect_visible(s, backend(), tolerance(), [](std::int64_t i, std::int64_t j) { return j > i; });
  s.window_left = -2;
  s.window_right = 5;
  expect_visible(s, backend(), tolerance(), [](std::int64_t i, std::int64_t j) { return j >= i + 2 && j <= i + 5; });
  s.window_left = 5;
  s.window_right = -2;
  expect_visible(s, backend(), tolerance(), [](std::int64_t i, std::int64_t j) { return j >= i - 5 && j <= i - 2; });
}

TEST_P(Windows, ExtremeBounds_DoNotOverflow) {
  constexpr std::int64_t lowest = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t highest = std::numeric_limits<std::int64_t>::max();
  for (const auto& [left, right, all] :
       std::vector<std::tuple<std::int64_t, std::int64_t, bool>>{{highest - 1, highest - 1, true},
                                                                 {highest, highest, true},
                                                                 {highest - 1, lowest, false},
                                                                 {lowest, highest - 1, false},
                                                                 {lowest, lowest, false},
                                                                 {std::int64_t{1} << 31, std::int64_t{1} << 31, true},
                                                                 {-(std::int64_t{1} << 31), highest, false}}) {
    SCOPED_TRACE(testing::Message() << "left " << left << ", right " << right);
    for (const std::int64_t seqlen_k : {9, 40}) {
      Spec s = spec(1, 1, 1, 17, seqlen_k, 8);
      s.window_left = left;
      s.window_right = right;
      expect_visible(s, backend(), tolerance(), [all = all](std::int64_t, std::int64_t) { return all; });
      s.causal = Causal::bottom_right;
      expect_visible(s, backend(), tolerance(),
                     [all = all, seqlen_k](std::int64_t i, std::int64_t j) { return all && j <= i + seqlen_k - 17; });
    }
  }
}

TEST_P(Windows, BoundsCountDistanceInclusively) {
  Spec s = spec(1, 1, 1, 16, 16, 8);
  s.window_left = 3;
  s.window_right = 0;
  expect_visible(s, backend(), tolerance(), [](std::int64_t i, std::int64_t j) { return j >= i - 3 && j <= i; });
  s.window_left = 0;
  s.window_right = 0;
  expect_visible(s, backend(), tolerance(), [](std::int64_t i, std::int64_t j) { return j == i; });
}

TEST_P(Windows, WindowAlignsToTheEnds_OrToTheStartsIfTopLeft) {
  Spec s = spec(1, 1, 1, 20, 33, 8);
  s.window_left = 4;
  s.window_right = 2;
  expect_visible(s, backend(), tolerance(),
                 [](std::int64_t i, std::int64_t j) { return j >= i + 13 - 4 && j <= i + 13 + 2; });
  s.causal = Causal::top_left;
  expect_visible(s, backend(), tolerance(), [](std::int64_t i, std::int64_t j) { return j >= i - 4 && j <= i; });
}

TEST_P(Windows, RightBound_CutsWithoutCausalToo) {
  Spec s = spec(1, 2, 4, 256, 256, 64);
  s.window_left = s.window_right = 32;
  Call call = make_call(s);
  const Results results = run_and_expect_exact(call, backend());
  // Values outside of the band of row 100 do not reach it: neither tile it shares, nor their bits.
  Call other = make_call(s);
  std::vector<double> v = other.v.values();
  for (std::size_t j = 0; j < 256; ++j)
    if (j < 68 || j > 132)
      for (std::size_t n = 0; n < 2 * 64; ++n) v[j * 2 * 64 + n] = 1000.0;
  other.v.fill(v);
  const Outcome changed = run(other, backend());
  EXPECT_EQ(changed.failure, "");
  for (int h = 0; h < 8; ++h) {
    EXPECT_EQ(out_of(other, changed.results).row(0, 100, h), out_of(call, results).row(0, 100, h));
    EXPECT_NE(out_of(other, changed.results).row(0, 101, h), out_of(call, results).row(0, 101, h));
    EXPECT_NE(out_of(other, changed.results).row(0, 99, h), out_of(call, results).row(0, 99, h));
  }
}

HEADRACE_CASES(Windows, Backend::cpu, Backend::reference);

}  // namespace
}  // namespace headrace::test
