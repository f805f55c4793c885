// The products of few queries with many keys, where reading keys and values is all that costs: they are read once, from
// the caller's memory, and not packed.
#if defined(HEADRACE_CPU_SIMD_STREAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADRACE_CPU_SIMD_STREAM_INL_H_
#undef HEADRACE_CPU_SIMD_STREAM_INL_H_
#else
#define HEADRACE_CPU_SIMD_STREAM_INL_H_
#endif

#include <algorithm>
#include <type_traits>

#include "cpu/kernels.hpp"
#include "cpu/simd/attributes-inl.h"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/pack-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/tile_config.hpp"
#include "hwy/highway.h"

HEADRACE_BEFORE_NAMESPACE();
namespace headrace::cpu::HWY_NAMESPACE {

// Asks for the row that comes stream_ahead rows later, since no hardware prefetcher follows rows that lie apart; and
// for a row's worth of what is to be in the caches long after.
template <typename T>
HWY_INLINE void prefetch_row(const Rows& rows, const T* data, Index r) {
  constexpr Index line = 64 / sizeof(T);
  const T* const row = data + rows.at(std::min(r + stream_ahead, rows.count - 1));
  for (Index c = 0; c < rows.size; c += line) __builtin_prefetch(row + c, 0, 3);
  if (rows.ahead == nullptr) return;
  const T* const ahead = static_cast<const T*>(rows.ahead) + r * rows.size;
  for (Index c = 0; c < rows.size; c += line) __builtin_prefetch(ahead + c, 0, 2);
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

// scores[r][j] = row r of left, `ld` apart, times row j of the keys, for kRows rows and up to four keys from j on. The
// sum of more than 64 elements is cut into pieces, like those of score_product.
template <int kRows, typename C, typename T>
HWY_INLINE void stream_dots(const C* HWY_RESTRICT left, Index ld, const Rows& keys, const T* data, Index j, C* scores,
                            Magnitude<C>& magnitude) {
  const Wide<C> d;
  const Index n = lanes<C>();
  const T* row[4];
  for (Index i = 0; i < 4; ++i) row[i] = data + keys.at(std::min(j + i, keys.count - 1));
  hn::Vec<Wide<C>> total[kRows][4], sum[kRows][4];
  HEADRACE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    HEADRACE_UNROLL
    for (int i = 0; i < 4; ++i) total[r][i] = sum[r][i] = hn::Zero(d);
  }
  for (Index c = 0; c < keys.size; c += n) {
    HEADRACE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const auto k = load_widened(d, row[i] + c);
      magnitude.see(k);
      HEADRACE_UNROLL
      for (int r = 0; r < kRows; ++r) sum[r][i] = hn::MulAdd(hn::LoadU(d, left + r * ld + c), k, sum[r][i]);
    }
    if ((c + n) % 256 != 0) continue;
    HEADRACE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      HEADRACE_UNROLL
      for (int i = 0; i < 4; ++i) {
        total[r][i] = hn::Add(total[r][i], sum[r][i]);
        sum[r][i] = hn::Zero(d);
      }
    }
  }
  HEADRACE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    HEADRACE_UNROLL
    for (int i = 0; i < 4; ++i) sum[r][i] = hn::Add(total[r][i], sum[r][i]);
    sum_lanes(sum[r], scores + r * tile_stride + j);
  }
}

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

// scores[r][j] = row r of left . key j, for the columns that each group of rows needs. Returns the largest magnitude of
// the keys that it read; NaN may be passed over.
template <typename C>
HWY_NOINLINE C stream_scores(const GroupColumns* groups, Index group_count, const C* left, Index ld, const Rows& keys,
                             C* scores) {
  Magnitude<C> magnitude;
  with_elements<C>(keys.data, keys.dtype, [&](auto* data) HEADRACE_ATTR {
    for (Index g = 0; g < group_count; ++g) {
      for (Index j = groups[g].begin / 4 * 4; j < groups[g].end; j += 4) {
        for (Index i = 0; i < 4; ++i) prefetch_row(keys, data, j + i);
        for_row_blocks(groups[g].rows, [&]<int kRows>(Index r, std::integral_constant<int, kRows>) HEADRACE_ATTR {
          const Index row = g * kBlockRows + r;
          stream_dots<kRows>(left + row * ld, ld, keys, data, j, scores + row * tile_stride, magnitude);
        });
      }
    }
  });
  return magnitude.value();
}

// The same in double, slowly.
template <typename C>
HWY_NOINLINE void stream_scores_wide(const GroupColumns* groups, Index group_count, const C* left, Index ld,
                                     const Rows& keys, C* scores) {
  for (Index g = 0; g < group_count; ++g) {
    for (Index r = g * kBlockRows; r < g * kBlockRows + groups[g].rows; ++r) {
      for (Index j = groups[g].begin; j < groups[g].end; ++j) {
        double sum = 0.0;
        for (Index c = 0; c < keys.size; ++c) {
          sum += static_cast<double>(left[r * ld + c]) * load_element(keys.data, keys.dtype, keys.at(j) + c);
        }
        scores[r * tile_stride + j] = static_cast<C>(sum);
      }
    }
  }
}

