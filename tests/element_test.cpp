// The 16-bit formats, against all of their values.
#include "describe/element.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/random.hpp"

namespace headrace::test {
namespace {

static_assert(Float16(1.0).bits == 0x3C00 && Float16(65504.0).bits == 0x7BFF && Float16(-2.0).bits == 0xC000);
static_assert(Float16(0x1p-14).bits == 0x0400 && Float16(0x1p-24).bits == 0x0001 && Float16(-0.0).bits == 0x8000);
static_assert(BFloat16(1.0).bits == 0x3F80 && BFloat16(0x1p-126).bits == 0x0080 && BFloat16(0x1p-133).bits == 0x0001);
static_assert(Float16(65519.999).bits == 0x7BFF && Float16(65520.0).bits == 0x7C00 && Float16(1e300).bits == 0x7C00);

template <typename T>
class SmallFloats : public ::testing::Test {};
using Formats = ::testing::Types<Float16, BFloat16>;
TYPED_TEST_SUITE(SmallFloats, Formats);

template <typename T>
T from_bits(std::uint32_t bits) {
  T value;
  value.bits = static_cast<std::uint16_t>(bits);
  return value;
}

// What the bits of a format mean, by its definition.
template <typename T>
double defined_value(std::uint32_t bits) {
  const int exponent = static_cast<int>((bits & 0x7FFF) >> T::mantissa_bits);
  const int mantissa = static_cast<int>(bits & ((1u << T::mantissa_bits) - 1));
  const int largest = (1 << (15 - T::mantissa_bits)) - 1;
  double value = std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) value = std::ldexp(mantissa, 1 - T::exponent_bias - T::mantissa_bits);
  if (exponent > 0 && exponent < largest)
    value = std::ldexp(mantissa + (1 << T::mantissa_bits), exponent - T::exponent_bias - T::mantissa_bits);
  if (exponent == largest && mantissa == 0) value = std::numeric_limits<double>::infinity();
  return (bits & 0x8000) != 0 ? -value : value;
}

TYPED_TEST(SmallFloats, EveryPatternWidensToItsValueAndBack) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const double value = static_cast<double>(from_bits<TypeParam>(bits)), expected = defined_value<TypeParam>(bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_TRUE(std::isnan(static_cast<double>(TypeParam(value)))) << bits;
    } else {
      ASSERT_EQ(std::bit_cast<std::uint64_t>(value), std::bit_cast<std::uint64_t>(expected)) << bits;
      ASSERT_EQ(TypeParam(value).bits, bits);
    }
  }
}

// The nearest of all values, of two equally near ones the even one: looked up, not computed. Above the largest
// value the format goes on, for rounding, as if its exponent did; what comes to lie there is infinite.
template <typename T>
std::uint32_t looked_up(const std::vector<double>& values, double x) {
  const double magnitude = std::abs(x);
  std::uint32_t bits =
      static_cast<std::uint32_t>(std::upper_bound(values.begin(), values.end(), magnitude) - values.begin());
  bits = bits == 0 ? 0 : bits - 1;
  if (bits + 1 < values.size()) {
    const double below = magnitude - values[bits], above = values[bits + 1] - magnitude;  // exact: close neighbours
    if (above < below || (above == below && bits % 2 == 1)) ++bits;
  }
  return std::min(bits, T::infinity) | (std::signbit(x) ? 0x8000u : 0u);
}

TYPED_TEST(SmallFloats, RoundToTheNearestValue) {
  std::vector<double> values;
  for (std::uint32_t bits = 0; bits < TypeParam::infinity; ++bits) values.push_back(defined_value<TypeParam>(bits));
  values.push_back(2.0 * defined_value<TypeParam>(TypeParam::infinity - (1u << TypeParam::mantissa_bits)));
  ASSERT_TRUE(std::is_sorted(values.begin(), values.end()));

  const auto check = [&](double x) {
    ASSERT_EQ(TypeParam(x).bits, looked_up<TypeParam>(values, x)) << std::hexfloat << x;
    ASSERT_EQ(TypeParam(-x).bits, looked_up<TypeParam>(values, -x)) << std::hexfloat << x;
  };
  // Every value, every middle of two neighbours, and the doubles next to them.
  for (std::size_t n = 0; n + 1 < values.size(); ++n) {
    for (const double x : {values[n], 0.5 * (values[n] + values[n + 1]), values[n + 1]}) {
      check(x);
      check(std::nextafter(x, 0.0));
      check(std::nextafter(x, 1e300));
    }
  }
  Rng rng = test_rng();
  for (int repeat = 0; repeat < 100000; ++repeat)
    check(std::ldexp(1.0 + rng.uniform(), static_cast<int>(rng.integer(-160, 140))));
  for (const double x : {std::numeric_limits<double>::denorm_min(), std::numeric_limits<double>::min(),
                         std::numeric_limits<double>::max()})
    check(x);
}

TYPED_TEST(SmallFloats, InfinityAndNanStay) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(static_cast<double>(TypeParam(infinity)), infinity);
  EXPECT_EQ(static_cast<double>(TypeParam(-infinity)), -infinity);
  EXPECT_TRUE(std::isnan(static_cast<double>(TypeParam(std::numeric_limits<double>::quiet_NaN()))));
  // A NaN whose payload lies wholly in the bits that are cut off must not become an infinity.
  EXPECT_TRUE(std::isnan(static_cast<double>(TypeParam(std::bit_cast<double>(0x7FF0000000000001u)))));
}

TEST(Elements, LoadAndStoreByDtype) {
  for (const hr_dtype dtype : {HR_FLOAT32, HR_FLOAT16, HR_BFLOAT16, HR_FLOAT64}) {
    double memory[8] = {};
    const double values[] = {1.5, -0.25, 3.0};
    store_elements(memory, dtype, 1, 3, values);
    store_element(memory, dtype, 0, 8.0);
    fill_elements(memory, dtype, 4, 2, -7.0);
    double loaded[6] = {};
    load_elements(memory, dtype, 0, 6, loaded);
    const double expected[] = {8.0, 1.5, -0.25, 3.0, -7.0, -7.0};
    for (int n = 0; n < 6; ++n) {
      EXPECT_EQ(loaded[n], expected[n]);
      EXPECT_EQ(load_element(memory, dtype, n), expected[n]);
    }
  }
  float rounded = 0.0f;  // 1 + 2^-24 lies in the middle of two float32, 1 + 2^-24 + 2^-50 above it
  store_element(&rounded, HR_FLOAT32, 0, 1.0 + 0x1p-24);
  EXPECT_EQ(rounded, 1.0f);
  store_element(&rounded, HR_FLOAT32, 0, 1.0 + 0x1p-24 + 0x1p-50);
  EXPECT_EQ(rounded, 1.0f + 0x1p-23f);
}

}  // namespace
}  // namespace headrace::test
