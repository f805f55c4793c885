// The products of bfloat16 on AMX tiles: 8 registers of 16 rows x 64 bytes, and an instruction that multiplies 16 x 32
// by 32 x 16 elements and adds in float32. Left operands lie row by row; of right ones, the two elements of a pair
// along the sum lie side by side. The instruction takes subnormal operands and results as zero.
#if defined(HEADRACE_CPU_SIMD_AMX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADRACE_CPU_SIMD_AMX_INL_H_
#undef HEADRACE_CPU_SIMD_AMX_INL_H_
#else
#define HEADRACE_CPU_SIMD_AMX_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/kernels.hpp"
#include "cpu/simd/attributes-inl.h"
#include "cpu/simd/bfloat16-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/tile_config.hpp"
#include "describe/element.hpp"
#include "hwy/highway.h"

#if HWY_TARGET == HWY_AVX3_DL  // avx512_bf16, see target.hpp; whether the processor has AMX is asked at run time

HEADRACE_BEFORE_NAMESPACE();
namespace headrace::cpu::HWY_NAMESPACE {

inline constexpr Index kAmxRows = amx_rows;  // of a tile register: rows, columns of a result, pairs of a right operand
inline constexpr Index kAmxDepth = 32;       // elements of a sum that one instruction takes
inline constexpr Index kAmxTile = kAmxRows * kAmxDepth;  // elements of a tile

// Configures all tile registers as 16 rows of 64 bytes while it lives. Loads of tiles are nothing to the compiler
// either: what they read is written by other functions, which are not inlined.
class AmxScope {
 public:
  AmxScope() {
    struct alignas(64) Config {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {};
      std::uint8_t rows[16] = {};
    } config;
    std::fill_n(config.row_bytes, 8, std::uint16_t{64});
    std::fill_n(config.rows, 8, std::uint8_t{kAmxRows});
    // GCC's intrinsic tells the compiler of the first 8 bytes alone: without this it may leave out the others.
    asm volatile("" : : "m"(config));
    _tile_loadconfig(&config);
  }
  ~AmxScope() { _tile_release(); }
  AmxScope(const AmxScope&) = delete;
  AmxScope& operator=(const AmxScope&) = delete;
};

// Left operand, times factor, a power of two: tile (r / 16, k / 32) of element (r, k) at ((r / 16) * depth_tiles + k /
// 32) * kAmxTile. Returns the largest magnitude, with the factor; NaN is passed over.
HWY_NOINLINE inline float amx_pack_left(const Rows& rows, float factor, BFloat16* dst) {
  const auto* data = static_cast<const BFloat16*>(rows.data);
  const Index depth_tiles = ceil_div(rows.size, kAmxDepth);
  BFloat16Magnitude magnitude;
  for (Index r = 0; r < rows.count; ++r) {
    BFloat16* target = dst + r / kAmxRows * depth_tiles * kAmxTile + r % kAmxRows * kAmxDepth;
    for (Index k = 0; k < rows.size; k += kAmxDepth, target += kAmxTile) {
      const __m512i x = load_bfloat16(data + rows.at(r), k, rows.size);
      magnitude.see(x);
      _mm512_storeu_si512(target, factor == 1.0f ? x : times_power_of_two(x, factor));
    }
  }
  return magnitude.value() * std::abs(factor);
}

// Right operand of q . k: rows [begin, end) of the keys, begin a multiple of 16, in tiles (row / 16, k / 32); pair k /
// 2 of the keys of a tile is its row k / 2 % 16. Missing keys are zeros.
HWY_NOINLINE inline float amx_pack_keys(const Rows& rows, Index begin, Index end, BFloat16* dst) {
  const auto* data = static_cast<const BFloat16*>(rows.data);
  const Index depth_tiles = ceil_div(rows.size, kAmxDepth);
  BFloat16Magnitude magnitude;
  for (Index first = begin; first < end; first += kAmxRows) {
    BFloat16* target = dst + first / kAmxRows * depth_tiles * kAmxTile;
    for (Index k = 0; k < rows.size; k += kAmxDepth, target += kAmxTile) {
      __m512i row[16];
      for (Index r = 0; r < kAmxRows; ++r) {
        row[r] = first + r < end ? load_bfloat16(data + rows.at(first + r), k, rows.size) : _mm512_setzero_si512();
        magnitude.see(row[r]);
      }
      transpose16(row);
      for (Index r = 0; r < kAmxRows; ++r) _mm512_storeu_si512(target + r * kAmxDepth, row[r]);
    }
  }
  return magnitude.value();
}

// Right operand of weights . v, like RightRows: tile (row / 32, column / 16), whose row r holds the pairs of v's rows 2
// r and 2 r + 1. Missing rows are zeros.
struct AmxRightRows : HiddenRows<float> {
  BFloat16* tiles = nullptr;

