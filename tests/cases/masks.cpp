// Rows that see no key, and what hidden keys may do: nothing.
#include "cases/cases.hpp"

namespace headrace::test {
namespace {

using Masks = BackendAndType;

// The boolean mask [1, 1, q, k] of a call, by position.
template <typename Visible>
void set_mask(Call& call, Visible&& visible) {
  call.spec.mask.present = true;
  call.spec.mask.full = {false, false, true, true};
  call.mask = Array(DType::boolean, {1, 1, call.spec.seqlen_q, call.spec.seqlen_k});
  std::vector<double> values;
  for (std::int64_t i = 0; i < call.spec.seqlen_q; ++i)
    for (std::int64_t j = 0; j < call.spec.seqlen_k; ++j) values.push_back(visible(i, j) ? 1.0 : 0.0);
  call.mask.fill(values);
}

// A float32 bias [1, 1, 1, k].
void set_key_bias(Call& call, const std::vector<double>& values) {
  call.spec.bias.present = true;
  call.spec.bias.full = {false, false, false, true};
  call.bias = Array(DType::float32, {1, 1, 1, call.spec.seqlen_k});
  call.bias.fill(values);
}

TEST_P(Masks, MaskedRow_GivesZeroAndMinusInfLse) {
  Call call = make_call(spec(2, 2, 1, 8, 8, 16));
  set_mask(call, [](std::int64_t i, std::int64_t) { return i != 3; });
  const Results results = run_and_expect_exact(call, backend());
  for (int b = 0; b < 2; ++b)
    for (int h = 0; h < 2; ++h) {
      EXPECT_EQ(lse_of(call, results)(b, h, 3), -infinity);
      for (int c = 0; c < 16; ++c) {
        EXPECT_EQ(out_of(call, results)(b, 3, h, c), 0.0);
        EXPECT_EQ(dq_of(call, results)(b, 3, h, c), 0.0);
      }
    }

  // The row has no part in the gradients of keys and values, whatever it holds.
  Call other = make_call(call.spec);
  set_mask(other, [](std::int64_t i, std::int64_t) { return i != 3; });
  std::vector<double> q = call.q.values(), dout = call.dout.values();
  const std::size_t row = 2 * 16;
  for (std::size_t b = 0; b < 2; ++b)
    for (std::size_t n = 0; n < row; ++n) {
      q[(b * 8 + 3) * row + n] = std::nan("");
      dout[(b * 8 + 3) * row + n] = 1e4;
    }
  other.q.fill(q);
  other.dout.fill(dout);
  const Outcome outcome = run(other, backend());
  EXPECT_EQ(outcome.failure, "");
  EXPECT_EQ(outcome.results.out, results.out);
  EXPECT_EQ(outcome.results.dq, results.dq);
  EXPECT_EQ(outcome.results.dk, results.dk);
  EXPECT_EQ(outcome.results.dv, results.dv);
}

TEST_P(Masks, MaskedBatchEntry_GivesZeroEverywhere) {
  Spec s = spec(2, 2, 1, 8, 8, 16);
  s.mask.present = true;
  s.mask.full = {true, false, true, true};
  s.mask.hide_batch = true;
  s.dlse = true;
  Call call = make_call(s);
  const Results results = run_and_expect_exact(call, backend());
  const std::size_t entry = 8 * 2 * 16;
  for (const std::vector<double>* values : {&results.out, &results.dq, &results.dk, &results.dv})
    EXPECT_EQ(std::vector<double>(values->begin(), values->begin() + entry), std::vector<double>(entry, 0.0));
  for (std::size_t n = 0; n < 16; ++n) EXPECT_EQ(results.lse[n], -infinity);
}

TEST_P(Masks, MaskOfFullTilesHidesThem) {
  // Rows behind the seventeenth lie in another tile for most tile sizes.
  Call call = make_call(spec(1, 1, 1, 17, 70, 8));
  set_mask(call, [](std::int64_t i, std::int64_t) { return i % 5 != 0; });
  const Results results = run_and_expect_exact(call, backend());
  for (int i = 0; i < 17; i += 5) EXPECT_EQ(out_of(call, results).row(0, i, 0), std::vector<double>(8, 0.0));
}

TEST_P(Masks, PrefixHiddenByBias_LeavesTheRestAlone) {
  for (const int hidden : {64, 128, 256, 512}) {
    Call call = make_call(spec(1, 2, 1, 4, 640, 32));
    std::vector<double> bias(640, 0.0);
    std::fill_n(bias.begin(), hidden, -infinity);
    set_key_bias(call, bias);
    const Results results = run_and_expect_exact(call, backend());

    // The same as attention over the other keys alone.
    Spec rest = call.spec;
    rest.bias = {};
    rest.seqlen_k = 640 - hidden;
    Call short_call = make_call(rest);
    short_call.q.fill(call.q.values());
    short_call.dout.fill(call.dout.values());
    const std::size_t skip = static_cast<std::size_t>(hidden) * 2 * 32;
    const std::vector<double> k = call.k.values(), v = call.v.values();
    short_call.k.fill({k.begin() + static_cast<std::ptrdiff_t>(skip), k.end()});
    short_call.v.fill({v.begin() + static_cast<std::ptrdiff_t>(skip), v.end()});
    const Results exact = exact_results(short_call);
    EXPECT_LE(relative_difference(results.out, exact.out), tolerance());
    EXPECT_LE(relative_difference(results.dq, exact.dq), 3 * tolerance());
    const std::vector<double> dk(results.dk.begin() + static_cast<std::ptrdiff_t>(skip), results.dk.end());
    EXPECT_LE(relative_difference(dk, exact.dk), 3 * tolerance());
    for (std::size_t n = 0; n < skip; ++n) ASSERT_EQ(results.dk[n], 0.0);
    for (std::size_t n = 0; n < skip; ++n) ASSERT_EQ(results.dv[n], 0.0);
  }
}

TEST_P(Masks, LowestFiniteBias_DoesNotHide) {
  Call call = make_call(spec(1, 1, 1, 3, 40, 8));
  // In the first call all keys are equally far down; in the second key 7 alone stands above them.
  std::vector<double> bias(40, static_cast<double>(std::numeric_limits<float>::lowest()));
  set_key_bias(call, bias);
  show_visible_keys(call = [&] {
    Spec s = call.spec;
    s.value_dim = 40;
    Call wide = make_call(s);
    wide.bias.fill(bias);
    return wide;
  }());
  Outcome outcome = run(call, backend());
  EXPECT_EQ(outcome.failure, "");
  for (const double x : outcome.results.out) EXPECT_NEAR(x, 1.0 / 40, tolerance());
  for (const double x : outcome.results.lse) EXPECT_NEAR(x / bias[0], 1.0, 1e-6);
  bias[7] = 0.0;
  call.bias.fill(bias);
  outcome = run(call, backend());
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(out_of(call, outcome.results)(0, i, 0, 7), 1.0);
    EXPECT_NEAR(lse_of(call, outcome.results)(0, 0, i), 0.0, 1e-6);
  }
}

TEST_P(Masks, NanInAQuery_ShowsInItsRowAlone) {
  Call clean = make_call(spec(1, 2, 1, 4, 8, 16));
  const Results right = run_and_expect_exact(clean, backend());
  Call call = make_call(clean.spec);
  std::vector<double> q = call.q.values();
  std::fill_n(q.begin() + 2 * 2 * 16, 2 * 16, std::nan(""));
  call.q.fill(q);
  const Results results = run_and_expect_exact(call, backend());
  for (int i = 0; i < 4; ++i)
    for (int h = 0; h < 2; ++h) {
      if (i == 2) {
        EXPECT_TRUE(std::isnan(lse_of(call, results)(0, h, i)));
        for (const double x : out_of(call, results).row(0, i, h)) EXPECT_TRUE(std::isnan(x));
        for (const double x : dq_of(call, results).row(0, i, h)) EXPECT_TRUE(std::isnan(x));
      } else {
        EXPECT_EQ(out_of(call, results).row(0, i, h), out_of(clean, right).row(0, i, h));
        EXPECT_EQ(lse_of(call, results)(0, h, i), lse_of(clean, right)(0, h, i));
        EXPECT_EQ(dq_of(call, results).row(0, i, h), dq_of(clean, right).row(0, i, h));
      }
    }
  for (const double x : results.dk) EXPECT_TRUE(std::isnan(x));
  for (const double x : results.dv) EXPECT_TRUE(std::isnan(x));
}

TEST_P(Masks, NanInVisibleInputs_Shows) {
  for (const bool causal : {false, true}) {
    for (Array Call::*input : {&Call::q, &Call::k, &Call::v, &Call::dout, &Call::bias, &Call::dlse}) {
      Spec s = spec(1, 1, 2, 5, 70, 8);
      if (causal) s.causal = Causal::bottom_right;
      s.bias.present = true;
      s.bias.full = {false, true, true, true};
      s.dlse = s.dbias = true;
      Call call = make_call(s);
      std::vector<double> values = (call.*input).values();
      values[values.size() / 2] = std::nan("");
      (call.*input).fill(values);
      const Results results = run_and_expect_exact(call, backend());  // the same elements are NaN
      EXPECT_TRUE(std::any_of(results.dq.begin(), results.dq.end(), [](double x) { return std::isnan(x); }));
    }
  }
}

TEST_P(Masks, EveryValue_ComesThroughAlone) {
  // Each query sees one key, so out is v: for 16 bits in all patterns, infinities and NaN among them. What the
  // neighbours hold does not matter.
  const std::int64_t dim = 64;
  Spec s = spec(1, 1, 1, 65536 / dim, 65536 / dim, dim);
  s.head_dim = 4;
  s.window_left = s.window_right = 0;
  s.threads = 0;
  Call call = make_call(s);
  std::vector<double> v;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    v.push_back(decode(dtype() == DType::float16 ? DType::float16 : DType::bfloat16, &pattern));
  }
  call.v.fill(v);
  Attention attention = call.attention(backend());
  forward(attention);
  const std::vector<double> out = call.out.values();
  v = call.v.values();
  for (std::size_t n = 0; n < v.size(); ++n) {
    if (std::isnan(v[n])) {
      ASSERT_TRUE(std::isnan(out[n])) << n;
    } else if (dtype() != DType::bfloat16 || std::abs(v[n]) >= 0x1p-126 || out[n] != 0.0) {
      ASSERT_EQ(out[n], v[n]) << n;  // but bfloat16 instructions of some processors flush subnormals to zero
    }
  }
}

