// The ways that the CPU backend takes for some shapes only: streaming for few queries, key tiles that tasks pack for
// themselves, products of bfloat16 pairs over odd sizes. Each is compared with the reference element by element.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <string_view>

#include "support/compare.hpp"

namespace headrace::test {
namespace {

constexpr DType dtypes[] = {DType::float32, DType::bfloat16, DType::float16, DType::float64};

Spec spec_of(DType dtype, std::int64_t seqlen_q, std::int64_t seqlen_k, std::int64_t dim) {
  Spec spec{.seed = test_rng().bits(), .dtype = dtype, .lse_float64 = dtype == DType::float64};
  spec.seqlen_q = seqlen_q;
  spec.seqlen_k = seqlen_k;
  spec.head_dim = spec.value_dim = dim;
  spec.threads = 2;
  spec.through_plan = true;
  return spec;
}

bool streams(const Spec& spec) {
  const Call call = make_call(spec);
  const Plan plan(call.attention(Backend::cpu), Pass::forward);
  return plan.explain_json().find("\"cpu.stream.") != std::string_view::npos;
}

TEST(Stream, EveryOption) {
  for (const DType dtype : dtypes) {
    Spec plain = spec_of(dtype, 1, 700, 64);
    plain.heads_kv = 2;
    const auto expect = [&](const auto& change) {
      Spec spec = plain;
      change(spec);
      EXPECT_TRUE(streams(spec)) << spec.describe();
      expect_exact(spec);
    };
    expect([](Spec&) {});
    expect([](Spec& s) { s.group = 8, s.head_dim = 128; });
    expect([](Spec& s) { s.seqlen_q = 3, s.group = 2, s.causal = Causal::bottom_right, s.value_dim = 96; });
    expect([](Spec& s) { s.seqlen_q = 5, s.window_left = 300, s.window_right = -2; });
    expect([](Spec& s) { s.softcap = 5.0, s.alibi = Alibi::heads, s.sinks = Sinks::normal, s.group = 3; });
    expect([](Spec& s) { s.bias = {.present = true, .hidden = 0.3}, s.scale = -0.7; });
    expect([](Spec& s) { s.mask = {.present = true, .full = {false, true, true, true}, .hidden = 0.5}, s.group = 2; });
    expect([](Spec& s) { s.dropout_p = 0.3, s.seqlen_q = 7; });
    expect([](Spec& s) { s.inputs = Inputs::offset; });
    expect([](Spec& s) { s.inputs = Inputs::large_logits, s.seqlen_k = 3000, s.k_layout = Layout::contiguous; });
    expect([](Spec& s) {
      s.ragged = true, s.batch = 4, s.lengths_q = {1, 0, 2, 1}, s.lengths_k = {513, 40, 1025, 0};
      s.causal = Causal::bottom_right;
    });
  }
}

TEST(Stream, IsForFewQueriesAndManyKeys) {
  Spec spec = spec_of(DType::float32, 2, 700, 64);
  spec.group = 4;
  EXPECT_TRUE(streams(spec));
  Spec other = spec;
  other.seqlen_q = 3;
  EXPECT_FALSE(streams(other));
  other = spec;
  other.seqlen_k = 100;
  EXPECT_FALSE(streams(other));
  other = spec;
  other.batch_invariant = true;  // the bits of a prefill
  EXPECT_FALSE(streams(other));
  other = spec;
  other.value_dim = 63;
  EXPECT_FALSE(streams(other));
}

// A NaN shows where it is visible and nowhere else; values near the end of float32 do not overflow, nor do products.
TEST(Stream, HostileNumbers) {
  constexpr std::int64_t keys = 600, dim = 32;
  Spec spec = spec_of(DType::float32, 4, keys, dim);
  spec.causal = Causal::bottom_right;
  spec.through_plan = false;
  Call call = make_call(spec);
  std::vector<double> v = call.v.values(), k = call.k.values();
  const auto last = static_cast<std::ptrdiff_t>((keys - 1) * dim);
  std::fill(v.begin() + last, v.end(), std::nan(""));  // the last query alone sees the last key
  call.v.fill(v);
  Attention attention = call.attention(Backend::cpu);
  forward(attention);
  std::vector<double> out = call.out.values();
  for (std::size_t n = 0; n < out.size(); ++n) EXPECT_EQ(std::isnan(out[n]), n >= 3 * dim) << n;

  for (double& x : v) x = 3e38;
  call.v.fill(v);
  forward(attention);
  for (const double x : call.out.values()) EXPECT_NEAR(x / 3e38, 1.0, 1e-6);

  // q . k is far beyond float32, and the scale brings it back to the first element of a key, times 30.
  std::vector<double> q = call.q.values();
  std::fill(q.begin(), q.end(), 0.0);
  for (std::size_t row = 0; row < 4; ++row) q[row * dim] = 3e20;
  for (double& x : k) x *= 1e20;
  call.q.fill(q);
  call.k.fill(k);
  v = make_call(spec).v.values();
  call.v.fill(v);
  Attention huge = call.attention(Backend::cpu), exact = call.attention(Backend::reference);
  huge.scale = exact.scale = 1e-39;
  forward(exact);
  const std::vector<double> expected = call.out.values();
  call.out.fill(std::vector<double>(expected.size(), std::nan("")));
  forward(huge);
  EXPECT_LE(relative_difference(call.out.values(), expected), 1e-3);  // 1e-39 has few bits left in float32
}

// Packed keys beyond tile_config's shared_keys_bytes: every task packs what it visits.
TEST(KeysThatAreNotShared, Forward) {
  Spec spec = spec_of(DType::float32, 50, 12000, 8);
  spec.value_dim = 500;
  spec.causal = Causal::bottom_right;
  expect_exact(spec);
}

TEST(Pairs, OddSizes) {
  for (const auto& [seqlen_q, seqlen_k, head_dim, value_dim] :
       {std::array<std::int64_t, 4>{101, 333, 33, 1}, {49, 257, 1, 47}, {13, 31, 127, 65}, {300, 299, 70, 33}}) {
    for (const Causal causal : {Causal::none, Causal::bottom_right}) {
      Spec spec = spec_of(DType::bfloat16, seqlen_q, seqlen_k, head_dim);
      spec.value_dim = value_dim;
      spec.causal = causal;
      spec.scale = causal == Causal::none ? 0.3 : -0.11;
      expect_exact(spec);
    }
  }
}

// Products on tiles write whole groups of rows: those behind a head's last one are not the next head's.
TEST(Pairs, HeadsOfAFewRows) {
  for (const std::int64_t seqlen_q : {1, 17, 63, 97}) {
    Spec spec = spec_of(DType::bfloat16, seqlen_q, 600, 64);
    spec.heads_kv = 2;
    spec.group = 2;
    spec.batch = 2;
    expect_exact(spec);
  }
}

}  // namespace
}  // namespace headrace::test
