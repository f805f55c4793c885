// hr_merge_states and hr_dropout_mask: their values.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "describe/dropout.hpp"
#include "describe/element.hpp"
#include "describe/tensor_view.hpp"
#include "headrace/headrace.hpp"
#include "support/random.hpp"

namespace headrace {
namespace {

using test::Rng;

constexpr double inf = std::numeric_limits<double>::infinity();

// A tensor over memory of its own, with any order of dimensions and gaps.
struct Owned {
  std::vector<std::byte> memory;
  hr_tensor view{};

  Owned(hr_dtype dtype, const std::vector<std::int64_t>& shape, Rng& rng) {
    view.dtype = dtype;
    view.ndim = static_cast<std::int32_t>(shape.size());
    std::vector<std::size_t> order(shape.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (std::size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[static_cast<std::size_t>(rng.integer(0, static_cast<std::int64_t>(i) - 1))]);
    std::int64_t stride = 1;
    for (const std::size_t i : order) {
      view.shape[i] = shape[i];
      view.stride[i] = stride;
      stride = stride * shape[i] + rng.integer(0, 2);
    }
    memory.assign(static_cast<std::size_t>((stride + 1) * dtype_size(dtype)), std::byte{0xCB});
    view.data = memory.data();
  }
  [[nodiscard]] std::int64_t offset(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d = 0) const {
    return a * view.stride[0] + b * view.stride[1] + c * view.stride[2] + (view.ndim == 4 ? d * view.stride[3] : 0);
  }
  [[nodiscard]] double get(std::int64_t at) const {
    return load_element(memory.data(), static_cast<hr_dtype>(view.dtype), at);
  }
  void set(std::int64_t at, double value) {
    store_element(memory.data(), static_cast<hr_dtype>(view.dtype), at, value);
  }
};

struct Merge {
  std::int64_t batch, seqlen, heads, dim;
  Owned out_a, lse_a, out_b, lse_b, out, lse;

  Merge(hr_dtype dtype, hr_dtype lse_dtype, Rng& rng)
      : batch(rng.integer(1, 3)),
        seqlen(rng.integer(1, 5)),
        heads(rng.integer(1, 4)),
        dim(rng.integer(1, 9)),
        out_a(dtype, {batch, seqlen, heads, dim}, rng),
        lse_a(lse_dtype, {batch, heads, seqlen}, rng),
        out_b(dtype, {batch, seqlen, heads, dim}, rng),
        lse_b(lse_dtype, {batch, heads, seqlen}, rng),
        out(dtype, {batch, seqlen, heads, dim}, rng),
        lse(lse_dtype, {batch, heads, seqlen}, rng) {}
  void run() { merge_states(out_a.view, lse_a.view, out_b.view, lse_b.view, out.view, lse.view); }
};

TEST(MergeStates, IsTheSoftmaxOfTheSides) {
  Rng rng = test::test_rng();
  const std::vector<double> levels = {0, 1, -1, 200, -200, 1e4, -1e4, -1e30, -inf};
  for (const hr_dtype dtype : {HR_FLOAT32, HR_FLOAT16, HR_BFLOAT16, HR_FLOAT64}) {
    const double unit = dtype == HR_FLOAT64   ? 0x1p-52
                        : dtype == HR_FLOAT32 ? 0x1p-23
                        : dtype == HR_FLOAT16 ? 0x1p-10
                                              : 0x1p-7;
    for (int n = 0; n < 300; ++n) {
      const hr_dtype lse_dtype = dtype == HR_FLOAT64 && rng.chance(0.5) ? HR_FLOAT64 : HR_FLOAT32;
      Merge m(dtype, lse_dtype, rng);
      for (std::int64_t b = 0; b < m.batch; ++b) {
        for (std::int64_t i = 0; i < m.seqlen; ++i) {
          for (std::int64_t h = 0; h < m.heads; ++h) {
            for (Owned* side : {&m.lse_a, &m.lse_b})
              side->set(side->offset(b, h, i), levels[static_cast<std::size_t>(rng.integer(0, 8))] + rng.normal());
            for (std::int64_t x = 0; x < m.dim; ++x) {
              m.out_a.set(m.out_a.offset(b, i, h, x), rng.normal());
              m.out_b.set(m.out_b.offset(b, i, h, x), rng.normal());
            }
          }
        }
      }
      m.run();
      for (std::int64_t b = 0; b < m.batch; ++b) {
        for (std::int64_t i = 0; i < m.seqlen; ++i) {
          for (std::int64_t h = 0; h < m.heads; ++h) {
            const double la = m.lse_a.get(m.lse_a.offset(b, h, i)), lb = m.lse_b.get(m.lse_b.offset(b, h, i));
            const bool none = la == -inf && lb == -inf;
            // By the smaller side's weight alone: exp(-|la - lb|) cannot overflow.
            const double small = none ? 0 : std::exp(-std::abs(la - lb));
            const double weight_a = (la >= lb ? 1 : small) / (1 + small),
                         weight_b = (la >= lb ? small : 1) / (1 + small);
            const double lse = none ? -inf : std::max(la, lb) + std::log1p(small);
            const double found = m.lse.get(m.lse.offset(b, h, i));
            if (lse == -inf)
              ASSERT_EQ(found, -inf);
            else
              ASSERT_NEAR(found, lse, std::abs(lse) * 0x1p-23 + 1e-6) << la << " " << lb;
            for (std::int64_t x = 0; x < m.dim; ++x) {
              const double a = m.out_a.get(m.out_a.offset(b, i, h, x)), o = m.out_b.get(m.out_b.offset(b, i, h, x));
              const double expected = none ? 0 : weight_a * a + weight_b * o;
              ASSERT_NEAR(m.out.get(m.out.offset(b, i, h, x)), expected,
                          unit * std::abs(expected) + 1e-12 + (dtype == HR_FLOAT16 ? 0x1p-24 : 0))
                  << la << " " << lb;
            }
          }
        }
      }
    }
  }
}

// A side that saw no key is left out whatever its out holds, and the other is returned bit for bit.
TEST(MergeStates, AnEmptySideChangesNothing) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), odd = std::bit_cast<float>(0x3f9d70a5u);
  for (const float level : {0.0f, -1e30f, 1e4f, odd}) {
    for (const bool swapped : {false, true}) {
      float full[2] = {odd, -0.0f}, full_lse = level, empty[2] = {nan, 777}, empty_lse = static_cast<float>(-inf);
      float out[2] = {nan, nan}, lse = nan;
      const Tensor full_out(full, {1, 1, 1, 2}), full_side(&full_lse, {1, 1, 1}), empty_out(empty, {1, 1, 1, 2});
      const Tensor empty_side(&empty_lse, {1, 1, 1}), result(out, {1, 1, 1, 2}), result_lse(&lse, {1, 1, 1});
      if (swapped)
        merge_states(empty_out, empty_side, full_out, full_side, result, result_lse);
      else
        merge_states(full_out, full_side, empty_out, empty_side, result, result_lse);
      EXPECT_EQ(std::memcmp(out, full, sizeof(out)), 0);
      EXPECT_EQ(std::bit_cast<std::uint32_t>(lse), std::bit_cast<std::uint32_t>(level));
      // Both empty: out 0, not what either holds.
      merge_states(empty_out, empty_side, empty_out, empty_side, result, result_lse);
      EXPECT_EQ(std::bit_cast<std::uint32_t>(out[0]), 0u);
      EXPECT_EQ(std::bit_cast<std::uint32_t>(out[1]), 0u);
      EXPECT_EQ(lse, static_cast<float>(-inf));
    }
  }
}

TEST(MergeStates, SidesOfAnyDistanceStayFinite) {
  for (const float distance : {0.0f, 1.0f, 88.0f, 89.0f, 200.0f, 1e4f, 3e38f}) {
    float a[1] = {1}, b[1] = {3}, lse_a = distance, lse_b = -distance, out[1], lse;
    const Tensor result(out, {1, 1, 1, 1}), result_lse(&lse, {1, 1, 1});
    merge_states({a, {1, 1, 1, 1}}, {&lse_a, {1, 1, 1}}, {b, {1, 1, 1, 1}}, {&lse_b, {1, 1, 1}}, result, result_lse);
    const double weight_b = 1 / (1 + std::exp(2.0 * distance));
    EXPECT_NEAR(out[0], 1 + 2 * weight_b, 1e-6);
    EXPECT_NEAR(lse, distance + std::log1p(std::exp(-2.0 * distance)), 1e-6 * std::max(1.0f, distance));
  }
}

TEST(MergeStates, NaNIsNotHidden) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  float a[1] = {1}, b[1] = {3}, lse_a = nan, lse_b = 0, out[1] = {5}, lse = 5;
  const Tensor result(out, {1, 1, 1, 1}), result_lse(&lse, {1, 1, 1});
  merge_states({a, {1, 1, 1, 1}}, {&lse_a, {1, 1, 1}}, {b, {1, 1, 1, 1}}, {&lse_b, {1, 1, 1}}, result, result_lse);
  EXPECT_TRUE(std::isnan(out[0]) && std::isnan(lse));
}

