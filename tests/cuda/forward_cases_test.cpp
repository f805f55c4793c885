// Faults that users of attention libraries met, as small calls whose right result is known: what tests/cases has for
// the CPU, forward, on the GPU.
#include <algorithm>
#include <cmath>

#include "cases/cases.hpp"
#include "on_gpu.hpp"

namespace headrace::test {
namespace {

constexpr double tolerance = 8e-3;  // of bfloat16

class ForwardCases : public OnGpu {
 protected:
  static Spec spec(std::int64_t batch, std::int64_t heads_kv, std::int64_t group, std::int64_t seqlen_q,
                   std::int64_t seqlen_k, std::int64_t dim) {
    Spec s{.seed = test_rng().bits(), .dtype = DType::bfloat16, .batch = batch, .heads_kv = heads_kv, .group = group};
    s.seqlen_q = seqlen_q;
    s.seqlen_k = seqlen_k;
    s.head_dim = s.value_dim = dim;
    return s;
  }

  static Results run_and_expect_exact_on_gpu(Call& call) {
    const Outcome outcome = run_on_gpu(call);
    EXPECT_EQ(judge(call, outcome, exact_on_cpu(call, 0)), "") << call.spec.describe();
    return outcome.results;
  }
  static void expect_exact_on_gpu(const Spec& s) {
    Call call = make_call(s);
    run_and_expect_exact_on_gpu(call);
  }

  // That just the keys of visible(i, j) count.
  template <typename Visible>
  static void expect_keys(Spec s, Visible&& visible) {
    s.value_dim = s.seqlen_k;
    s.v_layout = Layout::aligned;
    Call call = make_call(s);
    show_visible_keys(call);
    const Outcome outcome = run_on_gpu(call);
    ASSERT_EQ(outcome.failure, "") << s.describe();
    SCOPED_TRACE(s.describe());
    expect_visible_keys(call, outcome.results, tolerance, visible);
  }
};

// The last columns of a block are no keys: they must not count.
TEST_F(ForwardCases, KeysBehindTheLastDoNotCount) {
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const std::int64_t seqlen_k : {1, 15, 16, 17, 63, 64, 65, 79, 80, 81, 127, 129, 255, 257}) {
      Call call = make_call(spec(1, 2, 1, 130, seqlen_k, dim));
      call.q.fill(constant(call.q, 0.0));
      call.v.fill(constant(call.v, 1.0));
      const Outcome outcome = run_on_gpu(call);
      ASSERT_EQ(outcome.failure, "") << call.spec.describe();
      for (const double x : outcome.results.out) ASSERT_EQ(x, 1.0) << call.spec.describe();
      for (const double x : outcome.results.lse)
        ASSERT_NEAR(x, std::log(static_cast<double>(seqlen_k)), 1e-5) << call.spec.describe();
    }
  }
}

TEST_F(ForwardCases, CausalMasksAreAligned) {
  for (const auto& [seqlen_q, seqlen_k] : {std::pair<std::int64_t, std::int64_t>{2, 6},
                                           {6, 2},
                                           {1, 5},
                                           {5, 1},
                                           {129, 64},
                                           {64, 129},
                                           {200, 200},
                                           {400, 130}}) {
    for (const bool top_left : {false, true}) {
      Spec s = spec(1, 1, 1, seqlen_q, seqlen_k, 64);
      s.causal = top_left ? Causal::top_left : Causal::bottom_right;
      const std::int64_t shift = top_left ? 0 : seqlen_k - seqlen_q;
      expect_keys(s, [=](std::int64_t i, std::int64_t j) { return j <= i + shift; });
    }
  }
}

TEST_F(ForwardCases, WindowsAreExactToTheirSign) {
  constexpr std::int64_t far = std::int64_t{1} << 40;
  for (const std::int64_t seqlen : {16, 150}) {
    for (const auto& [left, right] : {std::pair<std::int64_t, std::int64_t>{3, 0},
                                      {7, -8},
                                      {far, -1},
                                      {-1, far},
                                      {32, 32},
                                      {0, 0},
                                      {-5, 9},
                                      {70, -66},
                                      {-66, 70},
                                      {far, -far},
                                      {-far, far},
                                      {1, 1}}) {
      Spec s = spec(1, 1, 1, seqlen, seqlen, 64);
      s.window_left = left;
      s.window_right = right;
      expect_keys(s, [l = left, r = right](std::int64_t i, std::int64_t j) { return j >= i - l && j <= i + r; });
    }
  }
}

