// The register-blocked matrix product that all five products of attention are made of.
#if defined(HEADRACE_CPU_SIMD_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEADRACE_CPU_SIMD_GEMM_INL_H_
#undef HEADRACE_CPU_SIMD_GEMM_INL_H_
#else
#define HEADRACE_CPU_SIMD_GEMM_INL_H_
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/kernels.hpp"
#include "cpu/simd/attributes-inl.h"
#include "cpu/tile_config.hpp"
#include "hwy/highway.h"

HEADRACE_BEFORE_NAMESPACE();
namespace headrace::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Register block: kBlockRows rows x 2 vectors. With AVX-512, 8 rows reach 0.99 of the FMA peak from the L2 cache and 12
// rows 0.97 (Zen 4); NEON, which loads as much for a quarter of the work, takes 24 of its 32 registers; 16 registers
// hold 12 accumulators.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4
inline constexpr int kBlockRows = 6;
#elif HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
inline constexpr int kBlockRows = 8;
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

// What a product multiplies at a time, in each lane of a vector: one element of both operands, or two that lie side by
// side along the sum (pairs-inl.h). C: the type of the sum.
template <typename C>
struct Unit {
  using Sum = C;
  static constexpr Index elements = 1;
  static constexpr Index stride_of_tile = tile_stride;
  static HWY_INLINE auto load(const C* p) { return hn::LoadU(Wide<C>(), p); }
  static HWY_INLINE auto fill(const C* p) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
    // As an integer: on Zen 4 that takes no port which arithmetic could use, vbroadcastss does.
    if constexpr (std::is_same_v<C, float>) {
      std::int32_t bits;
      std::memcpy(&bits, p, sizeof bits);
      return hn::Vec<Wide<C>>{_mm512_castsi512_ps(_mm512_set1_epi32(bits))};
    }
#endif
    return hn::Set(Wide<C>(), *p);
  }
  template <class V>
  static HWY_INLINE V multiply_add(V left, V right, V sum) {
    return hn::MulAdd(left, right, sum);
  }
};

// How the left operand lies in memory, counted in units.
enum class Left {
  packed,          // unit (row, k) at k * kBlockRows + row: groups of rows from pack_transposed
  tile,            // unit (row, k) at row * stride_of_tile + k: rows of a tile
  transposed_tile  // unit (row, k) at k * tile_stride + row: columns of a tile
};

// What becomes of the sum over k. Sums are added when they are complete and never go on from c: over
// thousands of keys a single chain would drift where all terms have one sign.
enum class Into {
  store,     // c = sum
  add,       // c = c + sum
  scale_add  // c = factor of the row * c + sum, rounded in between: so it matters not which part of a sum comes first
};

// c[row][n] = sum over units k < depth of a(row, k) * b[k * width of a panel + n], or as kInto says, for kRows rows and
// kVecs vectors. The order of the sum depends on k alone, whatever the block an element falls in: so the bits of
// a row do not depend on its neighbours.
template <Left kLeft, Into kInto, int kRows, int kVecs, typename T, typename C = typename Unit<T>::Sum>
HWY_NOINLINE void gemm_block(Index depth, const T* HWY_RESTRICT a, const T* HWY_RESTRICT b, C* HWY_RESTRICT c,
                             Index c_stride, [[maybe_unused]] const C* factors) {
  using U = Unit<T>;
  constexpr Index row_step = kLeft == Left::tile ? U::stride_of_tile : 1;
  constexpr Index unit_step = kLeft == Left::tile ? 1 : kLeft == Left::packed ? kBlockRows : tile_stride;
  const Wide<C> d;
  const Index n = lanes<C>();
  hn::Vec<Wide<C>> acc[kRows][kVecs];
  HEADRACE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    HEADRACE_UNROLL
    for (int v = 0; v < kVecs; ++v) acc[r][v] = hn::Zero(d);
  }
  for (Index k = 0; k < depth; ++k) {
    decltype(U::load(b)) right[kVecs];
    HEADRACE_UNROLL
    for (int v = 0; v < kVecs; ++v) right[v] = U::load(b + v * n);
    HEADRACE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto left = U::fill(a + r * row_step);
      HEADRACE_UNROLL
      for (int v = 0; v < kVecs; ++v) acc[r][v] = U::multiply_add(left, right[v], acc[r][v]);
    }
    b += kBlockVecs * n;
    a += unit_step;
  }
  HEADRACE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    HEADRACE_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      C* target = c + r * c_stride + v * n;
      auto sum = acc[r][v];
      if constexpr (kInto == Into::add) sum = hn::Add(hn::LoadU(d, target), sum);
      if constexpr (kInto == Into::scale_add) {
        sum = hn::Add(hn::Mul(hn::LoadU(d, target), hn::Set(d, factors[r])), sum);
      }
      hn::StoreU(sum, d, target);
    }
  }
}

// The same for at most kBlockRows rows and at most kBlockVecs vectors.
template <Left kLeft, Into kInto, typename T, typename C = typename Unit<T>::Sum>
HWY_INLINE void gemm(Index rows, Index vecs, Index depth, const T* a, const T* b, C* c, Index c_stride,
                     const C* factors = nullptr) {
  constexpr Index row_step = kLeft == Left::tile ? Unit<T>::stride_of_tile : 1;
  const auto block = [&]<int kRows>(std::integral_constant<int, kRows>) {
    if (vecs == kBlockVecs) {
      gemm_block<kLeft, kInto, kRows, kBlockVecs>(depth, a, b, c, c_stride, factors);
    } else {
      gemm_block<kLeft, kInto, kRows, 1>(depth, a, b, c, c_stride, factors);
    }
    a += kRows * row_step;
    c += kRows * c_stride;
    if constexpr (kInto == Into::scale_add) factors += kRows;
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
