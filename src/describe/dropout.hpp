// The dropout mask: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011, section 3) of the position alone, so that every backend, tile size and pass agrees.
// Self-contained and fit for device code, like tiling.hpp.
#pragma once

#ifndef __CUDACC_RTC__
#include <cstdint>
#endif

#ifndef HEADRACE_HOST_DEVICE
#define HEADRACE_HOST_DEVICE
#endif

namespace headrace {

struct Philox {
  std::uint32_t word[4];

  // counter and key as in the paper; ten rounds.
  HEADRACE_HOST_DEVICE static constexpr Philox make(std::uint32_t c0, std::uint32_t c1, std::uint32_t c2,
                                                    std::uint32_t c3, std::uint64_t key) {
    std::uint32_t k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t p0 = std::uint64_t{multiplier0} * c0, p1 = std::uint64_t{multiplier1} * c2;
      const std::uint32_t n0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
      const std::uint32_t n2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c1 = static_cast<std::uint32_t>(p1);
      c3 = static_cast<std::uint32_t>(p0);
      c0 = n0;
      c2 = n2;
      k0 += weyl0;
      k1 += weyl1;
    }
    return {{c0, c1, c2, c3}};
  }

  static constexpr std::uint32_t multiplier0 = 0xD2511F53u, multiplier1 = 0xCD9E8D57u;
  static constexpr std::uint32_t weyl0 = 0x9E3779B9u, weyl1 = 0xBB67AE85u;
};

// Keeps element (b, h, i, j) where its 32 random bits reach the threshold. One Philox call serves the
// 2 x 2 block of neighbouring rows and keys that a tensor-core fragment shares between two lanes in
// either orientation: counter (j / 2, i / 2, h, b), word 2 * (i % 2) + j % 2.
struct Dropout {
  double rate = 0.0;
  std::uint64_t seed = 0;

  HEADRACE_HOST_DEVICE constexpr bool active() const { return rate > 0.0; }
  // Whether every element has a counter of its own: its halves are 32-bit words.
  HEADRACE_HOST_DEVICE static constexpr bool distinguishes(std::int64_t batch, std::int64_t heads, std::int64_t seqlen_q,
                                                           std::int64_t seqlen_k) {
    constexpr std::int64_t indices = std::int64_t{1} << 32, positions = std::int64_t{1} << 33;
    return batch <= indices && heads <= indices && seqlen_q <= positions && seqlen_k <= positions;
  }
  // The dropped fraction is rate to within 2^-32.
  HEADRACE_HOST_DEVICE constexpr std::uint32_t threshold() const {
    return static_cast<std::uint32_t>(rate * 4294967296.0);
  }
  HEADRACE_HOST_DEVICE constexpr double kept_scale() const { return 1.0 / (1.0 - rate); }

  HEADRACE_HOST_DEVICE constexpr Philox block(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return Philox::make(static_cast<std::uint32_t>(j >> 1), static_cast<std::uint32_t>(i >> 1),
                        static_cast<std::uint32_t>(h), static_cast<std::uint32_t>(b), seed);
  }
  HEADRACE_HOST_DEVICE constexpr bool keep(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return block(b, h, i, j).word[2 * (i & 1) + (j & 1)] >= threshold();
  }
};

}  // namespace headrace
