// Pieces of a tile's work that the forward and the backward pass share: which columns a group of rows
// needs, the scores, and right operands that hidden NaNs cannot leak from.
#if defined(HEADRACE_CPU_SIMD_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADRACE_CPU_SIMD_TILE_INL_H_
#undef HEADRACE_CPU_SIMD_TILE_INL_H_
#else
#define HEADRACE_CPU_SIMD_TILE_INL_H_
#endif

#include <algorithm>

#include "cpu/kernels.hpp"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/pack-inl.h"
#include "cpu/tile_config.hpp"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
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

template <typename C>
HWY_INLINE GroupColumns group_columns(const Visibility& vis, TileKind kind, const QueryTile& tile, Index group,
                                      Index j0, Index keys) {
  GroupColumns columns{.rows = std::min(kBlockRows, tile.size() - group * kBlockRows), .begin = 0, .end = keys};
  if (kind != TileKind::edge) return columns;
  const bool one_head = tile.heads == 1;
  const Index first = one_head ? tile.row + group * kBlockRows : tile.row;
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

// scores[r][c] = left row r . right row c, for the columns that each group needs. left: pack_transposed
// by kBlockRows; right: pack_transposed by the panel width. One panel stays in the L1 cache for all rows.
template <typename C>
HWY_NOINLINE void score_product(const GroupColumns* groups, Index group_count, Index keys, Index depth, const C* left,
                                const C* right, C* scores) {
  const Index width = panel_width<C>();
  for (Index c = 0; c < keys; c += width) {
    for (Index g = 0; g < group_count; ++g) {
      if (c + width <= groups[g].begin || c >= groups[g].end) continue;
      gemm<Left::packed, false>(groups[g].rows, kBlockVecs, depth, left + g * kBlockRows * depth, kBlockRows,
                                right + c * depth, 0, width, scores + g * kBlockRows * tile_stride + c, tile_stride);
    }
  }
}

// The same in double, for operands so large that a partial sum could overflow where the score does not.
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

template <typename C>
HWY_INLINE bool may_overflow(C left_magnitude, C right_magnitude, Index depth) {
  if constexpr (std::is_same_v<C, double>) return false;
  const double bound =
      static_cast<double>(left_magnitude) * static_cast<double>(right_magnitude) * static_cast<double>(depth);
  return bound > 1e38 && bound <= std::numeric_limits<double>::max();
}

// The right operand of a product over rows (keys or queries), row r at data + r * ld. A hidden pair has
// weight 0, but 0 * NaN is NaN: so rows that are not finite are replaced by zeros, listed, and added
// afterwards for the visible pairs alone.
template <typename C>
struct RightRows {
  const C* data = nullptr;
  Index ld = 0;
  Index bad_count = 0;
  bool isolated = false;
  std::uint16_t bad[tile_k];
  Rows source;

  // Uses the caller's rows in place where they are vectors of C already, else a packed copy.
  HWY_INLINE void prepare(const Rows& rows, C* copy, Index copy_ld) {
    source = rows;
    bad_count = 0;
    isolated = false;
    const bool same_type = rows.dtype == (std::is_same_v<C, float> ? HR_FLOAT32 : HR_FLOAT64);
    if (same_type && rows.size % lanes<C>() == 0 && rows.inner == 0) {
      data = static_cast<const C*>(rows.data) + rows.offset;
      ld = rows.stride;
    } else {
      pack_rows(rows, copy, copy_ld);
      data = copy;
      ld = copy_ld;
    }
  }

  // Takes out the rows that are not finite. Needed for tiles with hidden elements only.
  HWY_NOINLINE void isolate_bad(C* copy, Index copy_ld) {
    if (isolated) return;
    isolated = true;
    for (Index r = 0; r < source.count; ++r) {
      if (!all_finite(data + r * ld, source.size)) bad[bad_count++] = static_cast<std::uint16_t>(r);
    }
    if (bad_count == 0) return;
    if (data != copy) pack_rows(source, copy, copy_ld);
    data = copy;
    ld = copy_ld;
    for (Index n = 0; n < bad_count; ++n) std::fill(copy + bad[n] * ld, copy + (bad[n] + 1) * ld, C{0});
  }

  // target[n] += weight * row r, from the caller's memory.
  void add_bad(Index r, C weight, C* target) const {
    for (Index n = 0; n < source.size; ++n) {
      target[n] += weight * static_cast<C>(load_element(source.data, source.dtype, source.at(r) + n));
    }
  }
};

}  // namespace headrace::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
