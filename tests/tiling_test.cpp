// The tile walk against a direct look at every element, over small random problems.
#include "tiling/tiling.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "headrace/headrace.h"
#include "support/random.hpp"

namespace headrace {
namespace {

using test::Rng;

constexpr Index int64_min = std::numeric_limits<Index>::min(), int64_max = std::numeric_limits<Index>::max();

struct RandomCase {
  Index seqlen_q = 0, seqlen_k = 0;
  bool causal = false, top_left = false;
  Index left = HR_UNBOUNDED, right = HR_UNBOUNDED;
  std::vector<unsigned char> bits;
  Visibility visibility;

  static Index random_bound(Rng& rng) {
    if (rng.chance(0.3)) return HR_UNBOUNDED;
    if (rng.chance(0.2))
      return rng.pick<Index>({int64_min, int64_min + 1, -Band::unbounded - 1, -Band::unbounded, -Band::unbounded + 1,
                              Band::unbounded - 1, Band::unbounded, Band::unbounded + 1, int64_max - 1});
    return rng.integer(-50, 50);
  }

  explicit RandomCase(Rng& rng)
      : seqlen_q(rng.integer(0, 40)),
        seqlen_k(rng.integer(0, 40)),
        causal(rng.chance(0.5)),
        top_left(causal && rng.chance(0.5)),
        left(random_bound(rng)),
        right(random_bound(rng)) {
    visibility.seqlen_q = seqlen_q;
    visibility.seqlen_k = seqlen_k;
    visibility.band = Band::make(seqlen_q, seqlen_k, causal, top_left, left, right);
    if (rng.chance(0.6)) {
      BlockMask& blocks = visibility.blocks;
      blocks.block_q = rng.integer(1, 17);
      blocks.block_k = rng.pick<Index>({1, 3, 7, 8, 16, 1000, Index{1} << 40});
      const Index columns = ceil_div(seqlen_k, blocks.block_k), rows = ceil_div(seqlen_q, blocks.block_q);
      const bool transposed = rng.chance(0.5);
      blocks.stride_q = transposed ? 1 : columns;
      blocks.stride_k = transposed ? rows : 1;
      const double density = rng.pick({0.0, 0.1, 0.5, 0.9, 1.0});
      bits.resize(static_cast<std::size_t>(std::max<Index>(rows * columns, 1)));
      // Any byte but 0 counts as set.
      for (unsigned char& bit : bits) bit = rng.chance(density) ? static_cast<unsigned char>(rng.integer(1, 255)) : 0;
      blocks.bits = bits.data();
    }
  }
  RandomCase(const RandomCase&) = delete;

  // The definition in headrace.h, by comparisons that cannot overflow: i + shift - left <= j <= i + shift + right.
  [[nodiscard]] bool band_shows(Index i, Index j) const {
    const Index ahead = j - i - (top_left ? 0 : seqlen_k - seqlen_q);
    if (causal && ahead > 0) return false;
    if (left != HR_UNBOUNDED && -ahead > left) return false;
    return right == HR_UNBOUNDED || ahead <= right;
  }
  [[nodiscard]] bool shows(Index i, Index j) const {
    if (!band_shows(i, j)) return false;
    if (bits.empty()) return true;
    const BlockMask& blocks = visibility.blocks;
    return bits[static_cast<std::size_t>(i / blocks.block_q * blocks.stride_q +
                                         j / blocks.block_k * blocks.stride_k)] != 0;
  }

