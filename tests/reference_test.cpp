// What the float64 reference gives where the right answer can be worked out by hand. Its gradients are
// checked against finite differences in reference_gradient_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <numbers>
#include <string>
#include <vector>

#include "describe/element.hpp"
#include "headrace/headrace.hpp"

namespace headrace::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t int64_min = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t int64_max = std::numeric_limits<std::int64_t>::max();

using Values = std::vector<double>;

struct Sizes {
  std::int64_t batch = 1, seqlen_q = 1, seqlen_k = 1, heads_q = 1, heads_kv = 1, head_dim = 1, value_dim = 1;
};

// A dense float64 call, all inputs 0; a test fills in values and options and runs it.
struct SmallCall {
  explicit SmallCall(const Sizes& sizes) : n(sizes) {
    const auto zeros = [](std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) {
      return Values(static_cast<std::size_t>(a * b * c * d), 0.0);
    };
    q = zeros(n.batch, n.seqlen_q, n.heads_q, n.head_dim);
    k = zeros(n.batch, n.seqlen_k, n.heads_kv, n.head_dim);
    v = zeros(n.batch, n.seqlen_k, n.heads_kv, n.value_dim);
    dout = zeros(n.batch, n.seqlen_q, n.heads_q, n.value_dim);
    dlse = zeros(n.batch, n.heads_q, n.seqlen_q, 1);
  }

  void run(Pass pass) {
    const auto poison = [](Values& values, std::size_t size) { values.assign(size, nan); };
    Attention call = options;
    call.backend = Backend::reference;
    if (pass == Pass::forward) {
      poison(out, dout.size());
      poison(lse, dlse.size());
    }
    call.q = {q.data(), {n.batch, n.seqlen_q, n.heads_q, n.head_dim}};
    call.k = {k.data(), {n.batch, n.seqlen_k, n.heads_kv, n.head_dim}};
    call.v = {v.data(), {n.batch, n.seqlen_k, n.heads_kv, n.value_dim}};
    call.out = {out.data(), {n.batch, n.seqlen_q, n.heads_q, n.value_dim}};
    call.lse = {lse.data(), {n.batch, n.heads_q, n.seqlen_q}};
    if (pass == Pass::forward) return headrace::forward(call);
    poison(dq, q.size());
    poison(dk, k.size());
    poison(dv, v.size());
    call.dout = {dout.data(), {n.batch, n.seqlen_q, n.heads_q, n.value_dim}};
    call.dlse = {dlse.data(), {n.batch, n.heads_q, n.seqlen_q}};
    call.dq = {dq.data(), {n.batch, n.seqlen_q, n.heads_q, n.head_dim}};
    call.dk = {dk.data(), {n.batch, n.seqlen_k, n.heads_kv, n.head_dim}};
    call.dv = {dv.data(), {n.batch, n.seqlen_k, n.heads_kv, n.value_dim}};
    headrace::backward(call);
  }
  void forward() { run(Pass::forward); }
  void forward_and_backward() {
    run(Pass::forward);
    run(Pass::backward);
  }

  Sizes n;
  Values q, k, v, out, lse, dout, dlse, dq, dk, dv;
  Attention options;
};

void expect_near(const Values& actual, const Values& expected, double tolerance = 1e-14) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (std::isfinite(expected[i])) {
      EXPECT_NEAR(actual[i], expected[i], tolerance * std::max(1.0, std::abs(expected[i]))) << "element " << i;
    } else if (std::isnan(expected[i])) {
      EXPECT_TRUE(std::isnan(actual[i])) << "element " << i << " is " << actual[i];
    } else {
      EXPECT_EQ(actual[i], expected[i]) << "element " << i;
    }
  }
}

// Different values with different digits: no two sums of them are alike by chance.
void fill(Values& values, double first) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sin(first + 1.7 * static_cast<double>(i));
}

// Which keys each query sees, one word a query, '1' for visible. With q = 0 a row is the mean of its visible
// values and its lse the logarithm of their number; v_j is the unit vector of j.
std::string visible_keys(std::int64_t seqlen_q, std::int64_t seqlen_k, const std::function<void(Attention&)>& set) {
  SmallCall call({.seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .value_dim = seqlen_k});
  for (std::int64_t j = 0; j < seqlen_k; ++j) call.v[static_cast<std::size_t>(j * seqlen_k + j)] = 1.0;
  set(call.options);
  call.forward();
  std::string words;
  for (std::int64_t i = 0; i < seqlen_q; ++i) {
    const double* row = call.out.data() + i * seqlen_k;
    const auto visible = static_cast<double>(std::count_if(row, row + seqlen_k, [](double x) { return x != 0.0; }));
    const double lse = call.lse[static_cast<std::size_t>(i)];
    EXPECT_TRUE(visible == 0 ? lse == -infinity : std::abs(lse - std::log(visible)) < 1e-14) << "row " << i;
    if (i > 0) words += ' ';
    for (std::int64_t j = 0; j < seqlen_k; ++j) {
      EXPECT_NEAR(row[j], row[j] != 0.0 ? 1.0 / visible : 0.0, 1e-15) << "row " << i << " key " << j;
      words += row[j] != 0.0 ? '1' : '.';
    }
  }
  return words;
}

