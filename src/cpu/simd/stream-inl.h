// The products of few queries with many keys, where reading keys and values is all that costs: they are read once, from
// the caller's memory, and not packed.
#if defined(HEADRACE_CPU_SIMD_STREAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADRACE_CPU_SIMD_STREAM_INL_H_
#undef HEADRACE_CPU_SIMD_STREAM_INL_H_
#else
#define HEADRACE_CPU_SIMD_STREAM_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <span>
#include <type_traits>

#include "cpu/kernels.hpp"
#include "cpu/simd/attributes-inl.h"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/pack-inl.h"
#include "cpu/simd/pairs-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/tile_config.hpp"
#include "hwy/highway.h"

HEADRACE_BEFORE_NAMESPACE();
namespace headrace::cpu::HWY_NAMESPACE {

// All query rows of a key-value head, at most stream_rows, against a key tile.
template <typename C>
struct StreamTile {
  GroupColumns columns;         // that they see
  const C* q = nullptr;         // row r at r * k.size
  C* scores = nullptr;          // a row every tile_stride
  C* values = nullptr;          // row r at r * v.size: sums of values
  BFloat16* weights = nullptr;  // the scores rounded, a row every weight_stride, for products of pairs
  Rows k, v;
};

// Asks for the row that is read stream_ahead rows after row r, which behind the last is one of `next`: no hardware
// prefetcher follows as many rows at once as are read. Into the L2 cache: more lines can be under way to it than to the
// L1 cache, which doubles the rate (Zen 4).
template <typename T>
HWY_INLINE void prefetch_row(const Rows& rows, const Rows& next, const void* next_data, Index first_next, const T* data,
                             Index r) {
  constexpr Index line = 64 / sizeof(T);
  const Index later = r + stream_ahead;
  const T* const row = later < rows.count ? data + rows.at(later)
                                          : static_cast<const T*>(next_data) + next.at(first_next + later - rows.count);
  for (Index c = 0; c < rows.size; c += line) __builtin_prefetch(row + c, 0, 2);
}

// The sums of the lanes of four vectors each.
template <class D>
HWY_INLINE void sum_blocks(D d, hn::Vec<D> v, hn::TFromD<D>* sums) {
  if constexpr (hn::MaxLanes(D()) * sizeof(hn::TFromD<D>) == 16) {
    hn::StoreU(v, d, sums);
  } else {
    const hn::Half<D> half;
    sum_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)), sums);
  }
}
HWY_INLINE void sum_lanes(const hn::Vec<Wide<float>> (&v)[4], float* sums) {
  const Wide<float> d;
  const hn::Repartition<double, Wide<float>> pairs;
  const auto add_halves = [&](auto a, auto b) HEADRACE_ATTR {
    return hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  };
  const auto v01 = hn::BitCast(pairs, add_halves(v[0], v[1])), v23 = hn::BitCast(pairs, add_halves(v[2], v[3]));
  sum_blocks(d,
             hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, v01, v23)),
                     hn::BitCast(d, hn::InterleaveUpper(pairs, v01, v23))),
             sums);
}
HWY_INLINE void sum_lanes(const hn::Vec<Wide<double>> (&v)[4], double* sums) {
  for (int i = 0; i < 4; ++i) sums[i] = hn::GetLane(hn::SumOfLanes(Wide<double>(), v[i]));
}

// scores[r][j] = row r of left, one behind the other, times row j of the keys, for kRows rows and up to four keys from
// j on. Chains are no longer than those of score_product.
template <int kRows, typename C, typename T>
HWY_INLINE void stream_dots(const C* HWY_RESTRICT left, const Rows& keys, const T* data, Index j, C* scores) {
  constexpr Index piece = 16 * hn::MaxLanes(Wide<C>());
  const Wide<C> d;
  const Index n = lanes<C>(), size = keys.size;
  const T* row[4];
  for (Index i = 0; i < 4; ++i) row[i] = data + keys.at(std::min(j + i, keys.count - 1));
  for (Index first = 0; first < size; first += piece) {
    hn::Vec<Wide<C>> sum[kRows][4];
    HEADRACE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      HEADRACE_UNROLL
      for (int i = 0; i < 4; ++i) sum[r][i] = hn::Zero(d);
    }
    for (Index c = first; c < std::min(size, first + piece); c += n) {
      HEADRACE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const auto k = load_widened(d, row[i] + c);
        HEADRACE_UNROLL
        for (int r = 0; r < kRows; ++r) sum[r][i] = hn::MulAdd(hn::LoadU(d, left + r * size + c), k, sum[r][i]);
      }
    }
    HEADRACE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      C* const target = scores + r * tile_stride + j;
      if (first == 0) {
        sum_lanes(sum[r], target);
      } else {
        C more[4];
        sum_lanes(sum[r], more);
        for (int i = 0; i < 4; ++i) target[i] += more[i];
      }
    }
  }
}

