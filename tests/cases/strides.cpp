// Wherever the elements lie, the results have the same bits.
#include "cases/cases.hpp"

namespace headrace::test {
namespace {

using Strides = BackendAndType;

void expect_same_bits(const Results& a, const Results& b) {
  EXPECT_EQ(a.out, b.out);
  EXPECT_EQ(a.lse, b.lse);
  EXPECT_EQ(a.dq, b.dq);
  EXPECT_EQ(a.dk, b.dk);
  EXPECT_EQ(a.dv, b.dv);
  EXPECT_EQ(a.dbias, b.dbias);
}

// Runs the call as it is, and with its tensor in other layouts.
void expect_layout_does_not_matter(const Spec& spec, Backend backend, std::initializer_list<Array Call::*> tensors,
                                   std::initializer_list<Layout> layouts) {
  Call plain = make_call(spec);
  const Results expected = run_and_expect_exact(plain, backend);
  Rng rng = test_rng();
  for (Array Call::*tensor : tensors) {
    if (!(plain.*tensor).present()) continue;
    for (const Layout layout : layouts) {
      SCOPED_TRACE(name_of(layout));
      Call call = plain;
      const Elements elements = tensor == &Call::bias || tensor == &Call::mask || tensor == &Call::dlse
                                    ? Elements::scalars
                                    : Elements::vectors;
      Array other((plain.*tensor).dtype(), (plain.*tensor).shape(), layout, elements, rng);
      other.fill((plain.*tensor).values());
      call.*tensor = other;
      Outcome outcome = run(call, backend);
      EXPECT_EQ(outcome.failure, "");
      expect_same_bits(outcome.results, expected);
    }
  }
}

TEST_P(Strides, GradientOfTheOutput_MayBeTransposedPaddedOrReversed) {
  expect_layout_does_not_matter(spec(2, 1, 4, 32, 32, 128), backend(), {&Call::dout},
                                {Layout::transposed, Layout::padded, Layout::reversed, Layout::permuted});
}

TEST_P(Strides, GradientOfTheOutput_MayBeOneExpandedVector) {
  const Spec s = spec(2, 1, 4, 32, 32, 128);
  Call plain = make_call(s);
  plain.dout.fill(constant(plain.dout, 1.0));  // what out.sum().backward() hands over
  const Results expected = run_and_expect_exact(plain, backend());
  Call call = plain;
  const Array ones(dtype(), {128});
  call.dout = ones;
  call.dout.fill(std::vector<double>(128, 1.0));
  Attention forward_call = call.attention(backend());
  forward(forward_call);
  Attention backward_call = forward_call;
  backward_call.dout = Tensor(ones.view().data, dtype(), {2, 32, 4, 128}).with_strides({0, 0, 0, 1});
  for (Array Call::*gradient : {&Call::dq, &Call::dk, &Call::dv}) (call.*gradient).poison(0xFF);
  backward(backward_call);
  EXPECT_EQ(call.dq.values(), expected.dq);
  EXPECT_EQ(call.dk.values(), expected.dk);
  EXPECT_EQ(call.dv.values(), expected.dv);
}

TEST_P(Strides, EveryHeadDim_HonoursThem) {
  for (const std::int64_t dim : {1, 8, 16, 24, 32, 33, 48, 64, 72, 80, 96, 128, 160, 192, 256, 300, 512}) {
    SCOPED_TRACE(testing::Message() << "head_dim " << dim);
    Spec s = spec(1, 3, 1, 9, 21, dim);
    s.threads = 1;
    expect_layout_does_not_matter(s, backend(), {&Call::q, &Call::k, &Call::v}, {Layout::transposed, Layout::padded});
  }
}

TEST_P(Strides, EveryTensor_InEveryLayout) {
  Spec s = spec(2, 2, 2, 19, 70, 40);
  s.bias.present = s.mask.present = true;
  s.bias.full = s.mask.full = {true, true, true, true};
  s.mask.hidden = 0.3;
  s.dlse = s.dbias = true;
  expect_layout_does_not_matter(s, backend(),
                                {&Call::q, &Call::k, &Call::v, &Call::dout, &Call::bias, &Call::mask, &Call::dlse},
                                {Layout::transposed, Layout::permuted, Layout::padded, Layout::reversed});
}

TEST_P(Strides, ExpandedKeyHeads_ActLikeCopies) {
  Rng rng = test_rng();
  for (const std::int64_t seqlen : {33, 65, 97}) {
    for (const std::int64_t dim : {64, 512}) {
      if (seqlen != 33 && dim == 512) continue;  // enough, and slow
      SCOPED_TRACE(testing::Message() << "seqlen " << seqlen << " head_dim " << dim);
      Spec s = spec(1, 8, 1, seqlen, seqlen, dim);
      s.mask.present = true;
      s.mask.full = {false, false, true, true};
      s.mask.hidden = 0.3;
      Call call = make_call(s);
      Call expanded = make_call(s);
      for (Array Call::*tensor : {&Call::k, &Call::v}) {
        // One head, seen eight times.
        Array one(dtype(), {1, seqlen, 1, dim});
        std::vector<double> values(static_cast<std::size_t>(seqlen * dim)), all;
        for (double& x : values) x = rng.normal();
        for (std::int64_t j = 0; j < seqlen; ++j)
          for (int h = 0; h < 8; ++h) all.insert(all.end(), values.begin() + j * dim, values.begin() + (j + 1) * dim);
        one.fill(values);
        (call.*tensor).fill(all);
        expanded.*tensor = one.expanded({1, seqlen, 8, dim});
      }
      const Results expected = run_and_expect_exact(call, backend());
      Outcome outcome = run(expanded, backend());
      EXPECT_EQ(outcome.failure, "");
      expect_same_bits(outcome.results, expected);
    }
  }
}

TEST_P(Strides, Lse_IsBatchHeadsQueriesAndItsStridesCount) {
  // Queries 0: lse of (b, h, i) is log of the keys that (b, h) leaves visible.
  for (const std::int64_t seqlen_q : {1, 3}) {
    Spec s = spec(2, 2, 4, seqlen_q, 50, 64);
    s.mask.present = true;
    s.mask.full = {true, true, true, true};
    Call call = make_call(s);
    call.q.fill(constant(call.q, 0.0));
    std::vector<double> mask;
    const auto visible = [&](std::int64_t b, std::int64_t h, std::int64_t i) { return 1 + b * 25 + h * 3 + i; };
    for (std::int64_t b = 0; b < 2; ++b)
      for (std::int64_t h = 0; h < 8; ++h)
        for (std::int64_t i = 0; i < seqlen_q; ++i)
          for (std::int64_t j = 0; j < 50; ++j) mask.push_back(j < visible(b, h, i) ? 1.0 : 0.0);
    call.mask.fill(mask);
    Rng rng = test_rng();
    Results first;
    for (const Layout layout : {Layout::contiguous, Layout::transposed, Layout::permuted, Layout::padded}) {
      call.lse = Array(call.lse.dtype(), {2, 8, seqlen_q}, layout, Elements::scalars, rng);
      const Results results = run_and_expect_exact(call, backend());
      for (std::int64_t b = 0; b < 2; ++b)
        for (std::int64_t h = 0; h < 8; ++h)
          for (std::int64_t i = 0; i < seqlen_q; ++i)
            EXPECT_NEAR(lse_of(call, results)(b, h, i), std::log(static_cast<double>(visible(b, h, i))), 1e-6);
      if (layout == Layout::contiguous) first = results;
      expect_same_bits(results, first);
    }
  }
}

TEST_P(Strides, PackedQueriesKeysAndValues) {
  Spec s = spec(2, 2, 3, 33, 33, 32);
  Call plain = make_call(s);
  s.packed_qkv = true;
  Call packed = make_call(s);
  for (Array Call::*tensor : {&Call::q, &Call::k, &Call::v, &Call::dout})
    (packed.*tensor).fill((plain.*tensor).values());
  const Results expected = run_and_expect_exact(plain, backend());
  Outcome outcome = run(packed, backend());
  EXPECT_EQ(outcome.failure, "");
  expect_same_bits(outcome.results, expected);
}

HEADRACE_CASES(Strides, Backend::cpu);

}  // namespace
}  // namespace headrace::test
