// float16 and bfloat16 as numbers, for code that is not hot. Both hold fewer bits than float64, so that
// one rounding from float64 (to nearest, ties to even) gives what the formats define.
#pragma once

#include <bit>
#include <cstdint>

namespace headrace {

// An IEEE 754 binary format of 16 bits: 1 sign, ExponentBits, and the rest fraction.
template <int ExponentBits>
struct Float16Format {
  static constexpr int fraction_bits = 15 - ExponentBits;
  static constexpr int bias = (1 << (ExponentBits - 1)) - 1;
  static constexpr std::uint32_t infinity = ((1u << ExponentBits) - 1) << fraction_bits;

  static constexpr double to_double(std::uint16_t bits) {
    const std::uint64_t sign = std::uint64_t{bits} >> 15 << 63;
    const std::uint64_t exponent = (bits & 0x7fffu) >> fraction_bits;
    const std::uint64_t fraction = bits & ((1u << fraction_bits) - 1);
    if (exponent == 0) {  // zero and subnormals: fraction * 2^(1 - bias - fraction_bits), exact
      const double magnitude = static_cast<double>(fraction) *
                               std::bit_cast<double>(static_cast<std::uint64_t>(1023 + 1 - bias - fraction_bits) << 52);
      return sign != 0 ? -magnitude : magnitude;
    }
    const std::uint64_t wide = (bits & infinity) == infinity ? 0x7ff : exponent + 1023 - static_cast<unsigned>(bias);
    return std::bit_cast<double>(sign | wide << 52 | fraction << (52 - fraction_bits));
  }

  static constexpr std::uint16_t from_double(double value) {
    const std::uint64_t bits = std::bit_cast<std::uint64_t>(value);
    const std::uint32_t sign = static_cast<std::uint32_t>(bits >> 63 << 15);
    const int wide = static_cast<int>(bits >> 52 & 0x7ff);
    const std::uint64_t fraction = bits & ((std::uint64_t{1} << 52) - 1);
    if (wide == 0x7ff) {
      const std::uint32_t quiet = fraction != 0 ? 1u << (fraction_bits - 1) : 0;
      return static_cast<std::uint16_t>(sign | infinity | quiet |
                                        static_cast<std::uint32_t>(fraction >> (52 - fraction_bits)));
    }
    const int exponent = wide - 1023 + bias;
    const int shift = 52 - fraction_bits + (exponent > 0 ? 0 : 1 - exponent);
    if (wide == 0 || shift > 53) return static_cast<std::uint16_t>(sign);  // below half of the smallest subnormal
    const std::uint64_t significand = fraction | std::uint64_t{1} << 52;
    const std::uint64_t rest = significand & ((std::uint64_t{1} << shift) - 1);
    const std::uint64_t half = std::uint64_t{1} << (shift - 1);
    std::uint64_t kept = significand >> shift;
    if (rest > half || (rest == half && (kept & 1) != 0)) ++kept;
    // A carry out of the fraction raises the exponent by itself.
    const std::uint64_t magnitude =
        kept + (exponent > 0 ? static_cast<std::uint64_t>(exponent - 1) << fraction_bits : 0);
    return static_cast<std::uint16_t>(sign |
                                      (magnitude >= infinity ? infinity : static_cast<std::uint32_t>(magnitude)));
  }
};

using Half = Float16Format<5>;
using BFloat16 = Float16Format<8>;

}  // namespace headrace