TEST(Reference, EqualScoresGiveTheMeanAndTheNaturalLogarithm) {
  for (const std::int64_t keys : {1, 15, 16, 17, 63, 64, 65, 129, 257}) {
    SmallCall call({.seqlen_q = 2, .seqlen_k = keys, .head_dim = 4});
    for (std::int64_t j = 0; j < keys; ++j) call.v[static_cast<std::size_t>(j)] = static_cast<double>(j);
    call.forward();
    const double mean = static_cast<double>(keys - 1) / 2.0, lse = std::log(static_cast<double>(keys));
    expect_near(call.out, {mean, mean});
    expect_near(call.lse, {lse, lse});
  }
}

// Two queries 1 and 2, two keys 0 and ln 3, values 8 and 4, scale 1 = 1 / sqrt(1).
//   row 0: scores 0, ln 3; p = 1/4, 3/4; lse = ln 4;    out = 8/4 + 3 = 5
//   row 1: scores 0, ln 9; p = 1/10, 9/10; lse = ln 10; out = 0.8 + 3.6 = 4.4
// dout = (1, 0), dlse = (0, 2):
//   row 0: dp = (8, 4), D = 5,  ds = (1/4 * 3, 3/4 * -1) = (3/4, -3/4), dq = -3/4 ln 3
//   row 1: dp = (0, 0), D = -2, ds = 2 p = (0.2, 1.8),                  dq = 1.8 ln 3
//   dk = (3/4 * 1 + 0.2 * 2, -3/4 * 1 + 1.8 * 2) = (1.15, 2.85), dv = (1/4, 3/4)
TEST(Reference, TwoByTwo) {
  const double ln3 = std::log(3.0);
  SmallCall call({.seqlen_q = 2, .seqlen_k = 2});
  call.q = {1.0, 2.0};
  call.k = {0.0, ln3};
  call.v = {8.0, 4.0};
  call.dout = {1.0, 0.0};
  call.dlse = {0.0, 2.0};
  call.forward_and_backward();
  expect_near(call.out, {5.0, 4.4});
  expect_near(call.lse, {std::log(4.0), std::log(10.0)});
  expect_near(call.dq, {-0.75 * ln3, 1.8 * ln3});
  expect_near(call.dk, {1.15, 2.85});
  expect_near(call.dv, {0.25, 0.75});
}

TEST(Reference, ADominantKeyTakesAll) {
  SmallCall call({.seqlen_q = 1, .seqlen_k = 3, .value_dim = 2});
  call.q = {1.0};
  call.k = {-1e4, 1e4, 0.0};
  call.v = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0};
  call.dout = {1.0, 1.0};
  call.forward_and_backward();
  expect_near(call.out, {3.0, 4.0});
  expect_near(call.lse, {1e4});
  expect_near(call.dq, {0.0});
  expect_near(call.dv, {0.0, 0.0, 1.0, 1.0, 0.0, 0.0});
}

// One key and the sink 0: lse = log(1 + exp(s)), so that s can be read back from lse.
double score_of_one_key(double q, double k, const std::function<void(Attention&)>& set) {
  SmallCall call({});
  call.q = {q};
  call.k = {k};
  float sink = 0.0f;
  call.options.sinks = {&sink, {1}};
  set(call.options);
  call.forward();
  return std::log(std::expm1(call.lse[0]));
}

TEST(Reference, ScaleIsOneOverRootOfHeadDimUnlessGiven) {
  SmallCall call({.head_dim = 4});
  call.q = {1.0, 2.0, 3.0, 4.0};
  call.k = {5.0, 6.0, 7.0, 8.0};
  call.forward();
  expect_near(call.lse, {70.0 / 2.0});
  for (const double scale : {1.0, 0.0, -0.5}) {
    call.options.scale = scale;
    call.forward();
    expect_near(call.lse, {70.0 * scale});
  }
}

TEST(Reference, SoftcapIsCapTimesTanh) {
  for (const double cap : {1.0, 15.0, 50.0}) {
    for (const double x : {-20.0, -3.0, 0.0, 0.5, 8.0}) {
      const double score = score_of_one_key(x, 0.5, [&](Attention& options) { options.softcap = cap; });
      EXPECT_NEAR(score, cap * std::tanh(0.5 * x / cap), 1e-8) << cap << ' ' << x;
    }
  }
}

// d lse / d q = p * (1 - tanh^2) * scale * k with p = 1: one key, no sink. Saturated it fades, and stays finite.
TEST(Reference, SoftcapDerivative) {
  for (const double cap : {1.0, 15.0}) {
    for (const double x : {0.0, 2.0, -10.0, 100.0, 1e6, -1e300}) {
      SmallCall call({});
      call.q = {x};
      call.k = {3.0};
      call.dlse = {1.0};
      call.options.softcap = cap;
      call.options.scale = 0.5;
      call.forward_and_backward();
      const double cosh = std::cosh(1.5 * x / cap);
      expect_near(call.lse, {cap * std::tanh(1.5 * x / cap)});
      EXPECT_NEAR(call.dq[0], 1.5 / cosh / cosh, 1e-13 * std::abs(call.dq[0])) << cap << ' ' << x;
    }
  }
}