// What lies outside a window is never read: NaN there changes nothing. By tiles, that is.
TEST_F(ForwardCases, TilesOutsideTheWindowAreNotRead) {
  Spec s = spec(1, 2, 1, 700, 700, 128);
  s.window_left = 10;
  s.window_right = 10;
  Call call = make_call(s);
  const Outcome clean = run_on_gpu(call);
  ASSERT_EQ(clean.failure, "");
  std::vector<double> k = call.k.values(), v = call.v.values();
  const std::size_t row = 2 * 128;
  for (std::size_t j = 600; j < 700; ++j)
    for (std::size_t c = 0; c < row; ++c) k[j * row + c] = v[j * row + c] = std::nan("");
  call.k.fill(k);
  call.v.fill(v);
  const Outcome poisoned = run_on_gpu(call);
  // Rows of the first 384 see no key beyond 394, and their tiles none beyond 512.
  for (std::size_t n = 0; n < 384 * row; ++n) ASSERT_EQ(poisoned.results.out[n], clean.results.out[n]) << n / row;
  // The others that see one show it.
  for (std::size_t n = 600 * row; n < 700 * row; ++n) ASSERT_TRUE(std::isnan(poisoned.results.out[n])) << n / row;
}

TEST_F(ForwardCases, HiddenRowsAndTiles) {
  std::vector<Spec> specs;
  // A mask whose third row is all false, and a batch entry without any key.
  Spec masked = spec(2, 2, 1, 150, 300, 64);
  masked.mask.present = true;
  masked.mask.full = {true, true, true, true};
  masked.mask.hide_batch = true;
  masked.mask.hide_rows = true;
  specs.push_back(masked);
  // A bias of -inf for the keys that are visited last, first, and in the middle.
  Spec biased = spec(1, 1, 1, 70, 640, 64);
  biased.bias.present = true;
  biased.bias.full = {false, false, false, true};
  specs.push_back(biased);
  load_variants(specs);

  Call call = make_call(masked);
  std::vector<double> mask = call.mask.values();
  for (std::size_t at = 0; at < mask.size(); ++at)
    if (at / 300 % 150 == 3) mask[at] = 0.0;
  call.mask.fill(mask);
  const Results results = run_and_expect_exact_on_gpu(call);
  for (int h = 0; h < 2; ++h) {
    EXPECT_EQ(lse_of(call, results)(1, h, 3), -infinity);
    for (const double x : out_of(call, results).row(1, 3, h)) EXPECT_EQ(x, 0.0);
  }

  for (const auto& [begin, end] : {std::pair<std::size_t, std::size_t>{0, 512},
                                   {128, 640},
                                   {128, 512},
                                   {512, 640},
                                   {0, 128},
                                   {64, 128},
                                   {0, 640}}) {
    SCOPED_TRACE(testing::Message() << "keys " << begin << " to " << end << " have a bias of -inf");
    Call with_bias = make_call(biased);
    std::vector<double> bias = constant(with_bias.bias, 0.0);
    std::fill(bias.begin() + static_cast<std::ptrdiff_t>(begin), bias.begin() + static_cast<std::ptrdiff_t>(end),
              -infinity);
    with_bias.bias.fill(bias);
    run_and_expect_exact_on_gpu(with_bias);
  }
}

// Blocks of the mask in every pattern; consecutive tiles without any.
TEST_F(ForwardCases, BlockMasks) {
  Spec s = spec(1, 10, 8, 200, 300, 16);  // more tiles than multiprocessors
  s.blocks.present = true;
  s.blocks.block_q = s.blocks.block_k = 64;
  for (int pattern = 0; pattern < 5; ++pattern) {
    SCOPED_TRACE(testing::Message() << "pattern " << pattern);
    Call call = make_call(s);
    std::vector<double> mask;
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 5; ++j) {
        const bool set[] = {false, i == 3, (i + j) % 2 == 0, i == j, i == 0 && j == 4};
        mask.push_back(set[pattern] ? 1.0 : 0.0);
      }
    call.block_mask.fill(mask);
    run_and_expect_exact_on_gpu(call);
  }
}

TEST_F(ForwardCases, HeadsThatShareKeys) {
  for (const std::int64_t dim : {64, 128, 256}) {
    expect_exact_on_gpu(spec(3, 2, 3, 65, 65, dim));
    // The same by expanded keys: a stride of 0 over heads.
    for (const std::int64_t seqlen_k : {33, 65, 97, 961}) {
      Call call = make_call(spec(1, 1, 8, 100, seqlen_k, dim));
      const Results grouped = run_and_expect_exact_on_gpu(call);
      Call expanded = call;
      expanded.spec.heads_kv = 8;
      expanded.spec.group = 1;
      for (Array Call::*tensor : {&Call::k, &Call::v})
        expanded.*tensor = (call.*tensor).expanded({1, seqlen_k, 8, dim});
      const Outcome outcome = run_on_gpu(expanded);
      EXPECT_EQ(outcome.failure, "") << expanded.spec.describe();
      EXPECT_TRUE(outcome.results.out == grouped.out) << expanded.spec.describe();
    }
  }
}

TEST_F(ForwardCases, SinksTakeWeightOnce) {
  Spec s = spec(2, 2, 4, 40, 30, 64);
  s.causal = Causal::bottom_right;  // rows 0 to 9 see no key: lse is the sink
  s.sinks = Sinks::normal;
  Call call = make_call(s);
  call.sinks.fill({-infinity, -5.0, 0.0, 5.0, 90.0, 1e4, -1e4, 2.0});
  const Results results = run_and_expect_exact_on_gpu(call);
  const std::vector<double> sinks = call.sinks.values();
  for (int h = 0; h < 8; ++h) {
    const double lse = lse_of(call, results)(0, h, 9), sink = sinks[static_cast<std::size_t>(h)];
    EXPECT_TRUE(lse == sink || std::abs(lse - sink) <= 2e-7 * std::abs(sink)) << lse << " of a sink of " << sink;
    for (const double x : out_of(call, results).row(0, 9, h)) EXPECT_EQ(x, 0.0);
  }
}