// target[r] = what it was, or 0 at the first call, + sum over columns c in [begin, end) of scores[r][c] * value row c,
// for kRows rows and kVecs vectors from column `column` on.
template <int kRows, int kVecs, typename C, typename T>
HWY_INLINE void stream_sum(const C* scores, Index begin, Index end, const Rows& values, const T* data, bool first,
                           Index column, C* target) {
  const Wide<C> d;
  const Index n = lanes<C>(), size = values.size;
  hn::Vec<Wide<C>> sum[kRows][kVecs];
  HEADRACE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    HEADRACE_UNROLL
    for (int v = 0; v < kVecs; ++v) sum[r][v] = first ? hn::Zero(d) : hn::LoadU(d, target + r * size + column + v * n);
  }
  for (Index j = begin; j < end; ++j) {
    const T* const row = data + values.at(j) + column;
    HEADRACE_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const auto value = load_widened(d, row + v * n);
      HEADRACE_UNROLL
      for (int r = 0; r < kRows; ++r) sum[r][v] = hn::MulAdd(hn::Set(d, scores[r * tile_stride + j]), value, sum[r][v]);
    }
  }
  HEADRACE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    HEADRACE_UNROLL
    for (int v = 0; v < kVecs; ++v) hn::StoreU(sum[r][v], d, target + r * size + column + v * n);
  }
}

// The products with keys and values in vectors of C.
template <typename C>
struct StreamVectors {
  template <typename F>
  static HWY_INLINE void with_data(const Rows& rows, F f) {
    with_elements<C>(rows.data, rows.dtype, f);
  }

  // A query row of C, as the products read it.
  static void pack_query(const C* row, Index size, C* q, Index r) { std::copy_n(row, size, q + r * size); }
  static double query(const StreamTile<C>& tile, Index r, Index c) {
    return static_cast<double>(tile.q[r * tile.k.size + c]);
  }
  static void round(const StreamTile<C>& /*tile*/) {}

  template <int kRows, typename T>
  static HWY_INLINE void dots(const StreamTile<C>& tile, Index r, const T* data, Index j) {
    stream_dots<kRows>(tile.q + r * tile.k.size, tile.k, data, j, tile.scores + r * tile_stride);
  }

  template <int kRows, typename T>
  static HWY_INLINE void sum(const StreamTile<C>& tile, Index r, Index begin, Index end, const T* data, bool first,
                             bool /*last*/) {
    const Index n = lanes<C>();
    const C* const s = tile.scores + r * tile_stride;
    C* const target = tile.values + r * tile.v.size;
    Index column = 0;
    for (; column + 4 * n <= tile.v.size; column += 4 * n)
      stream_sum<kRows, 4>(s, begin, end, tile.v, data, first, column, target);
    for (; column < tile.v.size; column += n) stream_sum<kRows, 1>(s, begin, end, tile.v, data, first, column, target);
  }
};

#if HWY_TARGET == HWY_AVX3_DL
// The same with pairs of bfloat16, for rows of a multiple of 32 elements: the queries lie row by row, as they came, and
// the weights are rounded.
struct StreamPairs {
  template <typename F>
  static HWY_INLINE void with_data(const Rows& rows, F f) {
    f(static_cast<const BFloat16*>(rows.data));
  }

  static void pack_query(const float* row, Index size, float* q, Index r) {
    narrow_row(row, 1.0f, size, reinterpret_cast<BFloat16*>(q) + r * size);
  }
  static double query(const StreamTile<float>& tile, Index r, Index c) {
    return static_cast<double>(reinterpret_cast<const BFloat16*>(tile.q)[r * tile.k.size + c]);
  }
  static void round(const StreamTile<float>& tile) {
    for (Index r = 0; r < tile.columns.rows; ++r)
      round_weights(tile.scores + r * tile_stride, tile.columns.begin, tile.columns.end,
                    tile.weights + r * weight_stride);
  }

