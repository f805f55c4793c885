// The laws of the streaming states: an identity changes nothing, merging is commutative bit for bit and
// associative up to rounding, and any way to cut the input gives what one pass over all of it gives.
#include "headrace/streaming.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <string>
#include <type_traits>
#include <vector>

#include "support/random.hpp"

namespace headrace::test {
namespace {

// exp and log that constant expressions may call (std::exp may not be called in one).
struct ConstexprMath {
  static constexpr double exp(double x) {
    if (x == -std::numeric_limits<double>::infinity()) return 0.0;
    double term = 1.0, sum = 1.0;
    for (int n = 1; n < 30; ++n) sum += term *= x / 1024.0 / n;
    for (int n = 0; n < 10; ++n) sum *= sum;
    return sum;
  }
  static constexpr double log(double x) {
    double y = 0.0;
    for (int n = 0; n < 100; ++n) y += 2.0 * (x - exp(y)) / (x + exp(y));
    return y;
  }
};

constexpr bool near(double a, double b) { return a - b < 1e-12 && b - a < 1e-12; }

constexpr double minus_infinity = -std::numeric_limits<double>::infinity();

static_assert([] {
  SoftmaxState<double, ConstexprMath> state, other;
  state.update(1.0);
  state.update(3.0);
  other.update(2.0);
  state.merge(other);
  const auto [lse, scale] = state.finalize();  // 3 + log(1 + e^-1 + e^-2)
  return near(lse, 3.4076059644443806) && near(scale, 1.0 / 1.5032147244080551) && state.m == 3.0;
}());

static_assert([] {
  const SoftmaxState<double, ConstexprMath> empty;
  SoftmaxState<double, ConstexprMath> both = empty;
  both.merge(empty);
  both.update(minus_infinity);
  return both.empty() && both.finalize().lse == minus_infinity && both.finalize().scale == 0.0;
}());

static_assert([] {
  AttentionState<double, 2, ConstexprMath> state;
  constexpr double a[] = {1.0, -1.0}, b[] = {3.0, 5.0};
  state.update(7.0, a);
  state.update(7.0, b);
  double out[2] = {};
  const double lse = state.finalize(out);
  return near(lse, 7.0 + std::numbers::ln2) && out[0] == 2.0 && out[1] == 2.0;
}());

static_assert([] {
  Moments<double> low, high;
  constexpr double values[] = {1.0, 2.0, 3.0};
  low.update(values, 3);
  high.update(6.0);
  low.merge(high);  // 1, 2, 3, 6: mean 3, squared deviations 4 + 1 + 0 + 9
  return low.count == 4 && low.finalize().mean == 3.0 && low.m2 == 14.0 && low.finalize().variance == 3.5;
}());

static_assert([] {
  TopK<int, 2> top, other;  // an integer has no -inf and needs none: every entry is filled
  top.update(5, 3);
  top.update(4, 1);
  other.update(5, 0);
  top.merge(other);
  return top.size() == 2 && top.entry[0].index == 0 && top.entry[1].index == 3;
}());

template <typename T>
std::string bits_of(T value) {
  if (std::isnan(value)) return "nan";
  if constexpr (sizeof(T) == 4)
    return std::to_string(std::bit_cast<std::uint32_t>(value));
  else
    return std::to_string(std::bit_cast<std::uint64_t>(value));
}

template <typename T>
std::string bits_of(const SoftmaxState<T>& state) {
  return bits_of(state.m) + " " + bits_of(state.l);
}

template <typename T, int Dim>
std::string bits_of(const AttentionState<T, Dim>& state) {
  std::string bits = bits_of(state.softmax);
  for (const T value : state.o) bits.append(" ").append(bits_of(value));
  return bits;
}

template <typename T>
std::string bits_of(const Moments<T>& state) {
  return std::to_string(state.count) + " " + bits_of(state.mean) + " " + bits_of(state.m2);
}

template <typename T, int K>
std::string bits_of(const TopK<T, K>& state) {
  std::string bits;
  for (const auto& entry : state.entry) bits += bits_of(entry.value) + "@" + std::to_string(entry.index) + " ";
  return bits;
}

// Inputs that break careless reductions.
template <typename T>
std::vector<T> adversarial_values(Rng& rng, std::int64_t count) {
  const T infinite = std::numeric_limits<T>::infinity();
  const std::int64_t kind = rng.integer(0, 8);
  const double base = rng.pick({0.0, 1e4, -1e4, 1e30, -1e30});
  std::vector<T> values;
  for (std::int64_t n = 0; n < count; ++n) {
    switch (kind) {
      case 0:
        values.push_back(static_cast<T>(rng.normal()));
        break;
      case 1:
        values.push_back(static_cast<T>(100.0 * rng.normal()));
        break;
      case 2:
        values.push_back(static_cast<T>(base));
        break;
      case 3:
        values.push_back(static_cast<T>(base + rng.normal()));
        break;
      case 4:
        values.push_back(static_cast<T>(rng.pick({1e4, -1e4, 1e30, -1e30, 0.0})));
        break;
      case 5:
        values.push_back(-infinite);
        break;
      case 6:
        values.push_back(rng.chance(0.7) ? -infinite : static_cast<T>(rng.normal()));
        break;
      case 7:
        values.push_back(rng.pick({std::numeric_limits<T>::max(), std::numeric_limits<T>::lowest(), T(0)}));
        break;
      default:
        values.push_back(static_cast<T>(-0.0 + static_cast<double>(n % 3) * 1e-30));
        break;
    }
  }
  return values;
}

template <typename T>
long double exact_lse(const std::vector<T>& scores) {
  long double maximum = -std::numeric_limits<long double>::infinity(), sum = 0.0L;
  for (const T s : scores) maximum = std::max(maximum, static_cast<long double>(s));
  if (std::isinf(maximum)) return maximum;
  for (const T s : scores) sum += std::exp(static_cast<long double>(s) - maximum);
  return maximum + std::log(sum);
}

template <typename T>
double tolerance(long double magnitude) {
  return 8.0 * std::numeric_limits<T>::epsilon() * (1.0 + std::abs(static_cast<double>(magnitude)));
}

template <typename T>
void expect_lse(T lse, long double expected) {
  if (std::isinf(expected)) {
    EXPECT_EQ(lse, static_cast<T>(expected));
  } else {
    EXPECT_NEAR(lse, static_cast<double>(expected), tolerance<T>(expected));
  }
}

// A state of values, reached by a random mixture of updates by one, by block, and of merges.
template <typename State, typename T, typename Update, typename UpdateBlock>
State reduce_somehow(Rng& rng, const std::vector<T>& values, std::int64_t begin, std::int64_t end, const Update& update,
                     const UpdateBlock& update_block) {
  State state;
  if (end - begin > 1 && rng.chance(0.7)) {
    const std::int64_t middle = rng.integer(begin, end);
    state = reduce_somehow<State>(rng, values, begin, middle, update, update_block);
    const State right = reduce_somehow<State>(rng, values, middle, end, update, update_block);
    if (rng.chance(0.5)) {
      state.merge(right);
    } else {
      State merged = right;
      merged.merge(state);
      state = merged;
    }
  } else if (rng.chance(0.5)) {
    for (std::int64_t n = begin; n < end; ++n) update(state, n);
  } else {
    update_block(state, begin, end);
  }
  return state;
}

template <typename T>
SoftmaxState<T> softmax_of(Rng& rng, const std::vector<T>& values, std::int64_t begin, std::int64_t end) {
  return reduce_somehow<SoftmaxState<T>>(
      rng, values, begin, end,
      [&](SoftmaxState<T>& state, std::int64_t n) { state.update(values[static_cast<std::size_t>(n)]); },
      [&](SoftmaxState<T>& state, std::int64_t from, std::int64_t to) {
        state.update(values.data() + from, to - from);
      });
}

template <typename T>
Moments<T> moments_of(Rng& rng, const std::vector<T>& values, std::int64_t begin, std::int64_t end) {
  return reduce_somehow<Moments<T>>(
      rng, values, begin, end,
      [&](Moments<T>& state, std::int64_t n) { state.update(values[static_cast<std::size_t>(n)]); },
      [&](Moments<T>& state, std::int64_t from, std::int64_t to) { state.update(values.data() + from, to - from); });
}

template <typename T, int K>
TopK<T, K> top_of(Rng& rng, const std::vector<T>& values, std::int64_t begin, std::int64_t end) {
  return reduce_somehow<TopK<T, K>>(
      rng, values, begin, end,
      [&](TopK<T, K>& state, std::int64_t n) { state.update(values[static_cast<std::size_t>(n)], n); },
      [&](TopK<T, K>& state, std::int64_t from, std::int64_t to) {
        state.update(values.data() + from, to - from, from);
      });
}

template <typename T>
class Streaming : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Streaming, Types);

TYPED_TEST(Streaming, SoftmaxOfAnyCutIsThatOfTheWhole) {
  Rng rng = test_rng();
  for (int repeat = 0; repeat < 2000; ++repeat) {
    const std::vector<TypeParam> values = adversarial_values<TypeParam>(rng, rng.integer(0, 200));
    const SoftmaxState<TypeParam> state = softmax_of(rng, values, 0, std::ssize(values));
    const auto [lse, scale] = state.finalize();
    expect_lse(lse, exact_lse(values));
    EXPECT_EQ(scale, state.l == TypeParam(0) ? TypeParam(0) : TypeParam(1) / state.l);
    if (this->HasFailure()) return;
  }
}

TYPED_TEST(Streaming, SoftmaxWeightsOfABlockSumToOne) {
  Rng rng = test_rng();
  for (int repeat = 0; repeat < 500; ++repeat) {
    const std::vector<TypeParam> values = adversarial_values<TypeParam>(rng, rng.integer(1, 200));
    SoftmaxState<TypeParam> state;
    state.update(values.data(), std::ssize(values));
    const auto [lse, scale] = state.finalize();
    double sum = 0.0;
    for (const TypeParam s : values) sum += static_cast<double>(state.weight(s) * scale);
    EXPECT_NEAR(sum, state.empty() ? 0.0 : 1.0,
                (20.0 + static_cast<double>(values.size())) * std::numeric_limits<TypeParam>::epsilon());
  }
}

TYPED_TEST(Streaming, SoftmaxIdentityChangesNoBitAndMergeCommutes) {
  Rng rng = test_rng();
  for (int repeat = 0; repeat < 2000; ++repeat) {
    const std::vector<TypeParam> values = adversarial_values<TypeParam>(rng, rng.integer(0, 40));
    const std::int64_t middle = rng.integer(0, std::ssize(values));
    const SoftmaxState<TypeParam> identity, a = softmax_of(rng, values, 0, middle),
                                            b = softmax_of(rng, values, middle, std::ssize(values));
    SoftmaxState<TypeParam> a_identity = a, identity_a = identity, ab = a, ba = b;
    a_identity.merge(identity);
    identity_a.merge(a);
    ab.merge(b);
    ba.merge(a);
    EXPECT_EQ(bits_of(a_identity), bits_of(a));
    EXPECT_EQ(bits_of(identity_a), bits_of(a));
    EXPECT_EQ(bits_of(ab), bits_of(ba));
  }
}

TYPED_TEST(Streaming, SoftmaxMergeIsAssociativeUpToRounding) {
  Rng rng = test_rng();
  for (int repeat = 0; repeat < 2000; ++repeat) {
    SoftmaxState<TypeParam> part[3];
    std::vector<TypeParam> all;
    for (auto& state : part) {
      const std::vector<TypeParam> values = adversarial_values<TypeParam>(rng, rng.integer(0, 40));
      all.insert(all.end(), values.begin(), values.end());
      state = softmax_of(rng, values, 0, std::ssize(values));
    }
    SoftmaxState<TypeParam> left = part[0], right = part[1];
    left.merge(part[1]);
    left.merge(part[2]);
    right.merge(part[2]);
    SoftmaxState<TypeParam> whole = part[0];
    whole.merge(right);
    EXPECT_EQ(left.m, whole.m);
    expect_lse(left.finalize().lse, exact_lse(all));
    expect_lse(whole.finalize().lse, exact_lse(all));
  }
}

TYPED_TEST(Streaming, HugeBlocksDoNotStick) {
  // 2^25 equal scores: in float32 a running sum of ones stops at 2^24.
  const std::vector<TypeParam> values(std::size_t{1} << 25, TypeParam(3));
  SoftmaxState<TypeParam> softmax;
  softmax.update(values.data(), std::ssize(values));
  EXPECT_EQ(softmax.l, TypeParam(1 << 25));
  Moments<TypeParam> moments;
  moments.update(values.data(), std::ssize(values));
  EXPECT_EQ(moments.finalize().mean, TypeParam(3));
  EXPECT_EQ(moments.finalize().variance, TypeParam(0));
}

TYPED_TEST(Streaming, NanShows) {
  const TypeParam nan = std::numeric_limits<TypeParam>::quiet_NaN();
  for (const TypeParam other : {TypeParam(1), -std::numeric_limits<TypeParam>::infinity(), TypeParam(1e30)}) {
    for (const bool nan_first : {true, false}) {
      const std::vector<TypeParam> values = {nan_first ? nan : other, nan_first ? other : nan};
      SoftmaxState<TypeParam> one_by_one, block, a, b;
      for (const TypeParam s : values) one_by_one.update(s);
      block.update(values.data(), 2);
      a.update(values[0]);
      b.update(values[1]);
      a.merge(b);
      for (const auto& state : {one_by_one, block, a}) {
        EXPECT_TRUE(std::isnan(state.finalize().lse));
        EXPECT_TRUE(std::isnan(state.finalize().scale));
        EXPECT_FALSE(state.empty());
      }
    }
  }
  Moments<TypeParam> moments;
  moments.update(TypeParam(1));
  moments.update(nan);
  EXPECT_TRUE(std::isnan(moments.finalize().mean));
  EXPECT_TRUE(std::isnan(moments.finalize().variance));
  TopK<TypeParam, 2> top;
  top.update(std::numeric_limits<TypeParam>::infinity(), 0);
  top.update(TypeParam(3), 1);
  top.update(nan, 2);
  EXPECT_TRUE(std::isnan(top.finalize()[0].value));
  EXPECT_EQ(top.finalize()[1].index, 0);
}

TYPED_TEST(Streaming, PlusInfinityIsNotHidden) {
  SoftmaxState<TypeParam> state;
  state.update(TypeParam(1));
  state.update(std::numeric_limits<TypeParam>::infinity());
  EXPECT_TRUE(std::isnan(state.finalize().lse));
}

// Two finished attentions, (out, lse) each.
TYPED_TEST(Streaming, FinishedStatesMerge) {
  using T = TypeParam;
  const T nothing = -std::numeric_limits<T>::infinity();
  struct Case {
    T a, b, merged, weight_a;
  };
  for (const Case& c : std::vector<Case>{{nothing, nothing, nothing, T(0)},
                                         {T(0.7), nothing, T(0.7), T(1)},
                                         {T(-1e30), nothing, T(-1e30), T(1)},
                                         {T(1e4), nothing, T(1e4), T(1)},
                                         {T(200), T(-200), T(200), T(1)},
                                         {T(1e4), T(1e4), static_cast<T>(1e4 + std::numbers::ln2), T(0.5)},
                                         {T(1e30), T(-1e30), T(1e30), T(1)}}) {
    auto merged = SoftmaxState<T>::of_lse(c.a), swapped = SoftmaxState<T>::of_lse(c.b);
    const auto weights = merged.merge(SoftmaxState<T>::of_lse(c.b));
    swapped.merge(SoftmaxState<T>::of_lse(c.a));
    EXPECT_EQ(merged.finalize().lse, c.merged);
    EXPECT_EQ(bits_of(merged), bits_of(swapped));
    EXPECT_EQ(weights.kept * merged.finalize().scale, c.weight_a);
  }
}

// The natural logarithm, whole or in halves: q = 0 gives every key the score 0.
TYPED_TEST(Streaming, LseIsNaturalLogarithm) {
  const std::vector<TypeParam> zeros(64, TypeParam(0));
  SoftmaxState<TypeParam> whole, half;
  whole.update(zeros.data(), 64);
  half.update(zeros.data(), 32);
  auto halves = SoftmaxState<TypeParam>::of_lse(half.finalize().lse);
  halves.merge(SoftmaxState<TypeParam>::of_lse(half.finalize().lse));
  EXPECT_NEAR(whole.finalize().lse, 4.158883083359672, tolerance<TypeParam>(4.0L));
  EXPECT_NEAR(halves.finalize().lse, 4.158883083359672, tolerance<TypeParam>(4.0L));
}

TYPED_TEST(Streaming, AttentionOfAnyCutIsThatOfTheWhole) {
  using T = TypeParam;
  using State = AttentionState<T, 3>;
  Rng rng = test_rng();
  for (int repeat = 0; repeat < 1000; ++repeat) {
    const std::vector<T> scores = adversarial_values<T>(rng, rng.integer(0, 60));
    std::vector<T> values;
    for (std::size_t n = 0; n < 3 * scores.size(); ++n) values.push_back(static_cast<T>(rng.normal()));
    const auto update = [&](State& state, std::int64_t n) {
      state.update(scores[static_cast<std::size_t>(n)], values.data() + 3 * n);
    };
    const auto update_block = [&](State& state, std::int64_t from, std::int64_t to) {
      for (std::int64_t n = from; n < to; ++n) update(state, n);
    };
    const std::int64_t middle = rng.integer(0, std::ssize(scores));
    const State a = reduce_somehow<State>(rng, scores, 0, middle, update, update_block);
    const State b = reduce_somehow<State>(rng, scores, middle, std::ssize(scores), update, update_block);
    State ab = a, ba = b, a_identity = a, identity_a;
    ab.merge(b);
    ba.merge(a);
    a_identity.merge(State{});
    identity_a.merge(a);
    EXPECT_EQ(bits_of(ab), bits_of(ba));
    EXPECT_EQ(bits_of(a_identity), bits_of(a));
    EXPECT_EQ(bits_of(identity_a), bits_of(a));

    T out[3];
    expect_lse(ab.finalize(out), exact_lse(scores));
    const T maximum = scores.empty() ? T(0) : *std::max_element(scores.begin(), scores.end());
    for (std::size_t x = 0; x < 3; ++x) {
      long double sum = 0.0L, total = 0.0L;  // of the weighted values, of the weights
      for (std::size_t n = 0; n < scores.size(); ++n) {
        if (std::isinf(scores[n])) continue;
        const long double weight = std::exp(static_cast<long double>(scores[n]) - static_cast<long double>(maximum));
        sum += weight * static_cast<long double>(values[3 * n + x]);
        total += weight;
      }
      const double expected = total == 0.0L ? 0.0 : static_cast<double>(sum / total);
      EXPECT_NEAR(out[x], expected, 100.0 * std::numeric_limits<T>::epsilon());
    }
    if (this->HasFailure()) return;
  }
}

TYPED_TEST(Streaming, HiddenKeyWithNanValueDoesNotCount) {
  AttentionState<TypeParam, 1> state;
  const TypeParam nan = std::numeric_limits<TypeParam>::quiet_NaN(), two = 2;
  state.update(-std::numeric_limits<TypeParam>::infinity(), &nan);
  state.update(TypeParam(5), &two);
  state.update(-std::numeric_limits<TypeParam>::infinity(), &nan);
  TypeParam out = 0;
  EXPECT_EQ(state.finalize(&out), TypeParam(5));
  EXPECT_EQ(out, two);
}

TYPED_TEST(Streaming, EmptyAttentionIsZero) {
  AttentionState<TypeParam, 2> state;
  state.merge(AttentionState<TypeParam, 2>{});
  TypeParam out[2] = {TypeParam(777), TypeParam(777)};
  EXPECT_EQ(state.finalize(out), -std::numeric_limits<TypeParam>::infinity());
  EXPECT_EQ(bits_of(out[0]), bits_of(TypeParam(0)));
  EXPECT_EQ(bits_of(out[1]), bits_of(TypeParam(0)));
}

TYPED_TEST(Streaming, MomentsOfAnyCutAreThoseOfTheWhole) {
  using T = TypeParam;
  Rng rng = test_rng();
  for (int repeat = 0; repeat < 1000; ++repeat) {
    const double offset = rng.pick({0.0, 1e4, -1e4, 1e6}), deviation = rng.pick({0.0, 1.0, 1e-3, 1e3});
    std::vector<T> values;
    for (std::int64_t n = rng.integer(0, 300); n > 0; --n)
      values.push_back(static_cast<T>(offset + deviation * rng.normal()));
    const std::int64_t count = std::ssize(values), middle = rng.integer(0, count);
    const Moments<T> a = moments_of(rng, values, 0, middle), b = moments_of(rng, values, middle, count);
    Moments<T> ab = a, ba = b, a_identity = a, identity_a;
    ab.merge(b);
    ba.merge(a);
    a_identity.merge(Moments<T>{});
    identity_a.merge(a);
    EXPECT_EQ(bits_of(ab), bits_of(ba));
    EXPECT_EQ(bits_of(a_identity), bits_of(a));
    EXPECT_EQ(bits_of(identity_a), bits_of(a));

    long double mean = 0.0L, m2 = 0.0L;
    for (const T x : values) mean += static_cast<long double>(x) / static_cast<long double>(count);
    for (const T x : values) m2 += (static_cast<long double>(x) - mean) * (static_cast<long double>(x) - mean);
    const double variance = count == 0 ? 0.0 : static_cast<double>(m2 / static_cast<long double>(count));
    const double epsilon = std::numeric_limits<T>::epsilon(), spread = std::sqrt(variance);
    // A mean that is off by a few roundings of the offset moves the squared deviations by its product with the
    // spread, and by its square.
    const double mean_error = 20.0 * epsilon * (std::abs(offset) + spread);
    EXPECT_EQ(ab.count, count);
    EXPECT_NEAR(ab.finalize().mean, static_cast<double>(mean), mean_error);
    EXPECT_NEAR(ab.finalize().variance, variance,
                50.0 * epsilon * variance + mean_error * spread + mean_error * mean_error);
    if (deviation == 0.0) {
      EXPECT_EQ(ab.finalize().variance, T(0));
    }
    if (this->HasFailure()) return;
  }
}

TYPED_TEST(Streaming, MomentsMergeIsAssociativeUpToRounding) {
  Rng rng = test_rng();
  for (int repeat = 0; repeat < 500; ++repeat) {
    Moments<TypeParam> part[3];
    for (auto& state : part) {
      for (std::int64_t n = rng.integer(0, 30); n > 0; --n) state.update(static_cast<TypeParam>(rng.normal()));
    }
    Moments<TypeParam> left = part[0], right = part[1];
    left.merge(part[1]);
    left.merge(part[2]);
    right.merge(part[2]);
    Moments<TypeParam> whole = part[0];
    whole.merge(right);
    EXPECT_EQ(left.count, whole.count);
    EXPECT_NEAR(left.mean, whole.mean, tolerance<TypeParam>(1.0L));
    EXPECT_NEAR(left.m2, whole.m2, tolerance<TypeParam>(100.0L));
  }
}

TYPED_TEST(Streaming, NoMomentsAreZero) {
  Moments<TypeParam> state;
  state.merge(Moments<TypeParam>{});
  state.update(nullptr, 0);
  EXPECT_EQ(state.count, 0);
  EXPECT_EQ(state.finalize().mean, TypeParam(0));
  EXPECT_EQ(state.finalize().variance, TypeParam(0));
}

TYPED_TEST(Streaming, TopKOfAnyCutIsThatOfTheSortedWhole) {
  using T = TypeParam;
  constexpr int k = 5;
  Rng rng = test_rng();
  for (int repeat = 0; repeat < 2000; ++repeat) {
    std::vector<T> values = adversarial_values<T>(rng, rng.integer(0, 60));
    const bool few_distinct = rng.chance(0.5);
    for (T& value : values) {
      if (few_distinct) value = rng.pick({T(1), T(0), T(-0.0), T(2), -std::numeric_limits<T>::infinity()});
      if (repeat % 4 == 0 && rng.chance(0.1)) value = std::numeric_limits<T>::quiet_NaN();
    }
    std::vector<std::int64_t> order;
    for (std::int64_t n = 0; n < std::ssize(values); ++n) order.push_back(n);
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t x, std::int64_t y) {
      const T a = values[static_cast<std::size_t>(x)], b = values[static_cast<std::size_t>(y)];
      return std::isnan(a) ? !std::isnan(b) : a > b;
    });

    const std::int64_t count = std::ssize(values), middle = rng.integer(0, count);
    const TopK<T, k> a = top_of<T, k>(rng, values, 0, middle), b = top_of<T, k>(rng, values, middle, count);
    TopK<T, k> ab = a, ba = b, a_identity = a, identity_a;
    ab.merge(b);
    ba.merge(a);
    a_identity.merge(TopK<T, k>{});
    identity_a.merge(a);
    EXPECT_EQ(bits_of(ab), bits_of(ba));
    EXPECT_EQ(bits_of(a_identity), bits_of(a));
    EXPECT_EQ(bits_of(identity_a), bits_of(a));

    ASSERT_EQ(ab.size(), std::min<std::int64_t>(k, count));
    for (int n = 0; n < ab.size(); ++n) {
      const std::int64_t expected = order[static_cast<std::size_t>(n)];
      EXPECT_EQ(ab.finalize()[n].index, expected);
      EXPECT_EQ(bits_of(ab.finalize()[n].value), bits_of(values[static_cast<std::size_t>(expected)]));
    }
    for (int n = ab.size(); n < k; ++n) EXPECT_EQ(ab.finalize()[n].index, -1);
    if (this->HasFailure()) return;
  }
}

}  // namespace
}  // namespace headrace::test
