// What the products of bfloat16 share, on vectors (pairs-inl.h) and on AMX tiles (amx-inl.h).
#if defined(HEADRACE_CPU_SIMD_BFLOAT16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADRACE_CPU_SIMD_BFLOAT16_INL_H_
#undef HEADRACE_CPU_SIMD_BFLOAT16_INL_H_
#else
#define HEADRACE_CPU_SIMD_BFLOAT16_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "cpu/kernels.hpp"
#include "cpu/simd/attributes-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/tile_config.hpp"
#include "describe/element.hpp"
#include "hwy/highway.h"

#if HWY_TARGET == HWY_AVX3_DL  // avx512_bf16, see target.hpp

HEADRACE_BEFORE_NAMESPACE();
namespace headrace::cpu::HWY_NAMESPACE {

inline constexpr Index kVectorOf16 = packed_pairs;  // elements of a vector

// 32 elements of a row from column `first` on; zeros behind its end.
HWY_INLINE __m512i load_bfloat16(const BFloat16* row, Index first, Index size) {
  const Index left = size - first;
  const __mmask32 mask = left >= kVectorOf16 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
  return _mm512_maskz_loadu_epi16(mask, row + first);
}

// The elements times a power of two: exact, unless they become subnormal.
HWY_INLINE __m512i times_power_of_two(__m512i x, float factor) {
  const __m512 scale = _mm512_set1_ps(factor);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
  const __m512 first = _mm512_mul_ps(scale, _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)));
  const __m512 second = _mm512_mul_ps(scale, _mm512_castsi512_ps(_mm512_and_si512(x, upper)));
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(first), 16),
                         _mm512_and_si512(_mm512_castps_si512(second), upper));
}

// The largest magnitude among elements; NaN is passed over.
class BFloat16Magnitude {
 public:
  BFloat16Magnitude() : largest_(_mm512_setzero_si512()) {}
  HWY_INLINE void see(__m512i x) {
    const __m512i infinity = _mm512_set1_epi16(0x7F80);
    const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7FFF));
    largest_ =
        _mm512_max_epu16(largest_, _mm512_maskz_mov_epi16(_mm512_cmple_epu16_mask(magnitude, infinity), magnitude));
  }
  [[nodiscard]] float value() const {
    alignas(64) BFloat16 elements[kVectorOf16];
    _mm512_store_si512(elements, largest_);
    double largest = 0;
    for (const BFloat16 x : elements) largest = std::max(largest, static_cast<double>(x));
    return static_cast<float>(largest);
  }

 private:
  __m512i largest_;
};

// Two vectors of weights, rounded to bfloat16.
HWY_INLINE void store_rounded(__m512 first, __m512 second, BFloat16* weights) {
  const __m512bh rounded = _mm512_cvtne2ps_pbh(second, first);
  __builtin_memcpy(static_cast<void*>(weights), &rounded, sizeof(rounded));
}

// A row of weights s[begin, end), rounded to bfloat16; zeros to the next multiple of 32. begin is one.
HWY_INLINE void round_weights(const float* s, Index begin, Index end, BFloat16* weights) {
  for (Index c = begin; c < end; c += kVectorOf16) {
    const auto load = [&](Index first) HEADRACE_ATTR {
      const Index left = std::clamp<Index>(end - first, 0, 16);
      return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << left) - 1), s + first);
    };
    store_rounded(load(c), load(c + 16), weights + c);
  }
}

// 16 weights of two rows, rounded to bfloat16, side by side: elements 2 c and 2 c + 1 are those of column c. No second
// row: zeros.
HWY_INLINE __m512i round_pairs(const float* first, const float* second) {
  const __m512i column = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i halves =  // column c of the first row, then of the second one, 16 elements behind it
      _mm512_or_si512(column, _mm512_slli_epi32(_mm512_add_epi32(column, _mm512_set1_epi32(16)), 16));
  const __m512 b = second == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(second);
  const __m512bh rounded = _mm512_cvtne2ps_pbh(b, _mm512_loadu_ps(first));
  __m512i bits;
  __builtin_memcpy(&bits, &rounded, sizeof bits);
  return _mm512_permutexvar_epi16(halves, bits);
}

// The same for columns [0, count) and what follows to a multiple of 16.
HWY_INLINE void round_row_pair(const float* first, const float* second, Index count, BFloat16* pairs) {
  for (Index c = 0; c < count; c += 16) {
    _mm512_storeu_si512(pairs + 2 * c, round_pairs(first + c, second == nullptr ? nullptr : second + c));
  }
}

// Takes out the rows of right operand `rows` whose source is not finite: clear(r) makes zeros of row r.
template <class Right, typename Clear>
HWY_NOINLINE void isolate_bad_bfloat16(Right& rows, Clear clear) {
  if (rows.bad->isolated) return;
  rows.bad->isolated = true;
  const auto* data = static_cast<const BFloat16*>(rows.source.data);
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  for (Index r = 0; r < rows.source.count; ++r) {
    __mmask32 infinite = 0;
    for (Index c = 0; c < rows.source.size; c += kVectorOf16) {
      const __m512i bits = _mm512_and_si512(load_bfloat16(data + rows.source.at(r), c, rows.source.size), exponent);
      infinite |= _mm512_cmpeq_epi16_mask(bits, exponent);
    }
    if (infinite == 0) continue;
    rows.add(r);
    clear(r);
  }
}

}  // namespace headrace::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET

#endif  // include guard