  template <int kRows>
  static HWY_INLINE void dots(const StreamTile<float>& tile, Index r, const BFloat16* data, Index j) {
    const Index size = tile.k.size;
    const auto* const left = reinterpret_cast<const BFloat16*>(tile.q) + r * size;
    const BFloat16* row[4];
    for (Index i = 0; i < 4; ++i) row[i] = data + tile.k.at(std::min(j + i, tile.k.count - 1));
    hn::Vec<Wide<float>> sum[kRows][4];
    HEADRACE_UNROLL
    for (int q = 0; q < kRows; ++q) {
      HEADRACE_UNROLL
      for (int i = 0; i < 4; ++i) sum[q][i] = hn::Zero(Wide<float>());
    }
    for (Index c = 0; c < size; c += kVectorOf16) {
      HEADRACE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const __m512bh k = Unit<Pair>::load(reinterpret_cast<const Pair*>(row[i] + c));
        HEADRACE_UNROLL
        for (int q = 0; q < kRows; ++q) {
          const __m512bh from_left = Unit<Pair>::load(reinterpret_cast<const Pair*>(left + q * size + c));
          sum[q][i] = Unit<Pair>::multiply_add(from_left, k, sum[q][i]);
        }
      }
    }
    HEADRACE_UNROLL
    for (int q = 0; q < kRows; ++q) sum_lanes(sum[q], tile.scores + (r + q) * tile_stride + j);
  }

  template <int kRows>
  static HWY_INLINE void sum(const StreamTile<float>& tile, Index r, Index begin, Index end, const BFloat16* data,
                             bool first, bool last) {
    Index column = 0;
    for (; column + 2 * kVectorOf16 <= tile.v.size; column += 2 * kVectorOf16)
      sum_columns<kRows, 2>(tile, r, begin, end, data + column, first, last, tile.values + r * tile.v.size + column);
    if (column < tile.v.size)
      sum_columns<kRows, 1>(tile, r, begin, end, data + column, first, last, tile.values + r * tile.v.size + column);
  }

 private:
  // For kVecs times 32 columns. Two rows of values are interleaved as the processor does it, in blocks of four elements
  // of each: that is the order of the sums until the last call.
  template <int kRows, int kVecs>
  static HWY_INLINE void sum_columns(const StreamTile<float>& tile, Index r, Index begin, Index end,
                                     const BFloat16* data, bool first, bool last, float* target) {
    const Wide<float> d;
    const Index size = tile.v.size;
    hn::Vec<Wide<float>> sums[kRows][kVecs][2];
    HEADRACE_UNROLL
    for (int q = 0; q < kRows; ++q) {
      HEADRACE_UNROLL
      for (int v = 0; v < 2 * kVecs; ++v)
        sums[q][v / 2][v % 2] = first ? hn::Zero(d) : hn::LoadU(d, target + q * size + v * 16);
    }
    for (Index j = begin; j < end; j += 2) {
      const BFloat16 *const row0 = data + tile.v.at(j), *const row1 = j + 1 < end ? data + tile.v.at(j + 1) : row0;
      HEADRACE_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        const __m512i x = _mm512_loadu_si512(row0 + v * kVectorOf16), y = _mm512_loadu_si512(row1 + v * kVectorOf16);
        const __m512i low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
        HEADRACE_UNROLL
        for (int q = 0; q < kRows; ++q) {
          const auto weight =
              Unit<Pair>::fill(reinterpret_cast<const Pair*>(tile.weights + (r + q) * weight_stride + j));
          sums[q][v][0] = Unit<Pair>::multiply_add(weight, Unit<Pair>::of_bits(low), sums[q][v][0]);
          sums[q][v][1] = Unit<Pair>::multiply_add(weight, Unit<Pair>::of_bits(high), sums[q][v][1]);
        }
      }
    }
    HEADRACE_UNROLL
    for (int q = 0; q < kRows; ++q) {
      HEADRACE_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        __m512 low = sums[q][v][0].raw, high = sums[q][v][1].raw;
        if (last) {
          const __m512i front = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
          const __m512i back = _mm512_add_epi32(front, _mm512_set1_epi32(8));
          const __m512 ordered = _mm512_permutex2var_ps(low, front, high);
          high = _mm512_permutex2var_ps(low, back, high);
          low = ordered;
        }
        _mm512_storeu_ps(target + q * size + v * kVectorOf16, low);
        _mm512_storeu_ps(target + q * size + v * kVectorOf16 + 16, high);
      }
    }
  }
};
#endif