TEST_F(ForwardCases, DropoutKeepsTheMeanAndTheMask) {
  for (const double p : {0.001, 0.01, 0.1, 0.5, 0.9}) {
    Spec s = spec(1, 4, 1, 64, 1024, 64);
    s.dropout_p = p;
    s.dropout_seed = test_rng().bits();
    Call call = make_call(s);
    call.q.fill(constant(call.q, 0.0));
    call.v.fill(constant(call.v, 1.0));
    const Results results = run_and_expect_exact_on_gpu(call);
    double mean = 0.0;
    for (const double x : results.out) mean += x / static_cast<double>(results.out.size());
    EXPECT_NEAR(mean, 1.0, 6.0 * std::sqrt(p / (1.0 - p) / (4 * 64 * 1024)) + 2e-3) << s.describe();
    for (const double x : results.lse) ASSERT_NEAR(x, std::log(1024.0), 1e-5) << "lse knows nothing of dropout";
  }
}

// Key tiles are visited from the last to the first. What a bias does to their maxima must not matter: in the last keys
// it all but hides, in the first ones it rises above whatever came before, or hides.
TEST_F(ForwardCases, BiasesThatRiseAndHide) {
  constexpr double lowest = -3.3e38;  // of bfloat16, nearly
  const auto of_key = [](std::int64_t j, int shape, std::int64_t n) -> double {
    const bool late = j >= n - 200;
    switch (shape) {
      case 0:
        return late ? -1e4 : 0.0;
      case 1:
        return late ? lowest : 0.0;
      case 2:
        return late ? -infinity : 0.0;
      case 3:
        return 2.0 * static_cast<double>(n - j);
      case 4:
        return j == 3 ? 200.0 : 0.0;
      case 5:
        return j < 200 ? -infinity : lowest;
      default:
        return j % 128 == 5 ? 3e4 : -3e4;
    }
  };
  std::vector<std::pair<Spec, int>> calls;
  std::vector<Spec> specs;
  for (const DType dtype : {DType::bfloat16, DType::float16, DType::float32}) {
    for (const std::int64_t dim : {64, 128}) {
      Spec s = spec(1, 2, 1, 200, 640, dim);
      s.dtype = dtype;
      s.bias.present = true;
      s.bias.full = {false, false, false, true};
      s.bias.of_input_dtype = true;
      specs.push_back(s);
      for (int shape = 0; shape < 7; ++shape) calls.emplace_back(s, shape);
    }
  }
  load_variants(specs, Passes::forward);
  in_parallel(calls.size(), [&](std::size_t n) {
    const auto& [s, shape] = calls[n];
    const double limit = s.dtype == DType::float16 ? 6e4 : 4e38;
    Call call = make_call(s);
    std::vector<double> bias;
    for (std::int64_t j = 0; j < s.seqlen_k; ++j) {
      const double x = of_key(j, shape, s.seqlen_k);
      bias.push_back(std::isinf(x) ? x : std::clamp(x, -limit, limit));
    }
    call.bias.fill(bias);
    run_and_expect_exact_on_gpu(call);
  });
}

// Keys before their query and behind it, steep slopes and flat ones.
TEST_F(ForwardCases, SlopesOnBothSidesOfTheQuery) {
  std::vector<Spec> specs;
  for (const DType dtype : {DType::bfloat16, DType::float16, DType::float32}) {
    for (const auto& [dim, seqlen_q] : {std::pair(64, 700), std::pair(128, 700), std::pair(128, 70)}) {
      Spec s = spec(1, 2, 2, seqlen_q, 700, dim);
      s.dtype = dtype;
      s.alibi = Alibi::heads;
      specs.push_back(s);
    }
  }
  load_variants(specs, Passes::forward);
  const std::vector<std::vector<double>> slopes = {{1e-4, 0.01, 0.05, 0.3}, {0.125, 0.7, 3.0, -0.01}};
  in_parallel(specs.size() * slopes.size(), [&](std::size_t n) {
    Call call = make_call(specs[n / slopes.size()]);
    call.alibi_slopes.fill(slopes[n % slopes.size()]);
    run_and_expect_exact_on_gpu(call);
  });
}

// Two caps in a row; the mask comes after the cap.
TEST_F(ForwardCases, SoftcapsAndMasks) {
  for (const double cap : {1.0, 15.0, 50.0, 1.0}) {
    Spec s = spec(1, 2, 1, 100, 200, 64);
    s.softcap = cap;
    s.inputs = Inputs::large_logits;
    s.mask.present = true;
    s.mask.full = {false, true, true, true};
    s.mask.hidden = 0.3;
    expect_exact_on_gpu(s);
  }
}

}  // namespace
}  // namespace headrace::test