// The distance counts from the diagonal that ends in the last query and the last key, whatever causal aligns to.
TEST(Reference, AlibiPenalizesTheDistance) {
  for (const Causal causal : {Causal::none, Causal::top_left}) {
    SmallCall call({.batch = 2, .seqlen_q = 3, .heads_q = 2, .heads_kv = 2});
    const float slopes[] = {0.5f, 0.25f, 2.0f, 1.0f};
    call.options.causal = causal;
    call.options.alibi_slopes = {slopes, DType::float32, {2, 2}};
    call.forward();  // |i + 1 - 3 - 0| = 2, 1, 0
    expect_near(call.lse, {-1.0, -0.5, 0.0, -0.5, -0.25, 0.0, -4.0, -2.0, 0.0, -2.0, -1.0, 0.0});
    call.options.alibi_slopes = {slopes, DType::float32, {2}};
    call.forward();
    expect_near(call.lse, {-1.0, -0.5, 0.0, -0.5, -0.25, 0.0, -1.0, -0.5, 0.0, -0.5, -0.25, 0.0});
  }
}

// score = cap * tanh(scale * q . k / cap) + bias - slope * distance, in this order.
TEST(Reference, OrderOfTheScore) {
  SmallCall call({.seqlen_q = 2});
  call.q = {3.0, 3.0};
  call.k = {2.0};
  const float slope = 0.5f;
  const double bias = 7.0;
  call.options.scale = 0.25;
  call.options.softcap = 2.0;
  call.options.alibi_slopes = {&slope, {1}};
  call.options.bias = {&bias, {1, 1, 1, 1}};
  call.forward();
  const double capped = 2.0 * std::tanh(0.25 * 6.0 / 2.0) + 7.0;
  expect_near(call.lse, {capped - 0.5, capped});
}

