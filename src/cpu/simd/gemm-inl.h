// The register-blocked matrix product that all five products of attention are made of.
#if defined(HEADRACE_CPU_SIMD_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADRACE_CPU_SIMD_GEMM_INL_H_
#undef HEADRACE_CPU_SIMD_GEMM_INL_H_
#else
#define HEADRACE_CPU_SIMD_GEMM_INL_H_
#endif

#include <type_traits>

#include "cpu/kernels.hpp"
#include "cpu/simd/attributes-inl.h"
#include "cpu/tile_config.hpp"
#include "hwy/highway.h"

HEADRACE_BEFORE_NAMESPACE();
namespace headrace::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Register block: kBlockRows rows x 2 vectors. 32 vector registers hold 24 accumulators, which leaves 0.58 loads
// for each FMA (8 rows have 0.63 and are 1 to 2 % slower); 16 registers hold 12.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4
inline constexpr int kBlockRows = 6;
#else
inline constexpr int kBlockRows = 12;
#endif
inline constexpr int kBlockVecs = 2;

template <typename C>
using Wide = hn::ScalableTag<C>;

template <typename C>
HWY_INLINE Index lanes() {
  return static_cast<Index>(hn::Lanes(Wide<C>()));
}

// How the left operand lies in memory.
enum class Left {
  packed,  // element (row, k) at k * stride + row: groups of rows from pack_transposed, or a transposed tile
  tile     // element (row, k) at row * tile_stride + k: rows of a score tile
};

// What becomes of the sum over k. Sums are added when they are complete and never go on from c: over
// thousands of keys a single chain would drift where all terms have one sign.
enum class Into {
  store,  // c = sum
  add     // c = c + sum
};

// c[row][n] = sum over k < depth of a(row, k) * b[k * b_step + n], or as kInto says, for kRows rows and kVecs
// vectors. The order of the sum depends on k alone, whatever the block an element falls in: so the bits of
// a row do not depend on its neighbours.
template <Left kLeft, Into kInto, int kRows, int kVecs, typename C>
HWY_NOINLINE void gemm_block(Index depth, const C* HWY_RESTRICT a, Index a_stride, const C* HWY_RESTRICT b,
                             Index b_step, C* HWY_RESTRICT c, Index c_stride) {
  const Wide<C> d;
  const Index n = lanes<C>();
  hn::Vec<Wide<C>> acc[kRows][kVecs];
  HEADRACE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    HEADRACE_UNROLL
    for (int v = 0; v < kVecs; ++v) acc[r][v] = hn::Zero(d);
  }
  for (Index k = 0; k < depth; ++k) {
    hn::Vec<Wide<C>> right[kVecs];
    HEADRACE_UNROLL
    for (int v = 0; v < kVecs; ++v) right[v] = hn::LoadU(d, b + v * n);
    HEADRACE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto left = hn::Set(d, kLeft == Left::packed ? a[r] : a[r * tile_stride]);
      HEADRACE_UNROLL
      for (int v = 0; v < kVecs; ++v) acc[r][v] = hn::MulAdd(left, right[v], acc[r][v]);
    }
    b += b_step;
    a += kLeft == Left::packed ? a_stride : 1;
  }
  HEADRACE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    HEADRACE_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      C* target = c + r * c_stride + v * n;
      hn::StoreU(kInto == Into::add ? hn::Add(hn::LoadU(d, target), acc[r][v]) : acc[r][v], d, target);
    }
  }
}

// The same for at most kBlockRows rows and at most kBlockVecs vectors.
template <Left kLeft, Into kInto, typename C>
HWY_INLINE void gemm(Index rows, Index vecs, Index depth, const C* a, Index a_stride, const C* b, Index b_step, C* c,
                     Index c_stride) {
  constexpr Index row_step = kLeft == Left::packed ? 1 : tile_stride;
  const auto block = [&]<int kRows>(std::integral_constant<int, kRows>) {
    if (vecs == kBlockVecs) {
      gemm_block<kLeft, kInto, kRows, kBlockVecs>(depth, a, a_stride, b, b_step, c, c_stride);
    } else {
      gemm_block<kLeft, kInto, kRows, 1>(depth, a, a_stride, b, b_step, c, c_stride);
    }
    a += kRows * row_step;
    c += kRows * c_stride;
  };
  if (rows == kBlockRows) return block(std::integral_constant<int, kBlockRows>());
  if constexpr (kBlockRows > 8) {
    if (rows & 8) block(std::integral_constant<int, 8>());
  }
  if (rows & 4) block(std::integral_constant<int, 4>());
  if (rows & 2) block(std::integral_constant<int, 2>());
  if (rows & 1) block(std::integral_constant<int, 1>());
}

}  // namespace headrace::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
