// The products of bfloat16 with the instruction that multiplies pairs (AVX-512 BF16: Zen 4, Cooper Lake and later):
// each lane adds both products of two pairs to its float32. Two elements that lie side by side along the sum are one
// unit of the register-blocked product, so the layouts are those of float32 with half the depth. The instruction takes
// subnormal operands and results as zero.
#if defined(HEADRACE_CPU_SIMD_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADRACE_CPU_SIMD_PAIRS_INL_H_
#undef HEADRACE_CPU_SIMD_PAIRS_INL_H_
#else
#define HEADRACE_CPU_SIMD_PAIRS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/kernels.hpp"
#include "cpu/simd/attributes-inl.h"
#include "cpu/simd/bfloat16-inl.h"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/tile_config.hpp"
#include "describe/element.hpp"
#include "hwy/highway.h"

#if HWY_TARGET == HWY_AVX3_DL  // avx512_bf16, see target.hpp

HEADRACE_BEFORE_NAMESPACE();
namespace headrace::cpu::HWY_NAMESPACE {

struct Pair {
  BFloat16 first, second;
};
static_assert(sizeof(Pair) == sizeof(float));

template <>
struct Unit<Pair> {
  using Sum = float;
  using Vector = hn::Vec<Wide<float>>;
  static constexpr Index elements = 2;
  static constexpr Index stride_of_tile = weight_stride / 2;
  static HWY_INLINE __m512bh load(const Pair* p) { return of_bits(_mm512_loadu_si512(p)); }
  static HWY_INLINE __m512bh fill(const Pair* p) {
    std::int32_t both;
    std::memcpy(&both, p, sizeof both);
    return of_bits(_mm512_set1_epi32(both));
  }
  static HWY_INLINE Vector multiply_add(__m512bh left, __m512bh right, Vector sum) {
    return Vector{_mm512_dpbf16_ps(sum.raw, left, right)};
  }
  static HWY_INLINE __m512bh of_bits(__m512i bits) {
    __m512bh result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
  }
};

inline Index pairs_of(Index elements) { return ceil_div(elements, 2); }

// Groups of `group` rows (at most two vectors of them), times factor, a power of two, with their pairs side by side:
// pair k of row r stands at dst[(r / group) * pairs * group + k * group + r % group]. begin is a multiple of 16 or of
// the group; the last group is filled up with zeros. Returns the largest magnitude, with the factor; NaN is passed
// over.
HWY_NOINLINE inline float pack_pairs_transposed(const Rows& rows, Index begin, Index end, float factor, Index group,
                                                Pair* dst) {
  const auto* data = static_cast<const BFloat16*>(rows.data);
  const Index pairs = pairs_of(rows.size);
  BFloat16Magnitude magnitude;
  for (Index r = begin; r < end;) {
    const Index in_group = std::min<Index>(16, group - r % group);
    const Index count = std::min(in_group, end - r);
    const bool last = end == rows.count && r + count == end;
    Pair* const target = dst + r / group * pairs * group + r % group;
    const __mmask16 lanes = static_cast<__mmask16>((1u << in_group) - 1);
    for (Index k = 0; k < rows.size; k += kVectorOf16) {
      __m512i row[16];
      HEADRACE_UNROLL
      for (int i = 0; i < 16; ++i) {
        row[i] = i < count ? load_bfloat16(data + rows.at(r + i), k, rows.size) : _mm512_setzero_si512();
        magnitude.see(row[i]);
        if (factor != 1.0f) row[i] = times_power_of_two(row[i], factor);
      }
      transpose16(row);
      const Index here = std::min<Index>(16, pairs - k / 2);
      for (Index i = 0; i < here; ++i) _mm512_mask_storeu_epi32(target + (k / 2 + i) * group, lanes, row[i]);
    }
    r += count;
    if (!last) continue;
    for (Index rest = r % group == 0 ? group : r % group + in_group - count; rest < group; ++rest) {
      Pair* const column = dst + (rows.count - 1) / group * pairs * group + rest;
      for (Index k = 0; k < pairs; ++k) column[k * group] = Pair();
    }
  }
  return magnitude.value() * std::abs(factor);
}

// score_product in double, slowly.
HWY_NOINLINE inline void pair_score_product_wide(const GroupColumns* groups, Index group_count, Index pairs,
                                                 const Pair* left, const Pair* right, float* scores) {
  const Index width = panel_width<float>();
  for (Index g = 0; g < group_count; ++g) {
    for (Index r = 0; r < groups[g].rows; ++r) {
      for (Index c = groups[g].begin; c < groups[g].end; ++c) {
        double sum = 0.0;
        for (Index k = 0; k < pairs; ++k) {
          const Pair a = left[(g * pairs + k) * kBlockRows + r];
          const Pair b = right[c / width * width * pairs + k * width + c % width];
          sum += static_cast<double>(a.first) * static_cast<double>(b.first);
          sum += static_cast<double>(a.second) * static_cast<double>(b.second);
        }
        scores[(g * kBlockRows + r) * tile_stride + c] = static_cast<float>(sum);
      }
    }
  }
}

// Like RightRows: unit (r / 2, c) holds elements c of rows r and r + 1. A missing row is zeros.
struct PairRightRows : HiddenRows<float> {
  Pair* panels = nullptr;

  PairRightRows() = default;
  PairRightRows(const Rows& rows, float* memory, BadRows* bad_rows)
      : HiddenRows<float>{rows, bad_rows}, panels(reinterpret_cast<Pair*>(memory)) {}

  // Unit `row` from its vector `vec` on, a multiple of kBlockVecs.
  [[nodiscard]] const Pair* at(Index row, Index vec) const {
    return panels + vec * lanes<float>() * pairs_of(source.count) + row * panel_width<float>();
  }

  // Rows [begin, end); begin is even. Returns their largest magnitude; NaN is passed over.
  HWY_NOINLINE float pack(Index begin, Index end) {
    const auto* data = static_cast<const BFloat16*>(source.data);
    const Index width = panel_width<float>(), count = pairs_of(source.count);
    BFloat16Magnitude seen;
    for (Index r = begin; r < end; r += 2) {
      for (Index c = 0; c < source.size; c += 16) {
        const Index left = source.size - c;
        const __mmask16 mask = left >= 16 ? ~__mmask16{0} : static_cast<__mmask16>((1u << left) - 1);
        const auto load = [&](Index row) HEADRACE_ATTR {
          return row < end ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, data + source.at(row) + c))
                           : _mm512_setzero_si512();
        };
        const __m512i both = _mm512_or_si512(load(r), _mm512_slli_epi32(load(r + 1), 16));
        seen.see(both);
        _mm512_storeu_si512(panels + c / width * width * count + r / 2 * width + c % width, both);
      }
    }
    return seen.value();
  }

  void scale(float factor) {
    for (Index r = 0; r < source.count; ++r) {
      for (Index c = 0; c < source.size; ++c) {
        BFloat16& x = element(r, c);
        x = BFloat16(static_cast<double>(x) * static_cast<double>(factor));
      }
    }
  }

  // Takes out the rows that are not finite. Needed for tiles with hidden elements only.
  void isolate_bad() {
    isolate_bad_bfloat16(*this, [this](Index r) {
      for (Index c = 0; c < source.size; ++c) element(r, c) = BFloat16();
    });
  }

 private:
  [[nodiscard]] BFloat16& element(Index r, Index c) const {
    const Index width = panel_width<float>();
    Pair& unit = panels[c / width * width * pairs_of(source.count) + r / 2 * width + c % width];
    return r % 2 == 0 ? unit.first : unit.second;
  }
};

}  // namespace headrace::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET

#endif  // include guard
