// Elements of tensors as doubles: exact widening, and narrowing rounded once, to nearest even.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "headrace/headrace.h"

namespace headrace {

// A 16-bit IEEE 754 format: a sign, exponent bits, mantissa bits. It has subnormals, infinities and NaN.
template <int ExponentBits, int MantissaBits>
struct SmallFloat {
  static_assert(1 + ExponentBits + MantissaBits == 16);
  static constexpr int mantissa_bits = MantissaBits;
  static constexpr int exponent_bias = (1 << (ExponentBits - 1)) - 1;
  static constexpr std::uint32_t infinity = ((1u << ExponentBits) - 1) << MantissaBits;
  static constexpr std::uint32_t quiet_nan = infinity | (1u << (MantissaBits - 1));

  std::uint16_t bits = 0;

  constexpr SmallFloat() = default;

  // Rounds once, straight from the double: by way of float32 a value just above the middle of two
  // neighbours would become the middle first and then may fall to the wrong side.
  constexpr explicit SmallFloat(double value) {
    const std::uint64_t wide = std::bit_cast<std::uint64_t>(value);
    const std::uint32_t sign = static_cast<std::uint32_t>(wide >> 63) << 15;
    bits = static_cast<std::uint16_t>(sign | magnitude_bits(wide & ~(std::uint64_t{1} << 63)));
  }

  constexpr explicit operator double() const {
    const std::uint64_t sign = std::uint64_t{bits & 0x8000u} << 48;
    const std::uint32_t magnitude = bits & 0x7FFFu;
    const std::uint32_t exponent = magnitude >> MantissaBits;
    const std::uint64_t mantissa = magnitude & ((1u << MantissaBits) - 1);
    if (magnitude >= infinity) return std::bit_cast<double>(sign | double_infinity | mantissa << (52 - MantissaBits));
    if (exponent == 0) {  // mantissa counts the spacing of the subnormals, 2^(1 - bias - MantissaBits)
      constexpr double spacing =
          std::bit_cast<double>(static_cast<std::uint64_t>(1024 - exponent_bias - MantissaBits) << 52);
      const double value = static_cast<double>(mantissa) * spacing;
      return sign != 0 ? -value : value;
    }
    const std::uint64_t wide_exponent = exponent + static_cast<std::uint64_t>(1023 - exponent_bias);
    return std::bit_cast<double>(sign | wide_exponent << 52 | mantissa << (52 - MantissaBits));
  }

 private:
  static constexpr std::uint64_t double_infinity = std::uint64_t{0x7FF} << 52;

  static constexpr std::uint32_t magnitude_bits(std::uint64_t wide) {
    if (wide > double_infinity) return quiet_nan;
    const int exponent = static_cast<int>(wide >> 52) - 1023 + exponent_bias;  // as this format stores it
    // Below the normal numbers the spacing stays that of exponent 1, so more bits are rounded away.
    const int shift = 52 - MantissaBits + (exponent < 1 ? 1 - exponent : 0);
    if (shift > 53) return 0;  // below half of the smallest subnormal
    const std::uint64_t significand = (wide & ((std::uint64_t{1} << 52) - 1)) | std::uint64_t{1} << 52;
    const std::uint64_t below_half = (std::uint64_t{1} << (shift - 1)) - 1;
    const std::uint64_t odd = significand >> shift & 1;
    const std::uint64_t rounded = (significand + below_half + odd) >> shift;
    if (exponent < 1) return static_cast<std::uint32_t>(rounded);
    // The leading bit of rounded adds 1 to the exponent, and so does a carry out of the mantissa.
    const std::uint64_t result = (static_cast<std::uint64_t>(exponent - 1) << MantissaBits) + rounded;
    return result >= infinity ? infinity : static_cast<std::uint32_t>(result);
  }
};

using Float16 = SmallFloat<5, 10>;
using BFloat16 = SmallFloat<8, 7>;

// Calls f with a value of the C++ type of a floating-point dtype.
template <typename F>
constexpr decltype(auto) with_element_type(hr_dtype dtype, F&& f) {
  switch (dtype) {
    case HR_FLOAT16:
      return f(Float16{});
    case HR_BFLOAT16:
      return f(BFloat16{});
    case HR_FLOAT64:
      return f(double{});
    default:
      return f(float{});
  }
}

inline double load_element(const void* data, hr_dtype dtype, std::int64_t index) {
  return with_element_type(dtype,
                           [&]<typename T>(T) { return static_cast<double>(static_cast<const T*>(data)[index]); });
}

inline void store_element(void* data, hr_dtype dtype, std::int64_t index, double value) {
  with_element_type(dtype, [&]<typename T>(T) { static_cast<T*>(data)[index] = static_cast<T>(value); });
}

// count contiguous elements, the first of them at index.
inline void load_elements(const void* data, hr_dtype dtype, std::int64_t index, std::int64_t count, double* values) {
  with_element_type(dtype, [&]<typename T>(T) {
    const T* source = static_cast<const T*>(data) + index;
    for (std::int64_t n = 0; n < count; ++n) values[n] = static_cast<double>(source[n]);
  });
}

inline void store_elements(void* data, hr_dtype dtype, std::int64_t index, std::int64_t count, const double* values) {
  with_element_type(dtype, [&]<typename T>(T) {
    T* target = static_cast<T*>(data) + index;
    for (std::int64_t n = 0; n < count; ++n) target[n] = static_cast<T>(values[n]);
  });
}

inline void fill_elements(void* data, hr_dtype dtype, std::int64_t index, std::int64_t count, double value) {
  with_element_type(dtype, [&]<typename T>(T) {
    T* target = static_cast<T*>(data) + index;
    for (std::int64_t n = 0; n < count; ++n) target[n] = static_cast<T>(value);
  });
}

}  // namespace headrace