  AmxRightRows() = default;

  AmxRightRows(const Rows& rows, float* memory, BadRows* bad_rows)
      : HiddenRows<float>{rows, bad_rows}, tiles(reinterpret_cast<BFloat16*>(memory)) {}

  [[nodiscard]] Index column_tiles() const { return ceil_div(source.size, kAmxRows); }
  // Element (r, c) of the packed rows.
  [[nodiscard]] BFloat16& at(Index r, Index c) const {
    return tiles[(r / kAmxDepth * column_tiles() + c / kAmxRows) * kAmxTile + r / 2 % kAmxRows * kAmxDepth +
                 c % kAmxRows * 2 + r % 2];
  }

  // Rows [begin, end); begin is a multiple of 16. Returns their largest magnitude; NaN is passed over.
  HWY_NOINLINE float pack(Index begin, Index end) {
    const auto* data = static_cast<const BFloat16*>(source.data);
    const Index padded = end == source.count ? round_up(end, kAmxDepth) : end;
    BFloat16Magnitude seen;
    for (Index r = begin; r < padded; r += 2) {
      for (Index c = 0; c < source.size; c += kAmxRows) {
        const Index left = source.size - c;
        const __mmask16 mask = left >= kAmxRows ? ~__mmask16{0} : static_cast<__mmask16>((1u << left) - 1);
        const auto load = [&](Index row) HEADRACE_ATTR {
          return row < end ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, data + source.at(row) + c))
                           : _mm512_setzero_si512();
        };
        const __m512i pairs = _mm512_or_si512(load(r), _mm512_slli_epi32(load(r + 1), 16));
        seen.see(pairs);
        _mm512_storeu_si512(&at(r, c), pairs);
      }
    }
    return seen.value();
  }

  void scale(float factor) {
    for (Index r = 0; r < source.count; ++r) {
      for (Index c = 0; c < source.size; ++c) {
        at(r, c) = BFloat16(static_cast<double>(at(r, c)) * static_cast<double>(factor));
      }
    }
  }

  void isolate_bad() {
    isolate_bad_bfloat16(*this, [this](Index r) {
      for (Index c = 0; c < source.size; ++c) at(r, c) = BFloat16();
    });
  }
};

// amx_score_product in double, slowly.
HWY_NOINLINE inline void amx_score_product_wide(const GroupColumns* groups, Index group_count, Index depth,
                                                const BFloat16* left, const BFloat16* right, float* scores) {
  const Index depth_tiles = ceil_div(depth, kAmxDepth);
  for (Index g = 0; g < group_count; ++g) {
    for (Index r = 0; r < groups[g].rows; ++r) {
      for (Index c = groups[g].begin; c < groups[g].end; ++c) {
        double sum = 0.0;
        for (Index k = 0; k < depth; ++k) {
          const Index tile = k / kAmxDepth, in_tile = k % kAmxDepth;
          sum += static_cast<double>(left[(g * depth_tiles + tile) * kAmxTile + r * kAmxDepth + in_tile]) *
                 static_cast<double>(right[(c / kAmxRows * depth_tiles + tile) * kAmxTile + in_tile / 2 * kAmxDepth +
                                           c % kAmxRows * 2 + in_tile % 2]);
        }
        scores[(g * kAmxRows + r) * tile_stride + c] = static_cast<float>(sum);
      }
    }
  }
}

// scores[r][c] = left row r . right row c for the columns that each group of 16 rows, at most 3, needs. One right tile
// is loaded for all groups: 4 loads for 3 products, which take longer.
HWY_NOINLINE inline void amx_score_product(const GroupColumns* groups, Index group_count, Index keys, Index depth,
                                           const BFloat16* left, const BFloat16* right, float* scores) {
  const Index depth_tiles = ceil_div(depth, kAmxDepth);
  const Index group = depth_tiles * kAmxTile;
  constexpr int stride = kAmxDepth * sizeof(BFloat16), score_stride = tile_stride * sizeof(float);
  for (Index c = 0; c < keys; c += kAmxRows) {
    const auto needed = [&](Index g) { return g < group_count && c < groups[g].end && c + kAmxRows > groups[g].begin; };
    const bool needed0 = needed(0), needed1 = needed(1), needed2 = needed(2);
    if (!needed0 && !needed1 && !needed2) continue;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    const BFloat16* b = right + c / kAmxRows * group;
    const BFloat16* a = left;
    for (Index k = 0; k < depth_tiles; ++k, a += kAmxTile, b += kAmxTile) {
      _tile_loadd(6, b, stride);
      if (needed0) {
        _tile_loadd(3, a, stride);
        _tile_dpbf16ps(0, 3, 6);
      }
      if (needed1) {
        _tile_loadd(4, a + group, stride);
        _tile_dpbf16ps(1, 4, 6);
      }
      if (needed2) {
        _tile_loadd(5, a + 2 * group, stride);
        _tile_dpbf16ps(2, 5, 6);
      }
    }
    float* target = scores + c;
    if (needed0) _tile_stored(0, target, score_stride);
    if (needed1) _tile_stored(1, target + kAmxRows * tile_stride, score_stride);
    if (needed2) _tile_stored(2, target + 2 * kAmxRows * tile_stride, score_stride);
  }
}

