// Pieces of a tile's work that the forward and the backward pass share: which columns a group of rows
// needs, the scores, and right operands that hidden NaNs cannot leak from.
#if defined(HEADRACE_CPU_SIMD_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADRACE_CPU_SIMD_TILE_INL_H_
#undef HEADRACE_CPU_SIMD_TILE_INL_H_
#else
#define HEADRACE_CPU_SIMD_TILE_INL_H_
#endif

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cpu/kernels.hpp"
#include "cpu/simd/attributes-inl.h"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/pack-inl.h"
#include "cpu/tile_config.hpp"
#include "hwy/highway.h"

HEADRACE_BEFORE_NAMESPACE();
namespace headrace::cpu::HWY_NAMESPACE {

inline constexpr Index kMaxGroups = (tile_q + kBlockRows - 1) / kBlockRows;

template <typename C>
HWY_INLINE Index panel_width() {
  return kBlockVecs * lanes<C>();
}

HWY_INLINE Index round_up(Index value, Index multiple) { return (value + multiple - 1) / multiple * multiple; }

// Columns [begin, end) of the tile that the group may see. begin is a multiple of the panel width.
struct GroupColumns {
  Index rows = 0;
  Index begin = 0, end = 0;
};

template <typename C, Index kRows = kBlockRows>
HWY_INLINE GroupColumns group_columns(const Visibility& vis, TileKind kind, const QueryTile& tile, Index group,
                                      Index j0, Index keys) {
  GroupColumns columns{.rows = std::min<Index>(kRows, tile.size() - group * kRows), .begin = 0, .end = keys};
  if (kind != TileKind::edge) return columns;
  const bool one_head = tile.heads == 1;
  const Index first = one_head ? tile.row + group * kRows : tile.row;
  const Range seen = vis.keys_of_rows({first, first + (one_head ? columns.rows : tile.rows)});
  columns.end = std::clamp<Index>(seen.end - j0, 0, keys);
  columns.begin = std::clamp<Index>(seen.begin - j0, 0, columns.end) / panel_width<C>() * panel_width<C>();
  return columns;
}

// Kind of a tile for all heads of the query tile together (block masks may differ by head).
HWY_INLINE TileKind classify(const Problem& p, const Buffers& buffers, Index b, const QueryTile& tile, Range keys) {
  const Range rows{tile.row, tile.row + tile.rows};
  const TileKind kind = visibility(p, buffers, b, tile.head).classify(rows, keys);
  if (!p.has_block_mask || p.block_mask.head == 0) return kind;
  for (Index h = tile.head + 1; h < tile.head + tile.heads; ++h) {
    if (visibility(p, buffers, b, h).classify(rows, keys) != kind) return TileKind::edge;
  }
  return kind;
}

// Whether a partial sum of products of finite operands could overflow where the whole sum does not.
template <typename C>
HWY_INLINE bool may_overflow(C left_magnitude, C right_magnitude, Index depth) {
  if constexpr (std::is_same_v<C, double>) return false;
  const double bound =
      static_cast<double>(left_magnitude) * static_cast<double>(right_magnitude) * static_cast<double>(depth);
  return bound > 1e38 && bound <= std::numeric_limits<double>::max();
}

// score_product in double, slowly.
template <typename C>
HWY_NOINLINE void score_product_wide(const GroupColumns* groups, Index group_count, Index depth, const C* left,
                                     const C* right, C* scores) {
  const Index width = panel_width<C>();
  for (Index g = 0; g < group_count; ++g) {
    for (Index r = 0; r < groups[g].rows; ++r) {
      for (Index c = groups[g].begin; c < round_up(groups[g].end, width); ++c) {
        double sum = 0.0;
        for (Index k = 0; k < depth; ++k) {
          sum += static_cast<double>(left[(g * depth + k) * kBlockRows + r]) *
                 static_cast<double>(right[c / width * width * depth + k * width + c % width]);
        }
        scores[(g * kBlockRows + r) * tile_stride + c] = static_cast<C>(sum);
      }
    }
  }
}

// Lane by lane, maxima become the larger of themselves and a panel of scores; NaN may be passed over.
template <typename C>
HWY_INLINE void see_maxima(Index rows, const C* HWY_RESTRICT scores, C* HWY_RESTRICT maxima) {
  const Wide<C> d;
  const Index n = lanes<C>();
  for (Index r = 0; r < rows; ++r) {
    const C* const s = scores + r * tile_stride;
    auto largest = hn::LoadU(d, maxima + r * n);
    HEADRACE_UNROLL
    for (int v = 0; v < kBlockVecs; ++v) largest = hn::Max(hn::LoadU(d, s + v * n), largest);
    hn::StoreU(largest, d, maxima + r * n);
  }
}

// scores[r][c] = left row r . right row c, for the columns that each group needs; depth: units of a row. left:
// pack_transposed by kBlockRows; right: pack_transposed by the panel width. One panel stays in the L1 cache for all
// rows. Products of more than 64 units are summed in pieces: where all products have one sign, the error of a single
// chain grows beyond what is promised of lse.
template <typename T, typename C = typename Unit<T>::Sum>
HWY_NOINLINE void score_product(const GroupColumns* groups, Index group_count, Index keys, Index depth, const T* left,
                                const T* right, C* scores, std::type_identity_t<C>* maxima) {
  constexpr Index piece = 64;
  const Index width = panel_width<C>();
  for (Index c = 0; c < keys; c += width) {
    for (Index g = 0; g < group_count; ++g) {
      if (c + width <= groups[g].begin || c >= groups[g].end) continue;
      const T* a = left + g * kBlockRows * depth;
      const T* b = right + c * depth;
      C* target = scores + g * kBlockRows * tile_stride + c;
      gemm<Left::packed, Into::store>(groups[g].rows, kBlockVecs, std::min(piece, depth), a, b, target, tile_stride);
      for (Index k = piece; k < depth; k += piece) {
        gemm<Left::packed, Into::add>(groups[g].rows, kBlockVecs, std::min(piece, depth - k), a + k * kBlockRows,
                                      b + k * width, target, tile_stride);
      }
      if (maxima != nullptr) see_maxima(groups[g].rows, target, maxima + g * kBlockRows * lanes<C>());
    }
  }
}

// The caller's rows as the right operand of a product over rows (keys or queries). A hidden pair has weight 0, but
// 0 * NaN is NaN: so where pairs are hidden, packed rows that are not finite are replaced by zeros, listed here, and
// added afterwards for the visible pairs alone.
template <typename C>
struct HiddenRows {
  Rows source;
  BadRows* bad = nullptr;

