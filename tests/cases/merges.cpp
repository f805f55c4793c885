// Partial results and how they are merged: rows without keys, extreme statistics, many parts.
#include "cases/cases.hpp"

namespace headrace::test {
namespace {

using Merges = BackendAndType;

// (out, lse) of some keys: out [1, 1, 1, 2], lse [1, 1, 1].
struct State {
  Array out, lse;

  State(DType dtype, DType lse_dtype, std::vector<double> o, double l)
      : out(dtype, {1, 1, 1, 2}), lse(lse_dtype, {1, 1, 1}) {
    out.fill(o);
    lse.fill({l});
  }
};

State merged(const State& a, const State& b) {
  State result(a.out.dtype(), a.lse.dtype(), {std::nan(""), std::nan("")}, std::nan(""));
  merge_states(a.out.view(), a.lse.view(), b.out.view(), b.lse.view(), result.out.view(), result.lse.view());
  return result;
}

TEST_P(Merges, EmptyStates_ChangeNothing) {
  const DType lse_dtype = dtype() == DType::float64 ? DType::float64 : DType::float32;
  const State empty(dtype(), lse_dtype, {0.0, 0.0}, -infinity);
  const State both = merged(empty, empty);
  EXPECT_EQ(both.out.values(), (std::vector<double>{0.0, 0.0}));
  EXPECT_EQ(both.lse.values(), std::vector<double>{-infinity});
  for (const double lse : {-1e30, -5.0, 0.0, 1e4}) {
    const State some(dtype(), lse_dtype, {0.3, -1.7}, lse);
    for (const State& result : {merged(some, empty), merged(empty, some)}) {
      EXPECT_EQ(result.out.bytes(), some.out.bytes());
      EXPECT_EQ(result.lse.bytes(), some.lse.bytes());
    }
    // What a row without keys holds is not looked at.
    const State garbage(dtype(), lse_dtype, {std::nan(""), infinity}, -infinity);
    EXPECT_EQ(merged(some, garbage).out.bytes(), some.out.bytes());
  }
}

TEST_P(Merges, ExtremeStatistics_StayFinite) {
  const DType lse_dtype = dtype() == DType::float64 ? DType::float64 : DType::float32;
  const State a(dtype(), lse_dtype, {1.0, 2.0}, 200.0), b(dtype(), lse_dtype, {-3.0, 4.0}, -200.0);
  EXPECT_EQ(merged(a, b).out.values(), (std::vector<double>{1.0, 2.0}));
  EXPECT_EQ(merged(b, a).out.values(), (std::vector<double>{1.0, 2.0}));
  EXPECT_EQ(merged(a, b).lse.values(), std::vector<double>{200.0});
  const State c(dtype(), lse_dtype, {1.0, 2.0}, 1e4), d(dtype(), lse_dtype, {-3.0, 4.0}, 1e4);
  const State middle = merged(c, d);
  EXPECT_NEAR(middle.out.values()[0], -1.0, tolerance());
  EXPECT_NEAR(middle.out.values()[1], 3.0, 3 * tolerance());
  EXPECT_NEAR(middle.lse.values()[0], 1e4 + std::log(2.0), 1e-3);
  const State tiny(dtype(), lse_dtype, {1.0, 2.0}, -1e30), other(dtype(), lse_dtype, {-3.0, 4.0}, -1e30);
  EXPECT_NEAR(merged(tiny, other).out.values()[0], -1.0, tolerance());
}

// Attention over keys [begin, end) of the call, in a State of [batch, seqlen_q, heads, dv].
struct Part {
  Array out, lse;
};

Part part_of(const Call& call, std::int64_t begin, std::int64_t end, Backend backend) {
  Attention attention = call.attention(backend);
  for (Tensor* tensor : {&attention.k, &attention.v}) {
    if (end > begin)
      tensor->data = static_cast<std::byte*>(tensor->data) + begin * tensor->stride[1] * size_of(call.spec.dtype);
    tensor->shape[1] = end - begin;
  }
  Part part{Array(call.out.dtype(), call.out.shape()), Array(call.lse.dtype(), call.lse.shape())};
  attention.out = part.out.view();
  attention.lse = part.lse.view();
  forward(attention);
  return part;
}

void merge_into(Part& sum, const Part& next) {
  merge_states(sum.out.view(), sum.lse.view(), next.out.view(), next.lse.view(), sum.out.view(), sum.lse.view());
}

TEST_P(Merges, TwoHalves_EqualTheWhole) {
  Call call = make_call(spec(2, 2, 2, 7, 64, 16));
  const Results whole = run_and_expect_exact(call, backend());
  Part sum = part_of(call, 0, 40, backend());
  merge_into(sum, part_of(call, 40, 64, backend()));
  EXPECT_LE(relative_difference(sum.out.values(), exact_results(call).out), 2 * tolerance());
  const std::vector<double> lse = sum.lse.values();
  for (std::size_t n = 0; n < lse.size(); ++n) EXPECT_NEAR(lse[n], whole.lse[n], 1e-6);
}

TEST_P(Merges, RowsThatSawNoKey_TakeTheOtherPart) {
  // Causal bottom-right with 5 queries and 2 keys: rows 0 to 2 see nothing.
  Spec s = spec(1, 1, 1, 5, 2, 16);
  s.causal = Causal::bottom_right;
  Call call = make_call(s);
  const Results results = run_and_expect_exact(call, backend());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(results.lse[static_cast<std::size_t>(i)], -infinity);
  Call other_keys = make_call(spec(1, 1, 1, 5, 9, 16));
  const Results rest = run_and_expect_exact(other_keys, backend());
  Part sum{call.out, call.lse};
  merge_into(sum, {other_keys.out, other_keys.lse});
  const std::vector<double> out = sum.out.values(), lse = sum.lse.values();
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(lse[i], rest.lse[i]);
    for (std::size_t c = 0; c < 16; ++c) EXPECT_EQ(out[i * 16 + c], rest.out[i * 16 + c]);
  }
}

TEST_P(Merges, StridedStatistics_AreHonoured) {
  Call call = make_call(spec(2, 2, 2, 7, 64, 16));
  run_and_expect_exact(call, backend());
  Part sum = part_of(call, 0, 40, backend());
  const Part rest = part_of(call, 40, 64, backend());
  Rng rng = test_rng();
  Part strided{Array(sum.out.dtype(), sum.out.shape(), Layout::transposed, Elements::vectors, rng),
               Array(sum.lse.dtype(), sum.lse.shape(), Layout::permuted, Elements::scalars, rng)};
  strided.out.fill(sum.out.values());
  strided.lse.fill(sum.lse.values());
  merge_into(sum, rest);
  merge_into(strided, rest);
  EXPECT_EQ(strided.out.values(), sum.out.values());
  EXPECT_EQ(strided.lse.values(), sum.lse.values());
}

TEST(MergesOfManyParts, ErrorDoesNotGrowWithTheirNumber) {
  // bfloat16 inputs, partial results in float32: as a ring of devices should do it.
  Spec s;
  s.seed = test_rng().bits();
  s.seqlen_q = 16;
  s.seqlen_k = 1024;
  s.head_dim = s.value_dim = 64;
  Call call = make_call(s);
  for (Array Call::*tensor : {&Call::q, &Call::k, &Call::v}) {
    std::vector<double> values = (call.*tensor).values();
    for (double& x : values) x = rounded(DType::bfloat16, x);
    (call.*tensor).fill(values);
  }
  const Results exact = exact_results(call);
  const double single = relative_difference(part_of(call, 0, 1024, Backend::cpu).out.values(), exact.out);
  for (const std::int64_t parts : {8, 32, 64}) {
    const std::int64_t length = 1024 / parts;
    Part sum = part_of(call, 0, length, Backend::cpu);
    for (std::int64_t n = 1; n < parts; ++n) merge_into(sum, part_of(call, n * length, (n + 1) * length, Backend::cpu));
    const double error = relative_difference(sum.out.values(), exact.out);
    EXPECT_LE(error, std::max(4.0 * single, 1e-6)) << parts << " parts; one pass: " << single;
  }
}

HEADRACE_CASES(Merges, Backend::cpu, Backend::reference);

}  // namespace
}  // namespace headrace::test