// The transpose of rows of weights of a tile, rounded to bfloat16: element (r, c) at transposed[c * transposed_stride +
// r]. Rows to the next multiple of 32 are zeros; columns to the next multiple of 16 are written too.
inline constexpr Index transposed_stride = (tile_q + kAmxDepth - 1) / kAmxDepth * kAmxDepth;
HWY_NOINLINE inline void amx_round_transposed(const float* weights, Index rows, Index columns, BFloat16* transposed) {
  for (Index c = 0; c < columns; c += kAmxRows) {
    for (Index r = 0; r < rows; r += kAmxDepth) {
      __m512i pairs[16];
      HEADRACE_UNROLL
      for (int i = 0; i < 16; ++i) {
        const float* const first = weights + (r + 2 * i) * tile_stride + c;
        pairs[i] = r + 2 * i < rows ? round_pairs(first, r + 2 * i + 1 < rows ? first + tile_stride : nullptr)
                                    : _mm512_setzero_si512();
      }
      transpose16(pairs);
      HEADRACE_UNROLL
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(transposed + (c + i) * transposed_stride + r, pairs[i]);
    }
  }
}

// target[row] += sum over columns c of weights[row][c] * v row c, for the columns that each group of 16 rows needs.
// Rows of a target always are whole groups.
HWY_NOINLINE inline void amx_add_product(const GroupColumns* groups, Index group_count, const BFloat16* weights,
                                         Index weights_stride, const AmxRightRows& v, float* target,
                                         Index target_stride) {
  const Index column_tiles = v.column_tiles(), row_stride = weights_stride * static_cast<Index>(sizeof(BFloat16));
  constexpr int stride = kAmxDepth * sizeof(BFloat16);
  const Index out_stride = target_stride * static_cast<Index>(sizeof(float));
  Range needed{tile_k, 0};
  for (Index g = 0; g < group_count; ++g) {
    if (groups[g].begin >= groups[g].end) continue;
    needed = {std::min(needed.begin, groups[g].begin / kAmxDepth),
              std::max(needed.end, ceil_div(groups[g].end, kAmxDepth))};
  }
  if (needed.empty()) return;
  for (Index column = 0; column < column_tiles; ++column) {
    float* out = target + column * kAmxRows;
    _tile_loadd(0, out, out_stride);
    if (group_count > 1) _tile_loadd(1, out + kAmxRows * target_stride, out_stride);
    if (group_count > 2) _tile_loadd(2, out + 2 * kAmxRows * target_stride, out_stride);
    for (Index k = needed.begin; k < needed.end; ++k) {
      const auto sees = [&](Index g) {
        return g < group_count && k * kAmxDepth < groups[g].end && (k + 1) * kAmxDepth > groups[g].begin;
      };
      const BFloat16* a = weights + k * kAmxDepth;
      _tile_loadd(6, v.tiles + (k * column_tiles + column) * kAmxTile, stride);
      if (sees(0)) {
        _tile_loadd(3, a, row_stride);
        _tile_dpbf16ps(0, 3, 6);
      }
      if (sees(1)) {
        _tile_loadd(4, a + kAmxRows * weights_stride, row_stride);
        _tile_dpbf16ps(1, 4, 6);
      }
      if (sees(2)) {
        _tile_loadd(5, a + 2 * kAmxRows * weights_stride, row_stride);
        _tile_dpbf16ps(2, 5, 6);
      }
    }
    _tile_stored(0, out, out_stride);
    if (group_count > 1) _tile_stored(1, out + kAmxRows * target_stride, out_stride);
    if (group_count > 2) _tile_stored(2, out + 2 * kAmxRows * target_stride, out_stride);
  }
}

}  // namespace headrace::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET

#endif  // include guard
