// The dropout mask: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011, section 3) of the position alone, so that every backend, tile size and pass agrees.
// Self-contained and fit for device code, like tiling.hpp.
#pragma once

#ifndef HEADRACE_HOST_DEVICE
#define HEADRACE_HOST_DEVICE
#endif

namespace headrace {

struct Philox {
  using Uint32 = unsigned int;  // of these widths on host and device; NVRTC has no <cstdint>
  using Uint64 = unsigned long long;

  Uint32 word[4];

  // counter and key as in the paper; ten rounds.
  HEADRACE_HOST_DEVICE static constexpr Philox make(Uint32 c0, Uint32 c1, Uint32 c2, Uint32 c3, Uint64 key) {
    Uint32 k0 = static_cast<Uint32>(key), k1 = static_cast<Uint32>(key >> 32);
    for (int round = 0; round < 10; ++round) {
      const Uint64 p0 = product(c0, multiplier0), p1 = product(c2, multiplier1);
      const Uint32 n0 = static_cast<Uint32>(p1 >> 32) ^ c1 ^ k0;
      const Uint32 n2 = static_cast<Uint32>(p0 >> 32) ^ c3 ^ k1;
      c1 = static_cast<Uint32>(p1);
      c3 = static_cast<Uint32>(p0);
      c0 = n0;
      c2 = n2;
      k0 += weyl0;
      k1 += weyl1;
    }
    return {{c0, c1, c2, c3}};
  }

  // Device compilers take this for a product of 64-bit numbers, with an addition more, unless they are told.
  HEADRACE_HOST_DEVICE static constexpr Uint64 product(Uint32 a, Uint32 b) {
#ifdef __CUDA_ARCH__
    Uint64 result;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(result) : "r"(a), "r"(b));
    return result;
#else
    return Uint64{a} * b;
#endif
  }

  static constexpr Uint32 multiplier0 = 0xD2511F53u, multiplier1 = 0xCD9E8D57u;
  static constexpr Uint32 weyl0 = 0x9E3779B9u, weyl1 = 0xBB67AE85u;
};

// Keeps element (b, h, i, j) where its 32 random bits reach the threshold. One Philox call serves the
// 2 x 2 block of neighbouring rows and keys that a tensor-core fragment shares between two lanes in
// either orientation: counter (j / 2, i / 2, h, b), word 2 * (i % 2) + j % 2.
struct Dropout {
  using Uint32 = Philox::Uint32;
  using Uint64 = Philox::Uint64;

  double rate = 0.0;
  Uint64 seed = 0;

  HEADRACE_HOST_DEVICE constexpr bool active() const { return rate > 0.0; }
  // Whether every element has a counter of its own: its halves are 32-bit words.
  HEADRACE_HOST_DEVICE static constexpr bool distinguishes(long long batch, long long heads, long long seqlen_q,
                                                           long long seqlen_k) {
    constexpr long long indices = 1LL << 32, positions = 1LL << 33;
    return batch <= indices && heads <= indices && seqlen_q <= positions && seqlen_k <= positions;
  }
  // The dropped fraction is rate to within 2^-32.
  HEADRACE_HOST_DEVICE constexpr Uint32 threshold() const { return static_cast<Uint32>(rate * 4294967296.0); }
  HEADRACE_HOST_DEVICE constexpr double kept_scale() const { return 1.0 / (1.0 - rate); }

  HEADRACE_HOST_DEVICE constexpr Philox block(long long b, long long h, long long i, long long j) const {
    return Philox::make(static_cast<Uint32>(j >> 1), static_cast<Uint32>(i >> 1), static_cast<Uint32>(h),
                        static_cast<Uint32>(b), seed);
  }
  HEADRACE_HOST_DEVICE constexpr bool keep(long long b, long long h, long long i, long long j) const {
    return block(b, h, i, j).word[2 * (i & 1) + (j & 1)] >= threshold();
  }
};

}  // namespace headrace