// How a key can be hidden, from all queries or from some.
enum class Hiding { causal, window, mask, block_mask, bias, seqused, behind_cu_seqlens };

TEST_P(Masks, HiddenKeysInfluenceNothing_EvenNanAndInfinity) {
  for (const Hiding hiding : {Hiding::causal, Hiding::window, Hiding::mask, Hiding::block_mask, Hiding::bias,
                              Hiding::seqused, Hiding::behind_cu_seqlens}) {
    for (const double poison : {std::nan(""), infinity, -infinity}) {
      SCOPED_TRACE(testing::Message() << "hiding " << static_cast<int>(hiding) << " poison " << poison);
      const std::int64_t seqlen = 75, first_hidden = 70;
      Spec s = spec(1, 2, 2, 30, seqlen, 24);
      if (hiding == Hiding::causal) {
        s.causal = Causal::top_left;
        s.window_right = 40;
      }
      if (hiding == Hiding::window) s.window_right = -6;
      if (hiding == Hiding::seqused) s.used_k = {first_hidden};
      if (hiding == Hiding::behind_cu_seqlens) {
        s.ragged = true;
        s.lengths_q = {30};
        s.lengths_k = {first_hidden};
        s.slack_k = seqlen - first_hidden;
      }
      Call call = make_call(s);
      if (hiding == Hiding::mask) set_mask(call, [&](std::int64_t, std::int64_t j) { return j < first_hidden; });
      if (hiding == Hiding::bias) {
        std::vector<double> bias(static_cast<std::size_t>(seqlen), 0.5);
        std::fill(bias.begin() + first_hidden, bias.end(), -infinity);
        set_key_bias(call, bias);
      }
      if (hiding == Hiding::block_mask) {
        call.spec.blocks = {.present = true, .block_q = 1000, .block_k = 10};
        call.block_mask = Array(DType::boolean, {1, 1, 1, 8});
        call.block_mask.fill({1, 0, 1, 1, 1, 1, 1, 0});
      }
      for (Array Call::*tensor : {&Call::k, &Call::v}) {
        std::vector<double> values = (call.*tensor).values();
        std::fill(values.begin() + first_hidden * 2 * 24, values.end(), poison);
        if (hiding == Hiding::block_mask) std::fill_n(values.begin() + 10 * 2 * 24, 10 * 2 * 24, poison);
        (call.*tensor).fill(values);
      }
      const Results results = run_and_expect_exact(call, backend());
      for (const std::vector<double>* values : {&results.out, &results.lse, &results.dq, &results.dk, &results.dv})
        EXPECT_TRUE(std::all_of(values->begin(), values->end(), [](double x) { return std::isfinite(x); }));
      for (std::size_t n = first_hidden * 2 * 24; n < results.dk.size(); ++n) {
        ASSERT_EQ(results.dk[n], 0.0);
        ASSERT_EQ(results.dv[n], 0.0);
      }
    }
  }
}