// Values in the caller's memory; see RightRows. pack only looks at them, which brings them into the L2 cache.
template <typename C>
struct StreamedRows : HiddenRows<C> {
  using HiddenRows<C>::source;

  StreamedRows() = default;
  StreamedRows(const Rows& rows, C* /*memory*/, BadRows* bad_rows) : HiddenRows<C>{rows, bad_rows} {}

  // Finds the rows in [begin, end) that are not finite. Returns the largest magnitude; NaN may be passed over.
  HWY_NOINLINE C pack(Index begin, Index end) {
    const Wide<C> d;
    const Index n = lanes<C>();
    Magnitude<C> magnitude;
    with_elements<C>(source.data, source.dtype, [&](auto* data) HEADRACE_ATTR {
      for (Index r = begin; r < end; ++r) {
        prefetch_row(source, data, r);
        auto finite = hn::Zero(d);  // x * 0 is 0 for finite x alone
        for (Index c = 0; c < source.size; c += n) {
          const auto x = load_widened(d, data + source.at(r) + c);
          magnitude.see(x);
          finite = hn::MulAdd(x, hn::Zero(d), finite);
        }
        if (!hn::AllTrue(d, hn::Eq(finite, hn::Zero(d)))) this->add(r);
      }
    });
    return magnitude.value();
  }
  void scale(C /*factor*/) {}  // stream_values does that
  void isolate_bad() {}        // pack has
};

// target[row] += sum over columns c in [begin, end) of scores[row][c] * factor * value row c, for kRows rows and kVecs
// vectors from column `column` on.
template <int kRows, int kVecs, typename C, typename T>
HWY_INLINE void stream_sum(const C* scores, Index begin, Index end, const Rows& values, const T* data, C factor,
                           Index column, C* target, Index ld) {
  const Wide<C> d;
  const Index n = lanes<C>();
  const auto scale = hn::Set(d, factor);
  hn::Vec<Wide<C>> sum[kRows][kVecs];
  HEADRACE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    HEADRACE_UNROLL
    for (int v = 0; v < kVecs; ++v) sum[r][v] = hn::Zero(d);
  }
  for (Index j = begin; j < end; ++j) {
    const T* const row = data + values.at(j) + column;
    HEADRACE_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const auto value = hn::Mul(scale, load_widened(d, row + v * n));
      HEADRACE_UNROLL
      for (int r = 0; r < kRows; ++r) sum[r][v] = hn::MulAdd(hn::Set(d, scores[r * tile_stride + j]), value, sum[r][v]);
    }
  }
  HEADRACE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    HEADRACE_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      C* const out = target + r * ld + column + v * n;
      hn::StoreU(hn::Add(hn::LoadU(d, out), sum[r][v]), d, out);
    }
  }
}

// target[row] += sum over columns c of scores[row][c] * factor * value row c, for the columns that each group of rows
// needs, but for bad rows.
template <typename C>
HWY_NOINLINE void stream_values(const GroupColumns* groups, Index group_count, const C* scores,
                                const StreamedRows<C>& values, C factor, C* target, Index ld) {
  constexpr Index longest_chain = 128;  // as in add_tile_product
  const Rows& source = values.source;
  const Index n = lanes<C>();
  with_elements<C>(source.data, source.dtype, [&](auto* data) HEADRACE_ATTR {
    const auto run = [&](Index g, Index begin, Index end) HEADRACE_ATTR {
      for_row_blocks(groups[g].rows, [&]<int kRows>(Index r, std::integral_constant<int, kRows>) HEADRACE_ATTR {
        const Index row = g * kBlockRows + r;
        const C* const s = scores + row * tile_stride;
        C* const out = target + row * ld;
        Index column = 0;
        for (; column + 4 * n <= source.size; column += 4 * n)
          stream_sum<kRows, 4>(s, begin, end, source, data, factor, column, out, ld);
        for (; column < source.size; column += n)
          stream_sum<kRows, 1>(s, begin, end, source, data, factor, column, out, ld);
      });
    };
    for (Index g = 0; g < group_count; ++g) {
      Index bad = 0;
      for (Index begin = groups[g].begin; begin < groups[g].end;) {
        while (bad < values.bad->count && values.bad->rows[bad] < begin) ++bad;
        const Index next_bad = bad < values.bad->count ? values.bad->rows[bad] : groups[g].end;
        const Index end = std::min({groups[g].end, next_bad, begin / longest_chain * longest_chain + longest_chain});
        if (begin < end) run(g, begin, end);
        begin = end == next_bad ? end + 1 : end;
      }
    }
  });
}

}  // namespace headrace::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
