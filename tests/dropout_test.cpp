// The dropout mask: Philox against its published vectors, and the statistics of what it keeps.
#include "describe/dropout.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "headrace/headrace.hpp"
#include "support/random.hpp"

namespace headrace::test {
namespace {

using Words = std::array<std::uint32_t, 4>;

constexpr Words philox(const Words& counter, std::uint32_t key0, std::uint32_t key1) {
  const Philox result = Philox::make(counter[0], counter[1], counter[2], counter[3], std::uint64_t{key1} << 32 | key0);
  return {result.word[0], result.word[1], result.word[2], result.word[3]};
}

// The known answers for philox4x32-10 that come with Random123, the authors' own implementation.
static_assert(philox({0, 0, 0, 0}, 0, 0) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
static_assert(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, 0xffffffff, 0xffffffff) ==
              Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
static_assert(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0) ==
              Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});

constexpr double rates[] = {0.001, 0.01, 0.1, 0.5, 0.9};

TEST(Dropout, RateZeroKeepsEverything) {
  const Dropout dropout{0.0, 1};
  EXPECT_FALSE(dropout.active());
  for (std::int64_t j = 0; j < 10000; ++j) ASSERT_TRUE(dropout.keep(0, 0, 0, j));
}

// Neither rate nor scale is quantised: a byte would drop 1 of 256 at a rate of 0.001.
TEST(Dropout, KeepsTheAskedFraction) {
  Rng rng = test_rng();
  for (const double rate : rates) {
    EXPECT_NEAR(Dropout({rate, 0}).threshold() * 0x1p-32, rate, 0x1p-32);
    const Dropout dropout{rate, rng.bits()};
    constexpr std::int64_t rows = 1024, keys = 1024, heads = 4;
    double kept = 0.0;
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < keys; ++j) kept += dropout.keep(1, h, i, j) ? 1.0 : 0.0;
      }
    }
    constexpr double n = double{rows} * keys * heads;
    EXPECT_NEAR(kept / n, 1.0 - rate, 5.5 * std::sqrt(rate * (1.0 - rate) / n)) << "rate " << rate;
  }
}

// Pairs of elements that share a Philox call, a neighbouring call, or only some coordinates are kept
// independently of one another; so are the same elements under another seed.
TEST(Dropout, ElementsAreIndependent) {
  Rng rng = test_rng();
  const Dropout dropout{0.5, rng.bits()};
  struct Offset {
    std::int64_t b, h, i, j;
    std::uint64_t seed;
  };
  for (const Offset& other : std::vector<Offset>{{0, 0, 0, 1, 0},
                                                 {0, 0, 1, 0, 0},
                                                 {0, 0, 1, 1, 0},
                                                 {0, 0, 0, 2, 0},
                                                 {0, 0, 2, 0, 0},
                                                 {0, 1, 0, 0, 0},
                                                 {1, 0, 0, 0, 0},
                                                 {0, 0, 0, 0, 1},
                                                 {0, 0, 0, 0, std::uint64_t{1} << 32}}) {
    const Dropout second{0.5, dropout.seed + other.seed};
    constexpr std::int64_t rows = 512, keys = 512;
    double sum = 0.0;
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < keys; ++j) {
        const bool a = dropout.keep(0, 0, i, j);
        const bool b = second.keep(other.b, other.h, i + other.i, j + other.j);
        sum += a == b ? 1.0 : -1.0;
      }
    }
    constexpr double n = double{rows} * keys;
    EXPECT_LT(std::abs(sum / n), 5.5 / std::sqrt(n)) << other.b << other.h << other.i << other.j << other.seed;
  }
}

// The published mask is the one that the kernels read.
TEST(Dropout, MaskIsWhatKeepSays) {
  Rng rng = test_rng();
  const Dropout dropout{0.3, rng.bits()};
  constexpr std::int64_t batch = 2, heads = 3, rows = 5, keys = 7;
  bool keep[batch * heads * rows * keys];
  dropout_mask({keep, {batch, heads, rows, keys}}, dropout.rate, dropout.seed);
  const bool* next = keep;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < keys; ++j) EXPECT_EQ(*next++, dropout.keep(b, h, i, j));
      }
    }
  }
}

// With q = 0 and v = 1 the mean of the output is 1, for small rates too.
TEST(Dropout, OutputKeepsItsExpectation) {
  Rng rng = test_rng();
  for (const double rate : rates) {
    constexpr std::int64_t rows = 256, keys = 1024, heads = 2;
    std::vector<float> q(rows * heads, 0.0f), k(keys * heads, 1.0f), v(keys * heads, 1.0f), out(rows * heads);
    Attention attention;
    attention.q = {q.data(), {1, rows, heads, 1}};
    attention.k = {k.data(), {1, keys, heads, 1}};
    attention.v = {v.data(), {1, keys, heads, 1}};
    attention.out = {out.data(), {1, rows, heads, 1}};
    attention.dropout_p = rate;
    attention.seed = rng.bits();
    attention.backend = Backend::reference;
    forward(attention);
    double mean = 0.0;
    for (const float o : out) mean += static_cast<double>(o) / (rows * heads);
    constexpr double n = double{rows} * keys * heads;
    EXPECT_NEAR(mean, 1.0, 5.5 * std::sqrt(rate / (1.0 - rate) / n) + 1e-6) << "rate " << rate;
  }
}

}  // namespace
}  // namespace headrace::test