// Calls f(first, integral_constant) for blocks of 4, 2 and 1 of `rows` rows.
template <typename F>
HWY_INLINE void for_row_blocks(Index rows, F f) {
  Index r = 0;
  for (; r + 4 <= rows; r += 4) f(r, std::integral_constant<int, 4>());
  if (rows - r >= 2) {
    f(r, std::integral_constant<int, 2>());
    r += 2;
  }
  if (r < rows) f(r, std::integral_constant<int, 1>());
}

// Columns that any of the tiles sees.
template <typename C>
HWY_INLINE Range columns_of(std::span<const StreamTile<C>> tiles) {
  Range all{tile_k, 0};
  for (const StreamTile<C>& tile : tiles) {
    if (tile.columns.begin < tile.columns.end)
      all = {std::min(all.begin, tile.columns.begin), std::max(all.end, tile.columns.end)};
  }
  return all;
}

// scores[r][j] = q row r . key j for the columns of each tile: a few keys of all tiles in turn, which is how they lie
// in memory.
template <class Kernel, typename C>
HWY_NOINLINE void stream_scores(std::span<const StreamTile<C>> tiles) {
  constexpr Index together = 4;
  const Range all = columns_of(tiles);
  Kernel::with_data(tiles[0].k, [&](auto* data) HEADRACE_ATTR {
    for (Index j = all.begin / together * together; j < all.end; j += together) {
      for (const StreamTile<C>& tile : tiles) {
        if (j + together <= tile.columns.begin || j >= tile.columns.end) continue;
        for (Index i = 0; i < together; ++i) prefetch_row(tile.k, tile.v, tile.v.data, 0, data, j + i);
        for_row_blocks(tile.columns.rows, [&]<int kRows>(Index r, std::integral_constant<int, kRows>)
                                              HEADRACE_ATTR { Kernel::template dots<kRows>(tile, r, data, j); });
      }
    }
  });
}

// Scores that are not finite once more in double: a partial sum may have overflowed where the score does not.
template <class Kernel, typename C>
HWY_NOINLINE void stream_scores_wide(const StreamTile<C>& tile) {
  const auto [rows, begin, end] = tile.columns;
  for (Index r = 0; r < rows; ++r) {
    C* const scores = tile.scores + r * tile_stride;
    if (all_finite(scores + begin, end - begin)) continue;
    for (Index j = begin; j < end; ++j) {
      if (std::isfinite(scores[j])) continue;
      double sum = 0.0;
      for (Index c = 0; c < tile.k.size; ++c) {
        sum += Kernel::query(tile, r, c) * load_element(tile.k.data, tile.k.dtype, tile.k.at(j) + c);
      }
      scores[j] = static_cast<C>(sum);
    }
  }
}

// values[r] = sum over columns c in [begin, end) of scores[r][c] * value row c for the columns that each tile sees; a
// chain of multiply-adds.
template <class Kernel, typename C>
HWY_NOINLINE void stream_values(std::span<const StreamTile<C>> tiles, Range columns) {
  constexpr Index together = 8;
  Kernel::with_data(tiles[0].v, [&](auto* data) HEADRACE_ATTR {
    for (Index j = columns.begin; j < columns.end; j += together) {
      for (const StreamTile<C>& tile : tiles) {
        const Index first = std::max(columns.begin, tile.columns.begin);  // of the tile's columns here
        const Index last = std::min(columns.end, tile.columns.end);
        const Index begin = std::max(j, first), end = std::min(j + together, last);
        if (begin >= end) continue;
        for (Index r = begin; r < end; ++r) prefetch_row(tile.v, tile.k, tile.k.data, tile.k.count, data, r);
        for_row_blocks(tile.columns.rows, [&]<int kRows>(Index r, std::integral_constant<int, kRows>) HEADRACE_ATTR {
          Kernel::template sum<kRows>(tile, r, begin, end, data, begin == first, end == last);
        });
      }
    }
  });
}

// Whether all of `count` numbers, whole vectors of them, are smaller than the limit; NaN is not.
template <typename C>
HWY_INLINE bool all_below(const C* numbers, Index count, C limit) {
  const Wide<C> d;
  auto below = hn::Lt(hn::Zero(d), hn::Set(d, limit));
  for (Index c = 0; c < count; c += lanes<C>())
    below = hn::And(below, hn::Lt(hn::Abs(hn::LoadU(d, numbers + c)), hn::Set(d, limit)));
  return hn::AllTrue(d, below);
}

}  // namespace headrace::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