  [[nodiscard]] std::string describe() const {
    return "seqlen " + std::to_string(seqlen_q) + " x " + std::to_string(seqlen_k) +
           (causal ? top_left ? ", causal top-left" : ", causal bottom-right" : "") + ", window (" +
           std::to_string(left) + ", " + std::to_string(right) + "), blocks " +
           (bits.empty()
                ? "none"
                : std::to_string(visibility.blocks.block_q) + " x " + std::to_string(visibility.blocks.block_k));
  }
};

Range random_range(Rng& rng, Index length) {
  const Index begin = rng.integer(0, length - 1);
  return {begin, rng.integer(begin + 1, length)};
}

TEST(Tiling, ElementsAreVisibleAsDefined) {
  Rng rng = test::test_rng();
  for (int n = 0; n < 5000; ++n) {
    const RandomCase c(rng);
    for (Index i = 0; i < c.seqlen_q; ++i) {
      for (Index j = 0; j < c.seqlen_k; ++j)
        ASSERT_EQ(c.visibility.visible(i, j), c.shows(i, j)) << c.describe() << ", i " << i << ", j " << j;
    }
  }
}

TEST(Tiling, RangesAreTightAroundTheBand) {
  Rng rng = test::test_rng();
  for (int n = 0; n < 20000; ++n) {
    const RandomCase c(rng);
    if (c.seqlen_q == 0 || c.seqlen_k == 0) continue;
    // The first and last key that some row sees, by looking at them all; nothing where there is none.
    const Range rows = random_range(rng, c.seqlen_q), keys = random_range(rng, c.seqlen_k);
    Range expected_keys{c.seqlen_k, -1}, expected_rows{c.seqlen_q, -1};
    for (Index i = 0; i < c.seqlen_q; ++i) {
      for (Index j = 0; j < c.seqlen_k; ++j) {
        if (!c.band_shows(i, j)) continue;
        if (i >= rows.begin && i < rows.end)
          expected_keys = {std::min(expected_keys.begin, j), std::max(expected_keys.end, j + 1)};
        if (j >= keys.begin && j < keys.end)
          expected_rows = {std::min(expected_rows.begin, i), std::max(expected_rows.end, i + 1)};
      }
    }
    const Range found_keys = c.visibility.keys_of_rows(rows), found_rows = c.visibility.rows_of_keys(keys);
    ASSERT_EQ(found_keys.empty(), expected_keys.empty()) << c.describe();
    ASSERT_EQ(found_rows.empty(), expected_rows.empty()) << c.describe();
    if (!expected_keys.empty()) {
      ASSERT_EQ(found_keys.begin, expected_keys.begin) << c.describe();
      ASSERT_EQ(found_keys.end, expected_keys.end) << c.describe();
    }
    if (!expected_rows.empty()) {
      ASSERT_EQ(found_rows.begin, expected_rows.begin) << c.describe();
      ASSERT_EQ(found_rows.end, expected_rows.end) << c.describe();
    }
    // A key is visible to all rows if and only if it is in the range of those.
    const Range shared = c.visibility.keys_of_all_rows(rows);
    for (Index j = 0; j < c.seqlen_k; ++j) {
      bool all = true;
      for (Index i = rows.begin; i < rows.end; ++i) all = all && c.band_shows(i, j);
      ASSERT_EQ(j >= shared.begin && j < shared.end, all) << c.describe() << ", j " << j;
    }
    // Empty or not, a kernel may use them as loop bounds.
    ASSERT_TRUE(found_keys.begin >= 0 && found_keys.end <= c.seqlen_k) << c.describe();
    ASSERT_TRUE(found_rows.begin >= 0 && found_rows.end <= c.seqlen_q) << c.describe();
  }
}

TEST(Tiling, ClassificationAgreesWithItsElements) {
  Rng rng = test::test_rng();
  int hidden = 0, full = 0, edge = 0;
  for (int n = 0; n < 20000; ++n) {
    const RandomCase c(rng);
    if (c.seqlen_q == 0 || c.seqlen_k == 0) continue;
    for (int tile = 0; tile < 4; ++tile) {
      const Range rows = random_range(rng, c.seqlen_q), keys = random_range(rng, c.seqlen_k);
      bool any = false, all = true, band_any = false;
      for (Index i = rows.begin; i < rows.end; ++i) {
        for (Index j = keys.begin; j < keys.end; ++j) {
          any = any || c.shows(i, j);
          all = all && c.shows(i, j);
          band_any = band_any || c.band_shows(i, j);
        }
      }
      const std::string text = c.describe() + ", rows " + std::to_string(rows.begin) + ".." + std::to_string(rows.end) +
                               ", keys " + std::to_string(keys.begin) + ".." + std::to_string(keys.end);
      switch (c.visibility.classify(rows, keys)) {
        case TileKind::hidden:
          ++hidden;
          ASSERT_FALSE(any) << text;
          break;
        case TileKind::full:
          ++full;
          ASSERT_TRUE(all) << text;
          break;
        case TileKind::edge:
          ++edge;
          ASSERT_FALSE(all) << text;
          // Band and blocks are asked apart: a tile with a set block whose part the band hides may be visited for
          // nothing, but no other.
          ASSERT_TRUE(any || (band_any && !c.bits.empty())) << text;
          break;
      }
    }
  }
  EXPECT_GT(hidden, 100);
  EXPECT_GT(full, 100);
  EXPECT_GT(edge, 100);
}

TEST(Tiling, BandsOfTheLongestSequencesDoNotOverflow) {
  constexpr Index longest = (Index{1} << 40) - 1;
  for (const Index left : {int64_min, Index{-1}, Index{0}, longest, int64_max - 1, int64_max}) {
    for (const Index right : {int64_min, Index{-1}, Index{0}, longest, int64_max - 1, int64_max}) {
      for (const auto& [sq, sk] :
           {std::pair{longest, Index{1}}, std::pair{Index{1}, longest}, std::pair{longest, longest}}) {
        const Visibility v{
            .band = Band::make(sq, sk, false, false, left, right), .seqlen_q = sq, .seqlen_k = sk, .blocks = {}};
        const bool last_sees_last = left >= 0 && right >= 0;  // the corner, where j = i + shift
        EXPECT_EQ(v.visible(sq - 1, sk - 1), last_sees_last) << left << " " << right << " " << sq << " " << sk;
        EXPECT_EQ(v.classify({sq - 1, sq}, {sk - 1, sk}), last_sees_last ? TileKind::full : TileKind::hidden);
        EXPECT_EQ(v.keys_of_rows({0, sq}).empty(), v.rows_of_keys({0, sk}).empty());
      }
    }
  }
}

// One library read left + right < 0 as "no mask".
TEST(Tiling, ContradictoryWindowsShowNothing) {
  const Visibility v{.band = Band::make(16, 16, false, false, 7, -8), .seqlen_q = 16, .seqlen_k = 16, .blocks = {}};
  EXPECT_TRUE(v.keys_of_rows({0, 16}).empty());
  EXPECT_TRUE(v.rows_of_keys({0, 16}).empty());
  EXPECT_EQ(v.classify({0, 16}, {0, 16}), TileKind::hidden);
}

static_assert(Band::make(5, 2, true, false, HR_UNBOUNDED, HR_UNBOUNDED).visible(3, 0),
              "usable in constant expressions");

}  // namespace
}  // namespace headrace