TEST_P(Masks, KeyHiddenFromSomeQueries_ReachesTheOthersAlone) {
  // Causal: a NaN in the last key reaches the last query, which is in one tile with others.
  for (Array Call::*tensor : {&Call::k, &Call::v}) {
    Spec s = spec(1, 1, 1, 40, 40, 16);
    s.causal = Causal::bottom_right;
    Call call = make_call(s);
    std::vector<double> values = (call.*tensor).values();
    std::fill(values.end() - 16, values.end(), std::nan(""));
    (call.*tensor).fill(values);
    const Results results = run_and_expect_exact(call, backend());
    for (int i = 0; i < 40; ++i) {
      for (const double x : out_of(call, results).row(0, i, 0)) EXPECT_EQ(std::isnan(x), i == 39) << i;
      for (const double x : dq_of(call, results).row(0, i, 0)) EXPECT_EQ(std::isnan(x), i == 39) << i;
    }
  }
}

TEST_P(Masks, BlockMask_EmptyBlocksInARow) {
  const std::int64_t block = 16, blocks = 8, seqlen = block * blocks - 3;
  const std::vector<std::pair<const char*, bool (*)(std::int64_t, std::int64_t)>> patterns = {
      {"nothing", [](std::int64_t, std::int64_t) { return false; }},
      {"the last row of blocks", [](std::int64_t i, std::int64_t) { return i == 7; }},
      {"every other row of blocks", [](std::int64_t i, std::int64_t) { return i % 2 == 1; }},
      {"one block", [](std::int64_t i, std::int64_t j) { return i == 5 && j == 2; }},
      {"the last column of blocks", [](std::int64_t, std::int64_t j) { return j == 7; }},
      {"a checkerboard", [](std::int64_t i, std::int64_t j) { return (i + j) % 2 == 0; }}};
  for (const auto& [name, visible] : patterns) {
    SCOPED_TRACE(name);
    Call call = make_call(spec(1, 1, 2, seqlen, seqlen, 16));
    call.spec.blocks = {.present = true, .block_q = block, .block_k = block};
    call.block_mask = Array(DType::boolean, {1, 1, blocks, blocks});
    std::vector<double> values;
    for (std::int64_t i = 0; i < blocks; ++i)
      for (std::int64_t j = 0; j < blocks; ++j) values.push_back(visible(i, j) ? 1.0 : 0.0);
    call.block_mask.fill(values);
    const Results results = run_and_expect_exact(call, backend());
    for (std::int64_t i = 0; i < seqlen; ++i) {
      bool any = false;
      for (std::int64_t j = 0; j < blocks; ++j) any = any || visible(i / block, j);
      EXPECT_EQ(lse_of(call, results)(0, 0, i) == -infinity, !any) << i;
    }
    for (std::int64_t j = 0; j < seqlen; ++j) {
      bool any = false;
      for (std::int64_t i = 0; i < blocks; ++i) any = any || visible(i, j / block);
      if (any) continue;
      EXPECT_EQ(dv_of(call, results).row(0, j, 0), std::vector<double>(16, 0.0));
    }
  }
}

TEST_P(Masks, BlockMaskOfOtherLengths_IsRefused) {
  Call call = make_call(spec(2, 1, 1, 2, 2, 8));
  call.spec.blocks = {.present = true, .block_q = 64, .block_k = 64};
  call.block_mask = Array(DType::boolean, {1, 1, 2, 4});  // made for 128 queries and 256 keys
  call.block_mask.fill(std::vector<double>(8, 1.0));
  const Outcome outcome = run(call, backend());
  EXPECT_NE(outcome.failure.find("block_mask"), std::string::npos) << outcome.failure;
  EXPECT_NE(outcome.failure.find("64"), std::string::npos) << outcome.failure;
}

HEADRACE_CASES(Masks, Backend::cpu, Backend::reference);

}  // namespace
}  // namespace headrace::test
