// Grouped heads, softcap, sinks, dropout, very negative statistics, and that a call uses its own options only.
#include <cstring>

#include "cases/cases.hpp"

namespace headrace::test {
namespace {

using Options = BackendAndType;

TEST_P(Options, GroupedHeads_SumTheirGradients) {
  for (const std::int64_t dim : {64, 256}) {
    const std::int64_t batch = 3, heads = 6, heads_kv = 2, group = 3, seqlen = 65;
    Call grouped = make_call(spec(batch, heads_kv, group, seqlen, seqlen, dim));
    const Results results = run_and_expect_exact(grouped, backend());

    // Every query head with keys and values of its own.
    Call alone = make_call(spec(batch, heads, 1, seqlen, seqlen, dim));
    alone.q.fill(grouped.q.values());
    alone.dout.fill(grouped.dout.values());
    for (Array Call::*tensor : {&Call::k, &Call::v}) {
      const Grid values((grouped.*tensor).values(), {batch, seqlen, heads_kv, dim});
      std::vector<double> repeated;
      for (int b = 0; b < batch; ++b)
        for (int j = 0; j < seqlen; ++j)
          for (int h = 0; h < heads; ++h) {
            const std::vector<double> row = values.row(b, j, h / group);
            repeated.insert(repeated.end(), row.begin(), row.end());
          }
      (alone.*tensor).fill(repeated);
    }
    const Results each = exact_results(alone);
    EXPECT_LE(relative_difference(results.out, each.out), tolerance());
    EXPECT_LE(relative_difference(results.dq, each.dq), 3 * tolerance());
    for (std::vector<double> Results::*member : {&Results::dk, &Results::dv}) {
      std::vector<double> sums((results.*member).size(), 0.0);
      for (std::size_t n = 0; n < (each.*member).size(); ++n) {
        const auto d = static_cast<std::size_t>(dim);
        const std::size_t c = n % d, h = n / d % heads, row = n / d / heads;
        sums[(row * heads_kv + h / group) * d + c] += (each.*member)[n];
      }
      EXPECT_LE(relative_difference(results.*member, sums), 3 * tolerance());
    }
  }
}

TEST_P(Options, Softcap_IsCapTimesTanhAndItsDerivative) {
  // One query, keys with logits from -100 to 100.
  for (const double cap : {1.0, 15.0, 50.0}) {
    SCOPED_TRACE(cap);
    Spec s = spec(1, 1, 1, 1, 81, 32);
    s.scale = 1.0;
    s.softcap = cap;
    Call call = make_call(s);
    std::vector<double> q(32, 0.0), k(81 * 32, 0.0);
    q[0] = 1.0;
    for (std::size_t j = 0; j < 81; ++j) k[j * 32] = -100.0 + 2.5 * static_cast<double>(j);
    call.q.fill(q);
    call.k.fill(k);
    const Results results = run_and_expect_exact(call, backend());
    double sum = 0.0;
    for (const double logit : call.k.values())
      if (logit != 0.0) sum += std::exp(cap * std::tanh(logit / cap) - cap);
    sum += std::exp(-cap);  // the key with logit 0
    EXPECT_NEAR(results.lse[0], cap + std::log(sum), 1e-5 * cap);
    // Saturated: hardly any gradient, and a finite one.
    for (const double x : results.dk) EXPECT_TRUE(std::isfinite(x));
    if (cap == 1.0) {
      for (int c = 0; c < 32; ++c) EXPECT_NEAR(dk_of(call, results)(0, 80, 0, c), 0.0, 1e-5);
    }
  }
}

TEST_P(Options, Softcap_ComesBeforeBiasAndMask) {
  Spec s = spec(1, 2, 1, 21, 40, 32);
  s.softcap = 2.0;
  s.inputs = Inputs::large_logits;
  s.mask.present = s.bias.present = true;
  s.mask.full = s.bias.full = {false, true, true, true};
  s.mask.hidden = s.bias.hidden = 0.3;
  s.mask.hide_rows = true;
  s.dbias = true;
  Call call = make_call(s);
  run_and_expect_exact(call, backend());
}

TEST_P(Options, Sink_TakesWeightOnceAndNothingElse) {
  const std::vector<double> sinks{-infinity, -5.0, 0.0, 5.0, 90.0, 1e4, -1e4, 2.0};
  for (const bool few_rows : {false, true}) {  // few rows over many keys: the keys may be split
    Spec s = spec(few_rows ? 1 : 2, 2, 4, few_rows ? 2 : 40, few_rows ? 3000 : 30, 32);
    s.causal = Causal::bottom_right;  // rows without keys where seqlen_q > seqlen_k
    s.sinks = Sinks::normal;
    s.dsinks = s.dlse = true;
    s.threads = 4;
    Call call = make_call(s);
    call.sinks.fill(sinks);
    const Results results = run_and_expect_exact(call, backend());
    if (!few_rows) {
      for (int h = 0; h < 8; ++h) {
        // Rows 0 to 9 see no key: lse is the sink.
        const double sink = sinks[static_cast<std::size_t>(h)];
        EXPECT_EQ(lse_of(call, results)(0, h, 9), sink);
        for (const double x : out_of(call, results).row(0, 9, h)) EXPECT_EQ(x, 0.0);
        for (const double x : dq_of(call, results).row(0, 9, h)) EXPECT_EQ(x, 0.0);
      }
    }
    EXPECT_EQ(results.dsinks[0], 0.0);

    // A sink of -inf is no sink, to the bit.
    call.sinks.fill(std::vector<double>(8, -infinity));
    const Results absent = run_and_expect_exact(call, backend());
    Spec none = s;
    none.sinks = Sinks::none;
    none.dsinks = false;
    Call plain = make_call(none);
    for (Array Call::*tensor : {&Call::q, &Call::k, &Call::v, &Call::dout, &Call::dlse})
      (plain.*tensor).fill((call.*tensor).values());
    const Results without = run_and_expect_exact(plain, backend());
    EXPECT_EQ(absent.out, without.out);
    EXPECT_EQ(absent.lse, without.lse);
    EXPECT_EQ(absent.dq, without.dq);
    EXPECT_EQ(absent.dk, without.dk);
    EXPECT_EQ(absent.dv, without.dv);
  }
}

TEST_P(Options, Sink_OfARowWithoutKeysGetsItsDlse) {
  Spec s = spec(1, 1, 2, 3, 0, 8);
  s.sinks = Sinks::normal;
  s.dsinks = s.dlse = true;
  Call call = make_call(s);
  const Results results = run_and_expect_exact(call, backend());
  const std::vector<double> dlse = call.dlse.values();
  EXPECT_NEAR(results.dsinks[0], dlse[0] + dlse[1] + dlse[2], 1e-5);
  EXPECT_NEAR(results.dsinks[1], dlse[3] + dlse[4] + dlse[5], 1e-5);
}

TEST_P(Options, Dropout_KeepsTheMeanAndMatchesItsMask) {
  for (const double p : {0.001, 0.01, 0.1, 0.5, 0.9}) {
    SCOPED_TRACE(p);
    const std::int64_t heads = 4, seqlen_q = 64, seqlen_k = 1024;
    Spec s = spec(1, heads, 1, seqlen_q, seqlen_k, 8);
    s.dropout_p = p;
    s.dropout_seed = test_rng().bits();
    Call call = make_call(s);
    call.q.fill(constant(call.q, 0.0));
    call.v.fill(constant(call.v, 1.0));
    const Results results = run_and_expect_exact(call, backend());
    const auto samples = static_cast<double>(heads * seqlen_q * seqlen_k);
    const double deviation = std::sqrt(p * (1.0 - p) / samples);
    std::vector<std::uint8_t> keep(static_cast<std::size_t>(samples));
    dropout_mask({keep.data(), DType::boolean, {1, heads, seqlen_q, seqlen_k}}, p, s.dropout_seed);
    double kept = 0.0, mean = 0.0;
    for (const std::uint8_t k : keep) kept += k;
    for (const double x : results.out) mean += x;
    kept /= samples;
    mean /= static_cast<double>(results.out.size());
    EXPECT_NEAR(kept, 1.0 - p, 6.0 * deviation);
    EXPECT_NEAR(mean, kept / (1.0 - p), 20.0 * tolerance());
    // lse knows nothing of dropout.
    for (const double x : results.lse) ASSERT_NEAR(x, std::log(1024.0), 1e-5);
  }
}

TEST_P(Options, Dropout_OfARaggedBatchCountsInsideEachSequence) {
  Spec s = spec(3, 2, 2, 0, 0, 16);
  s.ragged = true;
  s.lengths_q = {5, 17, 33};
  s.lengths_k = {9, 40, 33};
  s.dropout_p = 0.4;
  s.dropout_seed = 99;
  Call call = make_call(s);
  const Results ragged = run_and_expect_exact(call, backend());
  // The same as a dense batch, where b, h, i, j name the same elements.
  Spec dense = spec(3, 2, 2, 33, 40, 16);
  dense.used_q = s.lengths_q;
  dense.used_k = s.lengths_k;
  dense.dropout_p = 0.4;
  dense.dropout_seed = 99;
  Call padded = make_call(dense);
  for (Array Call::*tensor : {&Call::q, &Call::k, &Call::v}) {
    const std::vector<double> values = (call.*tensor).values();
    std::vector<double> spread = (padded.*tensor).values();
    const std::size_t token = static_cast<std::size_t>((padded.*tensor).shape()[2]) * 16;
    const std::vector<std::int64_t>& lengths = tensor == &Call::q ? s.lengths_q : s.lengths_k;
    const std::size_t stride = spread.size() / 3;
    std::size_t from = 0;
    for (std::size_t b = 0; b < 3; ++b)
      for (std::size_t n = 0; n < static_cast<std::size_t>(lengths[b]) * token; ++n)
        spread[b * stride + n] = values[from++];
    (padded.*tensor).fill(spread);
  }
  const Results other = run_and_expect_exact(padded, backend());
  std::size_t from = 0;
  for (std::size_t b = 0; b < 3; ++b)
    for (std::size_t n = 0; n < static_cast<std::size_t>(s.lengths_q[b]) * 4 * 16; ++n)
      ASSERT_NEAR(other.out[b * 33 * 4 * 16 + n], ragged.out[from++], 4 * tolerance());
}

TEST_P(Options, VeryNegativeLse_KeepsGradientsFinite) {
  for (const auto& [seqlen_q, seqlen_k, dim] : std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>{
           {200, 704, 64}, {64, 64, 64}, {100, 192, 128}, {1, 128, 64}}) {
    SCOPED_TRACE(testing::Message() << seqlen_q << " queries " << seqlen_k << " keys head_dim " << dim);
    Spec s = spec(1, 1, 1, seqlen_q, seqlen_k, dim);
    s.mask.present = true;
    s.mask.full = {false, false, true, true};
    s.threads = 0;
    Call call = make_call(s);
    std::vector<double> q = call.q.values(), k = call.k.values();
    for (std::vector<double>* values : {&q, &k})
      for (double& x : *values) x *= 0.1;
    const auto d = static_cast<std::size_t>(dim);
    for (std::size_t n = 0; n < q.size(); n += d) q[n] = 1.0;
    for (std::size_t n = 0; n < k.size(); n += d) k[n] = -120.0 * std::sqrt(static_cast<double>(dim));
    call.q.fill(q);
    call.k.fill(k);
    Results results = run_and_expect_exact(call, backend());
    EXPECT_LT(results.lse[0], -100.0);

    // A constant added to all logits changes lse alone.
    s.bias.present = true;
    Call raised = make_call(s);
    for (Array Call::*tensor : {&Call::q, &Call::k, &Call::v, &Call::dout})
      (raised.*tensor).fill((call.*tensor).values());
    raised.bias.fill({120.0});
    Results other = run_and_expect_exact(raised, backend());
    EXPECT_GT(other.lse[0], -10.0);
    // dq along the large dimension of the keys is a sum that cancels: its error is that of its terms.
    for (Results* r : {&results, &other})
      for (std::size_t n = 0; n < r->dq.size(); n += d) r->dq[n] = 0.0;
    const double of_scores = dtype() == DType::float64 ? 1e-12 : 120.0 * 0x1p-21;
    for (std::vector<double> Results::*member : {&Results::out, &Results::dq, &Results::dk, &Results::dv})
      EXPECT_LE(relative_difference(results.*member, other.*member), 3 * tolerance() + of_scores);
  }
}

// Expects that the third of three calls equals the first to the bit and the second is right too.
template <typename Change>
void expect_own_options(const Spec& first, Backend backend, Change&& change) {
  Spec second = first;
  change(second);
  Call a = make_call(first), b = make_call(second), c = make_call(first);
  const Results ra = run_and_expect_exact(a, backend);
  const Results rb = run_and_expect_exact(b, backend);
  const Results rc = run_and_expect_exact(c, backend);
  EXPECT_EQ(ra.out, rc.out);
  EXPECT_EQ(ra.lse, rc.lse);
  EXPECT_EQ(ra.dq, rc.dq);
  EXPECT_EQ(ra.dk, rc.dk);
  EXPECT_EQ(ra.dv, rc.dv);
  EXPECT_NE(ra.out, rb.out) << second.describe();
}

TEST_P(Options, EveryCall_UsesItsOwn) {
  Spec s = spec(1, 2, 2, 20, 30, 16);
  s.scale = 1.0;
  expect_own_options(s, backend(), [](Spec& x) { x.scale = 0.5; });
  expect_own_options(s, backend(), [](Spec& x) { x.window_left = 3; });
  expect_own_options(s, backend(), [](Spec& x) { x.softcap = 1.0; });
  expect_own_options(s, backend(), [](Spec& x) { x.dropout_p = 0.5; });
  expect_own_options(s, backend(), [](Spec& x) { x.causal = Causal::bottom_right; });
  expect_own_options(s, backend(), [](Spec& x) { x.causal = Causal::top_left; });
  s.softcap = 1.0;
  expect_own_options(s, backend(), [](Spec& x) { x.softcap = 2.0; });
  s.dropout_p = 0.5;
  expect_own_options(s, backend(), [](Spec& x) { x.dropout_seed = 7; });
}

TEST_P(Options, Plan_RefusesOptionsItWasNotMadeFor) {
  Spec s = spec(2, 2, 1, 12, 12, 16);
  s.mask.present = true;
  s.mask.full = {false, false, true, true};
  s.mask.hidden = 0.5;
  Call call = make_call(s);
  const Attention masked = call.attention(backend());
  Attention plain = masked;
  plain.mask = Tensor();
  Attention shorter = plain;
  shorter.k.shape[1] = shorter.v.shape[1] = 11;
  Attention scaled_call = plain;
  scaled_call.scale = 0.3;

  const Plan with_mask(masked, Pass::forward), without(plain, Pass::forward), of_shorter(shorter, Pass::forward);
  const auto execute = [&](const Plan& plan, const Attention& attention) {
    call.out.poison(0xFF);
    std::vector<std::byte> memory(plan.workspace_bytes() + 64, std::byte{0xFF});
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    plan.execute(attention, {memory.data() + (64 - address % 64) % 64, plan.workspace_bytes()});
    return call.out.values();
  };
  // One after another, each gives what it gives alone.
  const std::vector<double> a = execute(with_mask, masked), b = execute(without, plain),
                            c = execute(of_shorter, shorter);
  forward(masked);
  EXPECT_EQ(call.out.values(), a);
  forward(plain);
  EXPECT_EQ(call.out.values(), b);
  forward(shorter);
  EXPECT_EQ(call.out.values(), c);
  EXPECT_NE(a, b);
  EXPECT_NE(b, c);

  for (const auto& [plan, attention] : std::vector<std::pair<const Plan*, const Attention*>>{
           {&with_mask, &plain}, {&without, &masked}, {&without, &shorter}, {&without, &scaled_call}}) {
    call.out.poison(0xCB);
    call.lse.poison(0xCB);
    call.out.remember();
    call.lse.remember();
    std::vector<std::byte> memory(plan->workspace_bytes() + 64);
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    EXPECT_THROW(plan->execute(*attention, {memory.data() + (64 - address % 64) % 64, plan->workspace_bytes()}), Error);
    EXPECT_TRUE(call.out.unchanged());
    EXPECT_TRUE(call.lse.unchanged());
  }
}

HEADRACE_CASES(Options, Backend::cpu, Backend::reference);

}  // namespace
}  // namespace headrace::test
