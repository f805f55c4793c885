#include "ceilings.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace::bench {
namespace {

constexpr int steps = 200'000;

// Each chain waits 4 cycles or so for its last result: 12 or more of them keep two units busy everywhere.
#if defined(__x86_64__)

// The chains must be registers: the loops over them have to be unrolled.
#if defined(__clang__)
#define HEADRACE_CHAINS _Pragma("clang loop unroll(full)")
#else
#define HEADRACE_CHAINS _Pragma("GCC unroll 24")
#endif

[[gnu::target("avx512f"), gnu::noinline]] double fma_avx512() {
  constexpr int chains = 24;
  __m512 sum[chains];
  const __m512 factor = _mm512_set1_ps(0.5f);
  HEADRACE_CHAINS
  for (int n = 0; n < chains; ++n) {
    sum[n] = _mm512_set1_ps(1.0f);
    asm volatile("" : "+v"(sum[n]));  // or the compiler would make one chain of all
  }
  for (int step = 0; step < steps; ++step) {
    HEADRACE_CHAINS
    for (int n = 0; n < chains; ++n) sum[n] = _mm512_fmadd_ps(sum[n], factor, factor);
  }
  HEADRACE_CHAINS
  for (int n = 0; n < chains; ++n) asm volatile("" : "+v"(sum[n]));
  return 2.0 * 16 * chains * steps;
}

[[gnu::target("avx512f,avx512bf16"), gnu::noinline]] double pairs_avx512() {
  constexpr int chains = 24;
  __m512 sum[chains];
  __m512i ones = _mm512_set1_epi16(0x3F80);
  asm volatile("" : "+v"(ones));
  __m512bh factor;
  std::memcpy(&factor, &ones, sizeof factor);
  HEADRACE_CHAINS
  for (int n = 0; n < chains; ++n) {
    sum[n] = _mm512_setzero_ps();
    asm volatile("" : "+v"(sum[n]));  // or the compiler would make one chain of all
  }
  for (int step = 0; step < steps; ++step) {
    HEADRACE_CHAINS
    for (int n = 0; n < chains; ++n) sum[n] = _mm512_dpbf16_ps(sum[n], factor, factor);
  }
  HEADRACE_CHAINS
  for (int n = 0; n < chains; ++n) asm volatile("" : "+v"(sum[n]));
  return 4.0 * 16 * chains * steps;
}

[[gnu::target("avx2,fma"), gnu::noinline]] double fma_avx2() {
  constexpr int chains = 14;
  __m256 sum[chains];
  const __m256 factor = _mm256_set1_ps(0.5f);
  HEADRACE_CHAINS
  for (int n = 0; n < chains; ++n) {
    sum[n] = _mm256_set1_ps(1.0f);
    asm volatile("" : "+x"(sum[n]));  // or the compiler would make one chain of all
  }
  for (int step = 0; step < steps; ++step) {
    HEADRACE_CHAINS
    for (int n = 0; n < chains; ++n) sum[n] = _mm256_fmadd_ps(sum[n], factor, factor);
  }
  HEADRACE_CHAINS
  for (int n = 0; n < chains; ++n) asm volatile("" : "+x"(sum[n]));
  return 2.0 * 8 * chains * steps;
}

[[gnu::target("avx512f"), gnu::noinline]] void read_avx512(const std::byte* begin, const std::byte* end) {
  __m512i sum[4] = {};
  for (const std::byte* p = begin; p + 256 <= end; p += 256) {
    HEADRACE_CHAINS
    for (int n = 0; n < 4; ++n) sum[n] = _mm512_or_si512(sum[n], _mm512_loadu_si512(p + n * 64));
  }
  for (__m512i& part : sum) asm volatile("" : "+v"(part));
}
#endif

// With whatever vectors the compiler makes of this: NEON, or SSE.
[[maybe_unused]] double fma_portable() {
  using Vector [[gnu::vector_size(16)]] = float;
  constexpr int chains = 12;
  Vector sum[chains] = {};
  const Vector factor = {0.5f, 0.5f, 0.5f, 0.5f};
  for (int step = 0; step < steps; ++step) {
    for (Vector& chain : sum) chain = chain * factor + factor;
    for (Vector& chain : sum) asm volatile("" : "+m"(chain));
  }
  return 2.0 * 4 * chains * steps;
}

void read_portable(const std::byte* begin, const std::byte* end) {
  std::uint64_t sum = 0;
  for (const std::byte* p = begin; p + sizeof sum <= end; p += sizeof sum) {
    std::uint64_t word;
    std::memcpy(&word, p, sizeof word);
    sum |= word;
  }
  asm volatile("" : "+r"(sum));
}

template <typename Work>
double on_threads(int threads, Work work) {
  double total = 0.0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  total += work();
  return total;
}

}  // namespace

double run_fma(int threads) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return on_threads(threads, fma_avx512);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return on_threads(threads, fma_avx2);
#endif
  return on_threads(threads, fma_portable);
}

bool has_pairs() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

double run_pairs(int threads) {
#if defined(__x86_64__)
  if (has_pairs()) return on_threads(threads, pairs_avx512);
#endif
  static_cast<void>(threads);
  throw std::logic_error("run_pairs: this processor has no products of bfloat16 pairs");
}

void read_all(std::span<const std::byte> memory, int threads) {
  constexpr std::size_t piece = std::size_t{64} << 10;
  const auto pieces = static_cast<std::int64_t>((memory.size() + piece - 1) / piece);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::int64_t n = 0; n < pieces; ++n) {
    const std::byte* const begin = memory.data() + static_cast<std::size_t>(n) * piece;
    const std::byte* const end = memory.data() + std::min(memory.size(), static_cast<std::size_t>(n + 1) * piece);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
      read_avx512(begin, end);
      continue;
    }
#endif
    read_portable(begin, end);
  }
}

}  // namespace headrace::bench