TEST(MergeStates, EmptyTensorsAreLegal) {
  for (int empty = 0; empty < 4; ++empty) {
    float lse_memory[8] = {1, 1, 1, 1, 1, 1, 1, 1}, merged[8] = {};
    const std::int64_t batch = empty == 0 ? 0 : 2, seqlen = empty == 1 ? 0 : 2, heads = empty == 2 ? 0 : 2;
    const Tensor out(static_cast<float*>(nullptr), {batch, seqlen, heads, empty == 3 ? 0 : 2});
    const Tensor lse(lse_memory, {batch, heads, seqlen}), result(merged, {batch, heads, seqlen});
    EXPECT_NO_THROW(merge_states(out, lse, out, lse, out, result)) << empty;
    if (empty == 3) {
      EXPECT_NEAR(merged[7], 1 + std::log(2.0), 1e-6);
    }
  }
}

TEST(DropoutMask, IsWhatTheKernelsKeep) {
  Rng rng = test::test_rng();
  for (int n = 0; n < 50; ++n) {
    const std::int64_t batch = rng.integer(0, 3), heads = rng.integer(1, 3), sq = rng.integer(1, 9),
                       sk = rng.integer(1, 17);
    Owned keep(HR_BOOL, {batch, heads, sq, sk}, rng);
    const std::vector<std::byte> before = keep.memory;
    const double p = rng.pick({0.0, 0.001, 0.1, 0.5, 0.9, std::nextafter(1.0, 0.0)});
    const std::uint64_t seed = rng.bits();
    dropout_mask(keep.view, p, seed);
    std::vector<std::byte> expected = before;
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t i = 0; i < sq; ++i)
          for (std::int64_t j = 0; j < sk; ++j)
            expected[static_cast<std::size_t>(keep.offset(b, h, i, j))] =
                std::byte{Dropout{p, seed}.keep(b, h, i, j) ? std::uint8_t{1} : std::uint8_t{0}};
    EXPECT_EQ(keep.memory, expected);  // and nothing between the elements
  }
}

}  // namespace
}  // namespace headrace