TEST(Reference, BiasOfEveryBroadcastShape) {
  for (unsigned kind = 0; kind < 16; ++kind) {
    for (const DType dtype : {DType::float32, DType::float64}) {
      SmallCall call({.batch = 2, .seqlen_q = 3, .seqlen_k = 1, .heads_q = 2, .heads_kv = 1});
      const std::int64_t shape[4] = {kind & 1 ? 2 : 1, kind & 2 ? 2 : 1, kind & 4 ? 3 : 1, 1};
      const float narrow[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
      const double wide[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
      call.options.bias = {dtype == DType::float32 ? static_cast<const void*>(narrow) : wide, dtype, shape};
      call.forward();
      for (std::int64_t b = 0; b < 2; ++b) {
        for (std::int64_t h = 0; h < 2; ++h) {
          for (std::int64_t i = 0; i < 3; ++i) {
            std::int64_t index = shape[0] == 1 ? 0 : b;
            index = index * shape[1] + (shape[1] == 1 ? 0 : h);
            index = index * shape[2] + (shape[2] == 1 ? 0 : i);
            EXPECT_EQ(call.lse[static_cast<std::size_t>((b * 2 + h) * 3 + i)], static_cast<double>(index + 1));
          }
        }
      }
    }
  }
}

TEST(Reference, CausalBothAlignments) {
  const auto bottom_right = [](Attention& options) { options.causal = Causal::bottom_right; };
  const auto top_left = [](Attention& options) { options.causal = Causal::top_left; };
  EXPECT_EQ(visible_keys(2, 6, bottom_right), "11111. 111111");
  EXPECT_EQ(visible_keys(6, 2, bottom_right), ".. .. .. .. 1. 11");
  EXPECT_EQ(visible_keys(1, 5, bottom_right), "11111");
  EXPECT_EQ(visible_keys(5, 1, bottom_right), ". . . . 1");
  EXPECT_EQ(visible_keys(3, 3, bottom_right), "1.. 11. 111");
  EXPECT_EQ(visible_keys(2, 6, top_left), "1..... 11....");
  EXPECT_EQ(visible_keys(6, 2, top_left), "1. 11 11 11 11 11");
  EXPECT_EQ(visible_keys(1, 5, top_left), "1....");
  EXPECT_EQ(visible_keys(3, 3, top_left), "1.. 11. 111");
}

TEST(Reference, WindowsAreSignedAndExact) {
  const auto window = [](std::optional<std::int64_t> left, std::optional<std::int64_t> right,
                         Causal causal = Causal::none) {
    return [=](Attention& options) {
      options.window_left = left;
      options.window_right = right;
      options.causal = causal;
    };
  };
  EXPECT_EQ(visible_keys(4, 4, window({}, {})), "1111 1111 1111 1111");
  EXPECT_EQ(visible_keys(4, 4, window(0, 0)), "1... .1.. ..1. ...1");
  EXPECT_EQ(visible_keys(4, 4, window(1, 0)), "1... 11.. .11. ..11");
  EXPECT_EQ(visible_keys(4, 4, window(0, 1)), "11.. .11. ..11 ...1");
  EXPECT_EQ(visible_keys(4, 4, window({}, -1)), ".... 1... 11.. 111.");
  EXPECT_EQ(visible_keys(4, 4, window(-1, {})), ".111 ..11 ...1 ....");
  EXPECT_EQ(visible_keys(4, 4, window(2, -2)), ".... .... 1... .1..");
  EXPECT_EQ(visible_keys(4, 4, window(7, -8)), ".... .... .... ....");
  EXPECT_EQ(visible_keys(4, 4, window(2, 2, Causal::bottom_right)), "1... 11.. 111. .111");
  EXPECT_EQ(visible_keys(2, 4, window(1, 0)), ".11. ..11");
  EXPECT_EQ(visible_keys(2, 4, window(1, 0, Causal::top_left)), "1... 11..");
  EXPECT_EQ(visible_keys(4, 2, window(0, {})), "11 11 11 .1");
  // Bounds at the ends of 64 bits.
  EXPECT_EQ(visible_keys(2, 3, window(int64_max - 1, int64_max - 1)), "111 111");
  EXPECT_EQ(visible_keys(2, 3, window(int64_min, {})), "... ...");
  EXPECT_EQ(visible_keys(2, 3, window({}, int64_min)), "... ...");
  EXPECT_EQ(visible_keys(2, 3, window(int64_max - 1, int64_min + 1)), "... ...");
  EXPECT_EQ(visible_keys(2, 3, window(std::int64_t{1} << 31, 0)), "11. 111");
}

TEST(Reference, MasksMustAllAgree) {
  const bool mask[] = {true, true, false, true, false, true, true, true};  // [2, 4]
  const bool blocks[] = {true, false, true, true};                         // [1, 4]: of 1 key
  const double bias[] = {0.0, 0.0, 5.0, -infinity};                        // [1, 4]
  const auto set_mask = [&](Attention& options) { options.mask = {mask, DType::boolean, {1, 1, 2, 4}}; };
  const auto set_blocks = [&](Attention& options) {
    options.block_mask = {blocks, DType::boolean, {1, 1, 1, 4}};
    options.block_q = 2;
    options.block_k = 1;
  };
  EXPECT_EQ(visible_keys(2, 4, set_mask), "11.1 .111");
  EXPECT_EQ(visible_keys(2, 4, set_blocks), "1.11 1.11");
  EXPECT_EQ(visible_keys(2, 4,
                         [&](Attention& options) {
                           set_mask(options);
                           set_blocks(options);
                           options.causal = Causal::bottom_right;
                         }),
            "1... ..11");
  SmallCall call({.seqlen_q = 1, .seqlen_k = 4, .value_dim = 4});
  call.options.bias = {bias, DType::float64, {1, 1, 1, 4}};
  call.forward();
  expect_near(call.lse, {std::log(2.0 + std::exp(5.0))});
}

TEST(Reference, BlocksCountFromTheirSize) {
  const bool blocks[] = {true, false, false, true};  // [2, 2], blocks of 2 queries and 3 keys
  EXPECT_EQ(visible_keys(3, 5,
                         [&](Attention& options) {
                           options.block_mask = {blocks, DType::boolean, {1, 1, 2, 2}};
                           options.block_q = 2;
                           options.block_k = 3;
                         }),
            "111.. 111.. ...11");
}

// Only -inf hides: the lowest number of the type is a score like any other.
TEST(Reference, LowestFiniteBiasDoesNotHide) {
  SmallCall call({.seqlen_k = 2});
  call.v = {3.0, 5.0};
  const float bias[] = {std::numeric_limits<float>::lowest(), std::numeric_limits<float>::lowest()};
  call.options.bias = {bias, DType::float32, {1, 1, 1, 2}};
  call.forward();
  expect_near(call.out, {4.0});
  EXPECT_EQ(call.lse[0], static_cast<double>(bias[0]));
}

TEST(Reference, SinkTakesProbabilityOnly) {
  SmallCall call({.seqlen_q = 1, .seqlen_k = 4, .heads_q = 4, .heads_kv = 2});
  for (std::size_t j = 0; j < 8; ++j) call.v[j] = 6.0;
  // As heavy as all four keys, absent, overwhelming, and -5.
  const float sinks[] = {static_cast<float>(std::numbers::ln2 * 2.0), -std::numeric_limits<float>::infinity(), 1e4f,
                         -5.0f};
  call.options.sinks = {sinks, DType::float32, {4}};
  call.forward();
  expect_near(call.out, {3.0, 6.0, 0.0, 24.0 / (4.0 + std::exp(-5.0))}, 1e-7);
  expect_near(call.lse, {std::log(8.0), std::log(4.0), 1e4, std::log(4.0 + std::exp(-5.0))}, 1e-7);
}

// One key of score 0, sink ln 3: p = 1/4, p_sink = 3/4. v = 8, dout = 2, dlse = 5: dp = 16, out = 2,
// D = 2 * 2 - 5 = -1; dsink = -3/4 * -1. A row without keys: lse = sink, dsink = its dlse. A sink of -inf: nothing.
TEST(Reference, SinkGradient) {
  SmallCall call({.seqlen_q = 2, .heads_q = 2, .heads_kv = 2});
  call.v = {8.0, 8.0};
  call.dout = {2.0, 2.0, 100.0, 100.0};
  call.dlse = {5.0, 7.0, 5.0, 7.0};
  const float sinks[] = {static_cast<float>(std::log(3.0)), -std::numeric_limits<float>::infinity()};
  float dsinks[2] = {-1.0f, -1.0f};
  const bool mask[] = {true, false};  // row 1 sees nothing
  call.options.sinks = {sinks, DType::float32, {2}};
  call.options.mask = {mask, DType::boolean, {1, 1, 2, 1}};
  call.forward();
  call.options.dsinks = {dsinks, {2}};
  call.run(Pass::backward);
  expect_near(call.out, {2.0, 8.0, 0.0, 0.0}, 1e-7);
  expect_near(call.lse, {std::log(4.0), std::log(3.0), 0.0, -infinity}, 1e-7);
  EXPECT_NEAR(dsinks[0], 0.75 + 7.0, 1e-6);
  EXPECT_EQ(dsinks[1], 0.0f);
}

// Rows without keys, by each kind of mask: out 0, lse -inf, and exactly 0 to every gradient.
TEST(Reference, RowsWithoutKeysGiveNothing) {
  const bool mask[] = {true, true, false, false, true, true};        // [3, 2]
  const double bias[] = {0.0, 0.0, -infinity, -infinity, 0.0, 0.0};  // [3, 2]
  const bool blocks[] = {true, false, true};                         // [3, 1]
  double dbias[6];
  for (int kind = 0; kind < 3; ++kind) {
    SmallCall call({.seqlen_q = 3, .seqlen_k = 2, .head_dim = 2, .value_dim = 2});
    fill(call.q, 1.0);
    fill(call.k, 2.0);
    fill(call.v, 3.0);
    fill(call.dout, 4.0);
    fill(call.dlse, 5.0);
    call.dlse[1] = nan;  // of the row without keys: ignored
    if (kind == 0) call.options.mask = {mask, DType::boolean, {1, 1, 3, 2}};
    if (kind == 1) call.options.bias = {bias, DType::float64, {1, 1, 3, 2}};
    if (kind == 2) {
      call.options.block_mask = {blocks, DType::boolean, {1, 1, 3, 1}};
      call.options.block_q = 1;
      call.options.block_k = 2;
    }
    call.forward();
    if (kind == 1) call.options.dbias = {dbias, {1, 1, 3, 2}};
    call.run(Pass::backward);

    SmallCall without({.seqlen_q = 2, .seqlen_k = 2, .head_dim = 2, .value_dim = 2});
    without.k = call.k, without.v = call.v;
    without.q = {call.q[0], call.q[1], call.q[4], call.q[5]};
    without.dout = {call.dout[0], call.dout[1], call.dout[4], call.dout[5]};
    without.dlse = {call.dlse[0], call.dlse[2]};
    without.forward_and_backward();
    const auto with_row = [](const Values& x) { return Values{x[0], x[1], 0.0, 0.0, x[2], x[3]}; };
    EXPECT_EQ(call.out, with_row(without.out));
    EXPECT_EQ(call.dq, with_row(without.dq));
    EXPECT_EQ(call.lse, (Values{without.lse[0], -infinity, without.lse[1]}));
    EXPECT_EQ(call.dk, without.dk);
    EXPECT_EQ(call.dv, without.dv);
    if (kind == 1) {
      EXPECT_EQ(dbias[2], 0.0);
      EXPECT_EQ(dbias[3], 0.0);
    }
  }
}

// No mask hides the keys, but every score is -inf: there is nothing to normalize either.
TEST(Reference, RowOfScoresOfMinusInfinityGivesNothing) {
  SmallCall call({.seqlen_q = 1, .seqlen_k = 3});
  fill(call.k, 1.0);
  fill(call.v, 2.0);
  call.q = {1.0};
  call.dout = {1.0};
  call.dlse = {nan};
  const float slope = std::numeric_limits<float>::infinity();
  call.options.alibi_slopes = {&slope, {1}};
  call.options.window_right = -1;
  call.forward_and_backward();
  EXPECT_EQ(call.out, Values(1, 0.0));
  EXPECT_EQ(call.lse, Values(1, -infinity));
  EXPECT_EQ(call.dq, Values(1, 0.0));
  EXPECT_EQ(call.dk, Values(3, 0.0));
  EXPECT_EQ(call.dv, Values(3, 0.0));
}

TEST(Reference, NanInHiddenKeysReachesNothing) {
  SmallCall call({.seqlen_q = 2, .seqlen_k = 4, .head_dim = 2, .value_dim = 2});
  fill(call.q, 1.0);
  fill(call.dout, 2.0);
  for (Values* values : {&call.k, &call.v}) {
    fill(*values, 3.0);
    (*values)[4] = nan;  // key 2: hidden by the mask
    (*values)[7] = nan;  // key 3: hidden by the bias
  }
  const bool mask[] = {true, true, false, true};
  const double bias[] = {0.5, -0.5, nan, -infinity};
  double dbias[4] = {nan, nan, nan, nan};
  call.options.mask = {mask, DType::boolean, {1, 1, 1, 4}};
  call.options.bias = {bias, DType::float64, {1, 1, 1, 4}};
  call.forward();
  call.options.dbias = {dbias, {1, 1, 1, 4}};
  call.run(Pass::backward);
  for (const Values* values : {&call.out, &call.lse, &call.dq, &call.dk, &call.dv}) {
    for (const double x : *values) EXPECT_TRUE(std::isfinite(x));
  }
  for (const std::size_t n : {4u, 5u, 6u, 7u}) {
    EXPECT_EQ(call.dk[n], 0.0);
    EXPECT_EQ(call.dv[n], 0.0);
  }
  EXPECT_NE(dbias[0], 0.0);
  EXPECT_NEAR(dbias[0] + dbias[1], 0.0, 1e-15);
  EXPECT_EQ(dbias[2], 0.0);
  EXPECT_EQ(dbias[3], 0.0);
}

TEST(Reference, NanInAQueryShowsInItsRowAndWhatDependsOnIt) {
  SmallCall call({.seqlen_q = 4, .seqlen_k = 8, .head_dim = 2, .value_dim = 2});
  fill(call.q, 1.0);
  fill(call.k, 2.0);
  fill(call.v, 3.0);
  fill(call.dout, 4.0);
  call.q[5] = nan;
  call.forward_and_backward();
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(std::isnan(call.lse[i]), i == 2);
    for (const std::size_t n : {2 * i, 2 * i + 1}) {
      EXPECT_EQ(std::isnan(call.out[n]), i == 2);
      EXPECT_EQ(std::isnan(call.dq[n]), i == 2);
    }
  }
  for (const double x : call.dk) EXPECT_TRUE(std::isnan(x));
  for (const double x : call.dv) EXPECT_TRUE(std::isnan(x));
}

// out = sum of the kept values / (keys * (1 - rate)); lse knows nothing of dropout.
TEST(Reference, DropoutDropsAfterTheNormalizer) {
  constexpr std::int64_t keys = 8;
  SmallCall call({.batch = 2, .seqlen_q = 3, .seqlen_k = keys, .heads_q = 2, .heads_kv = 1, .value_dim = 1});
  fill(call.v, 1.0);
  fill(call.dout, 2.0);
  call.options.dropout_p = 0.25;
  call.options.seed = 77;
  bool keep[12 * keys];
  dropout_mask({keep, {2, 2, 3, keys}}, 0.25, 77);
  call.forward_and_backward();
  Values out(12, 0.0), dv(2 * keys, 0.0);
  for (std::size_t b = 0; b < 2; ++b) {
    for (std::size_t h = 0; h < 2; ++h) {
      for (std::size_t i = 0; i < 3; ++i) {
        const std::size_t row = (b * 3 + i) * 2 + h;
        for (std::size_t j = 0; j < keys; ++j) {
          if (!keep[((b * 2 + h) * 3 + i) * keys + j]) continue;
          out[row] += call.v[b * keys + j] / (keys * 0.75);
          dv[b * keys + j] += call.dout[row] / (keys * 0.75);
        }
      }
    }
  }
  expect_near(call.out, out);
  expect_near(call.lse, Values(12, std::log(8.0)));
  expect_near(call.dv, dv);
}

// A key-value head serves the query heads of its group, and gathers their gradients.
TEST(Reference, GroupedHeadsShareKeysAndValues) {
  SmallCall grouped(
      {.batch = 3, .seqlen_q = 5, .seqlen_k = 7, .heads_q = 6, .heads_kv = 2, .head_dim = 3, .value_dim = 2});
  fill(grouped.q, 1.0);
  fill(grouped.k, 2.0);
  fill(grouped.v, 3.0);
  fill(grouped.dout, 4.0);
  fill(grouped.dlse, 5.0);
  grouped.forward_and_backward();

  Sizes sizes = grouped.n;
  sizes.heads_kv = 6;
  SmallCall repeated(sizes);
  repeated.q = grouped.q, repeated.dout = grouped.dout, repeated.dlse = grouped.dlse;
  const auto repeat = [](const Values& from, std::size_t dim, Values& to) {
    for (std::size_t n = 0; n < to.size(); ++n) {
      const std::size_t x = n % dim, h = n / dim % 6, token = n / dim / 6;
      to[n] = from[(token * 2 + h / 3) * dim + x];
    }
  };
  repeat(grouped.k, 3, repeated.k);
  repeat(grouped.v, 2, repeated.v);
  repeated.forward_and_backward();
  EXPECT_EQ(grouped.out, repeated.out);
  EXPECT_EQ(grouped.lse, repeated.lse);
  EXPECT_EQ(grouped.dq, repeated.dq);
  const auto gather = [](const Values& from, std::size_t dim, std::size_t size) {
    Values to(size, 0.0);
    for (std::size_t n = 0; n < from.size(); ++n) to[(n / dim / 6 * 2 + n / dim % 6 / 3) * dim + n % dim] += from[n];
    return to;
  };
  expect_near(grouped.dk, gather(repeated.dk, 3, grouped.dk.size()));
  expect_near(grouped.dv, gather(repeated.dv, 2, grouped.dv.size()));
}

// A packed batch is its sequences, each on its own: tokens between and behind them give and get nothing.
TEST(Reference, RaggedBatchIsItsSequences) {
  constexpr std::int64_t dim = 2, total_q = 9, total_k = 12;
  const std::int32_t cu_q[] = {0, 3, 3, 8}, cu_k[] = {0, 5, 7, 11}, used_q[] = {3, 0, 4}, used_k[] = {4, 2, 4};
  Values q(total_q * dim), k(total_k * dim), v(total_k * dim), dout(total_q * dim), dlse(total_q);
  Values out(total_q * dim, nan), lse(total_q, nan), dq(q.size(), nan), dk(k.size(), nan), dv(v.size(), nan);
  fill(q, 1.0);
  fill(k, 2.0);
  fill(v, 3.0);
  fill(dout, 4.0);
  fill(dlse, 5.0);
  // Tokens that no sequence uses: rows 7 and 8 of q, rows 4 and 11 of k.
  for (const std::size_t n : {7u, 8u}) q[n * dim] = dout[n * dim] = nan;
  for (const std::size_t n : {4u, 11u}) k[n * dim] = v[n * dim] = nan;

  Attention call;
  call.backend = Backend::reference;
  call.causal = Causal::bottom_right;
  call.q = {q.data(), {total_q, 1, dim}}, call.k = {k.data(), {total_k, 1, dim}},
  call.v = {v.data(), {total_k, 1, dim}};
  call.out = {out.data(), {total_q, 1, dim}}, call.lse = {lse.data(), {1, total_q}};
  call.cu_seqlens_q = {cu_q, DType::int32, {4}}, call.cu_seqlens_k = {cu_k, DType::int32, {4}};
  call.seqused_q = {used_q, DType::int32, {3}}, call.seqused_k = {used_k, DType::int32, {3}};
  forward(call);
  call.dout = {dout.data(), {total_q, 1, dim}}, call.dlse = {dlse.data(), {1, total_q}};
  call.dq = {dq.data(), {total_q, 1, dim}}, call.dk = {dk.data(), {total_k, 1, dim}},
  call.dv = {dv.data(), {total_k, 1, dim}};
  backward(call);

  Values expected_out(out.size(), 0.0), expected_lse(lse.size(), -infinity);
  Values expected_dq(q.size(), 0.0), expected_dk(k.size(), 0.0), expected_dv(v.size(), 0.0);
  for (int b = 0; b < 3; ++b) {
    SmallCall one({.seqlen_q = used_q[b], .seqlen_k = used_k[b], .head_dim = dim, .value_dim = dim});
    const auto copy = [](const Values& from, std::int64_t first, std::int64_t width, Values& to) {
      std::copy_n(from.begin() + first * width, to.size(), to.begin());
    };
    copy(q, cu_q[b], dim, one.q);
    copy(k, cu_k[b], dim, one.k);
    copy(v, cu_k[b], dim, one.v);
    copy(dout, cu_q[b], dim, one.dout);
    copy(dlse, cu_q[b], 1, one.dlse);
    one.options.causal = Causal::bottom_right;
    one.forward_and_backward();
    std::copy(one.out.begin(), one.out.end(), expected_out.begin() + cu_q[b] * dim);
    std::copy(one.lse.begin(), one.lse.end(), expected_lse.begin() + cu_q[b]);
    std::copy(one.dq.begin(), one.dq.end(), expected_dq.begin() + cu_q[b] * dim);
    std::copy(one.dk.begin(), one.dk.end(), expected_dk.begin() + cu_k[b] * dim);
    std::copy(one.dv.begin(), one.dv.end(), expected_dv.begin() + cu_k[b] * dim);
  }
  EXPECT_EQ(out, expected_out);
  EXPECT_EQ(lse, expected_lse);
  EXPECT_EQ(dq, expected_dq);
  EXPECT_EQ(dk, expected_dk);
  EXPECT_EQ(dv, expected_dv);
}

// In a ragged batch bias, mask and dropout are indexed by sequence and inside it, and dbias beyond the longest
// sequence is 0.
TEST(Reference, RaggedBiasCountsInsideItsSequence) {
  Values q(3), k(3), v(3), out(3), lse(3, nan), dout(3), dlse(3, 1.0), dq(3), dk(3), dv(3);
  const std::int32_t cu[] = {0, 1, 3};
  Values bias(24), dbias(bias.size(), nan);  // [2, 1, 3, 4]; the longest sequence has 2 tokens
  for (std::size_t n = 0; n < bias.size(); ++n) bias[n] = static_cast<double>(n);
  Attention call;
  call.backend = Backend::reference;
  call.causal = Causal::bottom_right;
  call.q = {q.data(), {3, 1, 1}}, call.k = {k.data(), {3, 1, 1}}, call.v = {v.data(), {3, 1, 1}};
  call.out = {out.data(), {3, 1, 1}}, call.lse = {lse.data(), {1, 3}};
  call.cu_seqlens_q = call.cu_seqlens_k = {cu, DType::int32, {3}};
  call.bias = {bias.data(), {2, 1, 3, 4}};
  forward(call);
  expect_near(lse, {0.0, 12.0, 16.0 + std::log1p(std::exp(1.0))});
  call.dout = {dout.data(), {3, 1, 1}}, call.dlse = {dlse.data(), {1, 3}};
  call.dq = {dq.data(), {3, 1, 1}}, call.dk = {dk.data(), {3, 1, 1}}, call.dv = {dv.data(), {3, 1, 1}};
  call.dbias = {dbias.data(), {2, 1, 3, 4}};
  backward(call);
  Values expected(bias.size(), 0.0);
  expected[0] = 1.0;   // sequence 0: row 0 sees key 0
  expected[12] = 1.0;  // sequence 1: row 0 sees key 0
  expected[16] = 1.0 / (1.0 + std::exp(1.0));
  expected[17] = 1.0 / (1.0 + std::exp(-1.0));
  expect_near(dbias, expected);
}

// A bias that is expanded with stride 0 has a full-size gradient, one that broadcasts has the sum.
TEST(Reference, ExpandedBiasHasFullGradient) {
  const double bias = 0.5;
  Values full(6), sum(1);
  for (const bool expanded : {true, false}) {
    SmallCall call({.seqlen_q = 2, .seqlen_k = 3});
    call.dlse = {1.0, 10.0};
    if (expanded) {
      call.options.bias = Tensor(&bias, {1, 1, 2, 3}).with_strides({0, 0, 0, 0});
    } else {
      call.options.bias = {&bias, {1, 1, 1, 1}};
    }
    call.forward();
    call.options.dbias = expanded ? Tensor(full.data(), {1, 1, 2, 3}) : Tensor(sum.data(), {1, 1, 1, 1});
    call.run(Pass::backward);
  }
  expect_near(full, {1.0 / 3, 1.0 / 3, 1.0 / 3, 10.0 / 3, 10.0 / 3, 10.0 / 3});
  expect_near(sum, {11.0});
}

TEST(Reference, EmptySizes) {
  for (const Sizes& sizes :
       std::vector<Sizes>{{.batch = 0, .seqlen_q = 2, .seqlen_k = 3},
                          {.batch = 2, .seqlen_q = 0, .seqlen_k = 3},
                          {.batch = 2, .seqlen_q = 2, .seqlen_k = 0},
                          {.batch = 2, .seqlen_q = 2, .seqlen_k = 3, .heads_q = 0, .heads_kv = 0}}) {
    SmallCall call(sizes);
    fill(call.dout, 1.0);
    fill(call.dlse, 1.0);
    call.forward_and_backward();
    EXPECT_EQ(call.out, Values(call.out.size(), 0.0));
    EXPECT_EQ(call.lse, Values(call.lse.size(), -infinity));
    EXPECT_EQ(call.dq, Values(call.dq.size(), 0.0));
    EXPECT_EQ(call.dk, Values(call.dk.size(), 0.0));
    EXPECT_EQ(call.dv, Values(call.dv.size(), 0.0));
  }
}

// Inputs of 16 bits are widened exactly; a result is the double result rounded once.
TEST(Reference, SixteenBitResultsAreRoundedOnce) {
  constexpr std::int64_t rows = 5, keys = 6, dim = 3;
  for (const hr_dtype dtype : {HR_FLOAT16, HR_BFLOAT16, HR_FLOAT32}) {
    SmallCall exact({.seqlen_q = rows, .seqlen_k = keys, .head_dim = dim, .value_dim = dim});
    struct Narrow {
      float memory[keys * dim] = {};  // room enough for every dtype here
    } q, k, v, dout, out, dq, dk, dv;
    const auto narrow = [&](Values& values, double first, Narrow& to) {
      fill(values, first);
      store_elements(&to, dtype, 0, std::ssize(values), values.data());
      load_elements(&to, dtype, 0, std::ssize(values), values.data());
    };
    narrow(exact.q, 1.0, q);
    narrow(exact.k, 2.0, k);
    narrow(exact.v, 3.0, v);
    narrow(exact.dout, 4.0, dout);
    exact.forward_and_backward();

    float lse[rows];
    const auto view = [&](Narrow& data, std::int64_t length) {
      return Tensor(&data, static_cast<DType>(dtype), {1, length, 1, dim});
    };
    Attention call;
    call.backend = Backend::reference;
    call.q = view(q, rows), call.k = view(k, keys), call.v = view(v, keys);
    call.out = view(out, rows), call.lse = {lse, {1, 1, rows}};
    forward(call);
    call.dout = view(dout, rows), call.dq = view(dq, rows), call.dk = view(dk, keys), call.dv = view(dv, keys);
    // What a kernel has rounded does not matter: p is computed anew.
    fill_elements(&out, dtype, 0, rows * dim, 123.0);
    backward(call);
    const auto expect_rounded = [&](const Narrow& actual, const Values& expected) {
      Narrow rounded;
      store_elements(&rounded, dtype, 0, std::ssize(expected), expected.data());
      for (std::int64_t n = 0; n < std::ssize(expected); ++n)
        EXPECT_EQ(load_element(&actual, dtype, n), load_element(&rounded, dtype, n));
    };
    expect_rounded(dq, exact.dq);
    expect_rounded(dk, exact.dk);
    expect_rounded(dv, exact.dv);
    forward(call);
    expect_rounded(out, exact.out);
    for (std::int64_t i = 0; i < rows; ++i)
      EXPECT_EQ(lse[i], static_cast<float>(exact.lse[static_cast<std::size_t>(i)]));
  }
}

TEST(Reference, ResultsDoNotDependOnThreads) {
  // Large enough that threads are used.
  SmallCall call(
      {.batch = 2, .seqlen_q = 130, .seqlen_k = 140, .heads_q = 4, .heads_kv = 2, .head_dim = 40, .value_dim = 24});
  fill(call.q, 1.0);
  fill(call.k, 2.0);
  fill(call.v, 3.0);
  fill(call.dout, 4.0);
  fill(call.dlse, 5.0);
  const double bias = 0.25;
  double dbias[3] = {};
  std::vector<Values> results;
  int run = 0;
  for (const int threads : {1, 2, 5}) {
    call.options.threads = threads;
    call.options.bias = {&bias, {1, 1, 1, 1}};
    call.options.dbias = {};
    call.forward();
    call.options.dbias = {dbias + run++, {1, 1, 1, 1}};
    call.run(Pass::backward);
    for (const Values* values : {&call.out, &call.lse, &call.dq, &call.dk, &call.dv}) results.push_back(*values);
  }
  for (std::size_t n = 5; n < results.size(); ++n) EXPECT_EQ(results[n], results[n % 5]);
  EXPECT_EQ(dbias[0], dbias[1]);
  EXPECT_EQ(dbias[0], dbias[2]);
}

// The scores of 8192 x 8192 would be 512 MiB.
TEST(Reference, WorkspaceGrowsWithTheTokensNotTheirProduct) {
  Attention call;
  call.backend = Backend::reference;
  call.threads = 2;
  const Tensor vectors(static_cast<double*>(nullptr), {1, 8192, 1, 64});
  call.q = call.k = call.v = call.out = call.dout = call.dq = call.dk = call.dv = vectors;
  call.lse = {static_cast<double*>(nullptr), {1, 1, 8192}};
  call.bias = call.dbias = {static_cast<double*>(nullptr), {1, 1, 8192, 8192}};
  EXPECT_LT(Plan(call, Pass::backward).workspace_bytes(), std::size_t{24} << 20);
}

}  // namespace
}  // namespace headrace::test