  void add(Index r) { bad->rows[bad->count++] = static_cast<std::uint16_t>(r); }

  // target[n] += weight * row r, from the caller's memory.
  void add_bad(Index r, C weight, C* target) const {
    for (Index n = 0; n < source.size; ++n) {
      target[n] += weight * static_cast<C>(load_element(source.data, source.dtype, source.at(r) + n));
    }
  }
};

// The same, packed in panels.
template <typename C>
struct RightRows : HiddenRows<C> {
  using HiddenRows<C>::source;
  C* panels = nullptr;

  RightRows() = default;
  RightRows(const Rows& rows, C* memory, BadRows* bad_rows) : HiddenRows<C>{rows, bad_rows}, panels(memory) {}

  // Rows [begin, end). Returns their largest magnitude; NaN may be passed over.
  C pack(Index begin, Index end) { return pack_panels(source, begin, end, panels); }

  // Row r from its vector `vec` on, a multiple of kBlockVecs. Rows are a panel's width apart.
  [[nodiscard]] const C* at(Index r, Index vec) const {
    return panels + vec * lanes<C>() * source.count + r * panel_width<C>();
  }

  void scale(C factor) {
    const Index width = panel_width<C>();
    for (Index c = 0; c < source.size; c += width) {
      for (Index r = 0; r < source.count; ++r) {
        C* row = panels + c * source.count + r * width;
        std::transform(row, row + std::min(width, source.size - c), row, [&](C x) { return x * factor; });
      }
    }
  }

  // Takes out the rows that are not finite. Needed for tiles with hidden elements only.
  void isolate_bad() {
    if (this->bad->isolated) return;
    this->bad->isolated = true;
    const Index width = panel_width<C>();
    for (Index r = 0; r < source.count; ++r) {
      bool finite = true;
      for (Index c = 0; c < source.size; c += width) {
        finite = finite && all_finite(panels + c * source.count + r * width, std::min(width, source.size - c));
      }
      if (finite) continue;
      this->add(r);
      for (Index c = 0; c < source.size; c += width) {
        std::fill_n(panels + c * source.count + r * width, std::min(width, source.size - c), C{0});
      }
    }
  }
};

// target[row] += sum over columns c of tile[row][c] * right row c, for the columns that each group of rows
// needs. vecs: vectors of a row of the target. kInto: add; or scale_add, with one factor for each row of the tile.
template <Into kInto = Into::add, class Right, typename T, typename C = typename Unit<T>::Sum>
HWY_NOINLINE void add_tile_product(const GroupColumns* groups, Index group_count, const T* tile, const Right& right,
                                   C* target, Index target_stride, Index vecs, const C* factors = nullptr) {
  constexpr Index elements = Unit<T>::elements;
  // A panel of this many units (16 KiB) and the rows of the tile against it fit the L1 cache.
  constexpr Index depth_block = 128;
  const Index units = ceil_div(right.source.count, elements);
  for (Index first = 0; first < units; first += depth_block) {
    for (Index vec = 0; vec < vecs; vec += kBlockVecs) {
      for (Index g = 0; g < group_count; ++g) {
        const Index begin = std::max(first, groups[g].begin / elements);
        const Index end = std::min(first + depth_block, ceil_div(groups[g].end, elements));
        if (begin >= end) continue;
        const auto multiply = [&]<Into kHow>(std::integral_constant<Into, kHow>) HEADRACE_ATTR {
          gemm<Left::tile, kHow>(groups[g].rows, std::min<Index>(kBlockVecs, vecs - vec), end - begin,
                                 tile + g * kBlockRows * Unit<T>::stride_of_tile + begin, right.at(begin, vec),
                                 target + g * kBlockRows * target_stride + vec * lanes<C>(), target_stride,
                                 kHow == Into::scale_add ? factors + g * kBlockRows : nullptr);
        };
        bool scaled = false;
        if constexpr (kInto == Into::scale_add) {
          scaled = begin == groups[g].begin / elements;
          if (scaled) multiply(std::integral_constant<Into, kInto>());
        }
        if (!scaled) multiply(std::integral_constant<Into, Into::add>());
      }
    }
  }
}

}  // namespace headrace::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
