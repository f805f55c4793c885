// Gradients at sizes that overflow what is too narrow: grids beyond 65535, offsets beyond 2^31 elements, long
// sequences.
#include <algorithm>
#include <cmath>

#include "accuracy.hpp"
#include "spot_check.hpp"
#include "spread_tensor.hpp"

namespace headrace::test {
namespace {

class BackwardSizes : public OnGpu {};

TEST_F(BackwardSizes, MoreThan65535Heads) {
  struct Size {
    std::int64_t batch, heads, group, seqlen_q, seqlen_k, dim;
  };
  bool deterministic = false;
  for (const Size& size : {Size{70000, 1, 1, 1, 1, 16}, Size{8300, 16, 1, 1, 1, 128}, Size{2, 40000, 1, 1, 1, 16},
                           Size{70000, 1, 1, 3, 5, 8}, Size{1, 66000, 1, 5, 3, 8}, Size{1, 33000, 2, 3, 3, 8},
                           Size{40000, 1, 2, 2, 3, 8}}) {
    Spec spec = dense_spec(DType::bfloat16, size.seqlen_q, size.seqlen_k, size.dim);
    spec.batch = size.batch, spec.heads_kv = size.heads, spec.group = size.group;
    spec.causal = deterministic ? Causal::none : Causal::bottom_right;
    spec.deterministic = deterministic = !deterministic;
    Call call = make_call(spec);
    if (size.seqlen_k > 1) {
      run_and_expect_exact_on_gpu(call, Passes::both);
      continue;
    }
    // No choice: dq and dk are what is left of a difference of equal sums.
    const Outcome outcome = run_on_gpu(call, Passes::both);
    EXPECT_EQ(outcome.failure, "") << spec.describe();
    if (!outcome.failure.empty()) continue;
    EXPECT_TRUE(outcome.results.out == call.v.values()) << spec.describe();
    EXPECT_TRUE(outcome.results.dv == call.dout.values()) << spec.describe();
    for (const std::vector<double>* values : {&outcome.results.dq, &outcome.results.dk}) {
      EXPECT_LE(largest_of(*values), 1e-3) << spec.describe();
      EXPECT_TRUE(std::all_of(values->begin(), values->end(), [](double x) { return std::isfinite(x); }))
          << spec.describe();
    }
  }
}

// Every tensor, 4 to 8 GiB each.
TEST_F(BackwardSizes, OffsetsBeyondTwoToThe31) {
  const ContextScope scope(0);
  const GpuStream stream;
  // batch, row, head; and strides that TMA cannot walk
  for (const auto& [large, odd] : {std::pair{0, 0}, {1, 0}, {2, 0}, {0, 3}, {1, 3}, {2, 3}}) {
    const int dimension = large, remainder = odd;
    for (const bool deterministic : {false, true}) {
      Spec spec = spec_of_spread(test_rng().bits());
      spec.causal = Causal::bottom_right;
      spec.deterministic = deterministic;
      spec.dlse = true;
      Call call = make_call(spec);
      const std::string lacking = lack_of_memory([&] {
        const GpuCall on_gpu(call, stream.get());
        SpreadTensor q(call.q, dimension, remainder), k(call.k, dimension, remainder), v(call.v, dimension, remainder);
        SpreadTensor dout(call.dout, dimension, remainder), dlse(call.dlse, dimension);
        SpreadTensor out(call.out, dimension), lse(call.lse, dimension);
        SpreadTensor dq(call.dq, dimension), dk(call.dk, dimension), dv(call.dv, dimension, remainder);
        for (const SpreadTensor* input : {&q, &k, &v, &dout, &dlse}) input->scatter();
        Attention attention = on_gpu.attention();
        attention.q = q.view(), attention.k = k.view(), attention.v = v.view();
        attention.out = out.view(), attention.lse = lse.view();
        attention.dout = dout.view(), attention.dlse = dlse.view();
        attention.dq = dq.view(), attention.dk = dk.view(), attention.dv = dv.view();
        Outcome outcome;
        for (const Pass pass : {Pass::forward, Pass::backward})
          outcome.failure += run_pass(spec, attention, stream, pass);
        for (SpreadTensor* result : {&out, &lse, &dq, &dk, &dv}) result->gather();
        outcome.results = results_in(call, Passes::both);
        EXPECT_EQ(judge(call, outcome, exact_on_cpu(call, 0, Passes::both), Passes::both), "")
            << "dimension " << dimension << " has the large stride, odd by " << remainder << ": " << spec.describe();
      });
      if (!lacking.empty()) GTEST_SKIP() << lacking;
    }
  }
}

// bias, its gradient and mask, each dimension in turn.
TEST_F(BackwardSizes, OffsetsBeyondTwoToThe31_OfBiasAndMask) {
  const ContextScope scope(0);
  const GpuStream stream;
  for (const int dimension : {0, 1, 2, 3}) {
    for (const bool of_input_dtype : {true, false}) {
      Spec spec = spec_of_spread_with_bias_and_mask(test_rng().bits());
      spec.dbias = true;
      spec.bias.of_input_dtype = of_input_dtype;
      Call call = make_call(spec);
      const std::string lacking = lack_of_memory([&] {
        GpuCall on_gpu(call, stream.get());
        on_gpu.upload();
        const SpreadTensor bias(call.bias, dimension), mask(call.mask, dimension);
        SpreadTensor dbias(call.dbias, dimension);
        bias.scatter();
        mask.scatter();
        Attention attention = on_gpu.attention();
        attention.bias = bias.view(), attention.mask = mask.view(), attention.dbias = dbias.view();
        Outcome outcome;
        for (const Pass pass : {Pass::forward, Pass::backward})
          outcome.failure += run_pass(spec, attention, stream, pass);
        outcome.failure += on_gpu.download(Pass::backward);
        dbias.gather();
        outcome.results = results_in(call, Passes::both);
        EXPECT_EQ(judge(call, outcome, exact_on_cpu(call, 0, Passes::both), Passes::both), "")
            << "dimension " << dimension << " has the large stride: " << spec.describe();
      });
      if (!lacking.empty()) GTEST_SKIP() << lacking;
    }
  }
}

// A boolean mask of more than 2^32 bytes: every row sees one key, which gets the row's gradient.
TEST_F(BackwardSizes, AMaskOfMoreThanTwoToThe32Bytes) {
  constexpr std::int64_t seqlen = 66000, dim = 8;
  Call call = make_call(dense_spec(DType::bfloat16, seqlen, seqlen, dim));
  const ContextScope scope(0);
  const GpuStream stream;
  const std::string lacking = lack_of_memory([&] {
    const OneKeyMask mask(seqlen, call.spec.seed);
    GpuCall on_gpu(call, stream.get());
    on_gpu.upload();
    Attention attention = on_gpu.attention();
    attention.mask = mask.view();
    for (const Pass pass : {Pass::forward, Pass::backward}) EXPECT_EQ(run_pass(call.spec, attention, stream, pass), "");
    EXPECT_EQ(on_gpu.download(Pass::backward), "");
    std::vector<double> expected = call.dv.values();
    std::fill(expected.begin(), expected.end(), 0.0);
    const std::vector<double> dout = call.dout.values();
    for (std::size_t n = 0; n < dout.size(); ++n) expected[mask.keys()[n / dim] * dim + n % dim] += dout[n];
    EXPECT_LE(relative_difference(call.dv.values(), expected), 3.0 * contract_of(DType::bfloat16));
    for (const Array* gradient : {&call.dq, &call.dk}) EXPECT_LE(largest_of(gradient->values()), 1e-3);
  });
  if (!lacking.empty()) GTEST_SKIP() << lacking;
}

TEST_F(BackwardSizes, LongSequences) {
  struct Size {
    std::int64_t seqlen_q, seqlen_k, heads, dim;
  };
  std::vector<Spec> specs;
  for (const DType dtype : dtypes) {
    for (const Size& size : {Size{66000, 66000, 1, 64}, Size{65600, 130, 2, 128}, Size{130, 70000, 2, 128},
                             Size{2, 66000, 1, 64}, Size{200000, 3, 1, 64}, Size{300, 70000, 1, 256}}) {
      if (dtype != DType::bfloat16 && size.seqlen_q * size.seqlen_k > 100000000) continue;
      for (const bool deterministic : {false, true}) {
        specs.push_back(dense_spec(dtype, size.seqlen_q, size.seqlen_k, size.dim));
        specs.back().heads_kv = size.heads;
        specs.back().causal = deterministic ? Causal::bottom_right : Causal::none;
        specs.back().deterministic = deterministic;
      }
    }
  }
  in_parallel(specs.size(), [&](std::size_t n) {
    Call call = make_call(specs[n]);
    const Outcome outcome = run_on_gpu(call, Passes::both);
    EXPECT_EQ(outcome.failure, "") << specs[n].describe();
    if (!outcome.failure.empty()) return;
    EXPECT_EQ(spot_check(call, outcome.results, 48, 3.0 * contract_of(specs[n].dtype)), "") << specs[n].describe();
  });
}

}  // namespace
}  // namespace headrace::test
