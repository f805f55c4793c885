// The streaming states: reductions that take their input block by block, in any grouping.
//
// Each state has an identity (the default constructed one), update (one value or a block of them), merge
// (with the state of other values; associative and commutative up to rounding, and bit for bit the
// same whichever side is merged into which), and finalize. Merging with an identity changes no bit.
// So a reduction may be cut anywhere: into tiles, splits of a key cache, prefixes, devices.
//
//   SoftmaxState    running maximum and sum of exponentials: softmax, log-sum-exp, cross-entropy
//   AttentionState  SoftmaxState with a weighted sum of vectors: a row of attention
//   Moments         count, mean and sum of squared deviations: LayerNorm, GroupNorm
//   TopK            the K largest values and where they were: expert gating
//
// NaN in shows as NaN out. Self-contained and allocation-free; compiles as C++20 host code and, without
// any include, as device code under NVRTC. constexpr where Math is.
#pragma once

#ifndef __CUDACC_RTC__
#include <cmath>
#include <limits>
#endif

#ifndef HEADRACE_HOST_DEVICE
#ifdef __CUDACC__
#define HEADRACE_HOST_DEVICE __host__ __device__
#else
#define HEADRACE_HOST_DEVICE
#endif
#endif

namespace headrace {

// The exponential and the natural logarithm of the states below. A kernel may pass its own pair, which
// must keep exp(-inf) = 0, exp(0) = 1 and log(1) = 0.
struct StandardMath {
#ifdef __CUDACC_RTC__
  __device__ static float exp(float x) { return expf(x); }
  __device__ static double exp(double x) { return ::exp(x); }
  __device__ static float log(float x) { return logf(x); }
  __device__ static double log(double x) { return ::log(x); }
#else
  template <typename T>
  static T exp(T x) {
    return std::exp(x);
  }
  template <typename T>
  static T log(T x) {
    return std::log(x);
  }
#endif
};

namespace streaming {

template <typename T>
HEADRACE_HOST_DEVICE constexpr T minus_infinity() {
#ifdef __CUDACC_RTC__
  return static_cast<T>(__builtin_bit_cast(float, 0xFF800000u));
#else
  return -std::numeric_limits<T>::infinity();
#endif
}

// NaN alone is neither below zero nor anywhere else.
template <typename T>
HEADRACE_HOST_DEVICE constexpr bool is_nan(T x) {
  return !(x < T(0)) && !(x >= T(0));
}

// The larger one, or NaN if either is.
template <typename T>
HEADRACE_HOST_DEVICE constexpr T max_or_nan(T a, T b) {
  return b > a || is_nan(b) ? b : a;
}

// term(0) + ... + term(count - 1), added pairwise: the error grows with log(count), and a sum of ones
// does not stick at 2^24 in float32.
template <typename T, typename Term>
HEADRACE_HOST_DEVICE constexpr T pairwise_sum(long long begin, long long end, const Term& term) {
  if (end - begin > 64) {
    const long long middle = begin + (end - begin) / 2;
    return pairwise_sum<T>(begin, middle, term) + pairwise_sum<T>(middle, end, term);
  }
  T sum = 0;
  for (long long n = begin; n < end; ++n) sum += term(n);
  return sum;
}

// a_factor * a + b_factor * b, where the factor of a is 1 if a_larger, else that of b. There is one multiply-add,
// written once: a compiler that contracts it into a fused one cannot round a + b and b + a apart.
template <typename T>
HEADRACE_HOST_DEVICE constexpr T sum_scaled(bool a_larger, T a, T b, T a_factor, T b_factor) {
  const T larger = a_larger ? a : b, smaller = a_larger ? b : a, factor = a_larger ? b_factor : a_factor;
  return larger + factor * smaller;
}

}  // namespace streaming

// The online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3):
// m = max s, l = sum exp(s - m). A caller that sums vectors along with it keeps its own sum o of
// exp(s_j - m) * v_j and rescales it by the factors that the operations return:
//
//   const auto [kept, added] = state.update(s);    o = kept * o + added * v;
//   const auto [kept, added] = state.merge(other); o = kept * o + added * other_o;   (leave out an empty side)
//   const T kept = state.raise(block_max);         o = kept * o; for each s: o += state.add(s) * v;
//
// and at the end multiplies by finalize().scale.
//
// A score of -inf adds nothing, also to an empty state and also if it is the only one; +inf shows as NaN.
// Differences to the maximum are all that is exponentiated: nothing overflows for finite scores.
template <typename T, typename Math = StandardMath>
struct SoftmaxState {
  struct Weights {
    T kept, added;  // factors of what the state had and of what came in; the larger one is 1
  };
  struct Result {
    T lse;    // log sum exp(s), natural; -inf if empty
    T scale;  // 1 / l, which makes weights sum to 1; 0 if empty
  };

  T m = streaming::minus_infinity<T>();
  T l = 0;

  // The state of a softmax that was finalized: weights relative to lse sum to 1. With it, results of
  // attention over disjoint keys, (out, lse) each, are merged.
  HEADRACE_HOST_DEVICE static constexpr SoftmaxState of_lse(T lse) {
    SoftmaxState state;
    state.m = lse;
    state.l = lse == streaming::minus_infinity<T>() ? T(0) : T(1);
    return state;
  }

  HEADRACE_HOST_DEVICE constexpr bool empty() const { return l == T(0); }

  // Makes the maximum at least `maximum`; returns the factor of everything that was summed before.
  HEADRACE_HOST_DEVICE constexpr T raise(T maximum) {
    const T kept = relative(m, maximum);
    m = streaming::max_or_nan(m, maximum);
    l *= kept;
    return kept;
  }

  // exp(score - m); score must not be above the maximum.
  HEADRACE_HOST_DEVICE constexpr T weight(T score) const {
    return score == streaming::minus_infinity<T>() ? T(0) : Math::exp(score - m);
  }

  // Sums one score that is not above the maximum; returns its weight.
  HEADRACE_HOST_DEVICE constexpr T add(T score) {
    const T added = weight(score);
    l += added;
    return added;
  }

  HEADRACE_HOST_DEVICE constexpr Weights update(T score) {
    const T kept = raise(score);
    return {kept, add(score)};
  }

  // A block of scores; returns the factor of what was summed before. weight() gives those of the block.
  HEADRACE_HOST_DEVICE constexpr T update(const T* scores, long long count) {
    T maximum = streaming::minus_infinity<T>();
    for (long long n = 0; n < count; ++n) maximum = streaming::max_or_nan(maximum, scores[n]);
    const T kept = raise(maximum);
    l += streaming::pairwise_sum<T>(0, count, [&](long long n) { return weight(scores[n]); });
    return kept;
  }

  HEADRACE_HOST_DEVICE constexpr Weights merge(const SoftmaxState& other) {
    const Weights w{relative(m, other.m), relative(other.m, m)};
    l = streaming::sum_scaled(m >= other.m, l, other.l, w.kept, w.added);
    m = streaming::max_or_nan(m, other.m);
    return w;
  }

  HEADRACE_HOST_DEVICE constexpr Result finalize() const {
    if (empty()) return {streaming::minus_infinity<T>(), T(0)};
    return {m + Math::log(l), T(1) / l};
  }

 private:
  // exp(a - max(a, b)), also where both are infinite.
  HEADRACE_HOST_DEVICE static constexpr T relative(T a, T b) { return a >= b ? T(1) : Math::exp(a - b); }
};

// A row of attention over Dim value components: softmax and weighted sum o, relative to the same maximum.
template <typename T, int Dim, typename Math = StandardMath>
struct AttentionState {
  SoftmaxState<T, Math> softmax;
  T o[Dim] = {};

  // value: [Dim]. A key whose score is -inf is hidden: not even a NaN in its value counts.
  HEADRACE_HOST_DEVICE constexpr void update(T score, const T* value) {
    if (score == streaming::minus_infinity<T>()) return;
    const auto [kept, added] = softmax.update(score);
    for (int n = 0; n < Dim; ++n) o[n] = kept * o[n] + added * value[n];
  }

  HEADRACE_HOST_DEVICE constexpr void merge(const AttentionState& other) {
    if (other.softmax.empty()) return;
    if (softmax.empty()) {
      *this = other;
      return;
    }
    const bool larger = softmax.m >= other.softmax.m;
    const auto [kept, added] = softmax.merge(other.softmax);
    for (int n = 0; n < Dim; ++n) o[n] = streaming::sum_scaled(larger, o[n], other.o[n], kept, added);
  }

  // Writes the softmax-weighted mean to out [Dim], zeros if empty; returns the log-sum-exp.
  HEADRACE_HOST_DEVICE constexpr T finalize(T* out) const {
    const auto [lse, scale] = softmax.finalize();
    for (int n = 0; n < Dim; ++n) out[n] = o[n] * scale;
    return lse;
  }
};

// Count, mean and m2, the sum of squared deviations from the mean. merge is the pairwise update of Chan,
// Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances", 1979),
// which loses nothing to a large common offset; equal values have variance 0 exactly. The differences
// between values, and m2, must fit T.
template <typename T>
struct Moments {
  struct Result {
    T mean;
    T variance;  // m2 / count; both 0 if empty
  };

  long long count = 0;
  T mean = 0;
  T m2 = 0;

  HEADRACE_HOST_DEVICE constexpr void update(T value) {
    ++count;
    const T delta = value - mean;
    mean += delta / static_cast<T>(count);
    m2 += delta * (value - mean);
  }

  HEADRACE_HOST_DEVICE constexpr void update(const T* values, long long size) {
    if (size <= 0) return;
    const T n = static_cast<T>(size), origin = values[0];
    Moments block;
    block.count = size;
    block.mean = origin + streaming::pairwise_sum<T>(0, size, [&](long long k) { return values[k] - origin; }) / n;
    const auto deviation = [&](long long k) { return values[k] - block.mean; };
    // The second term is 0 but for the rounding of the mean, which it makes up for.
    const T residue = streaming::pairwise_sum<T>(0, size, deviation);
    block.m2 = streaming::pairwise_sum<T>(0, size, [&](long long k) { return deviation(k) * deviation(k); }) -
               residue * (residue / n);
    if (block.m2 < T(0)) block.m2 = 0;
    merge(block);
  }

  HEADRACE_HOST_DEVICE constexpr void merge(const Moments& other) {
    if (other.count == 0) return;
    if (count == 0) {
      *this = other;
      return;
    }
    // Always from the side with more values (then the smaller mean) to the other, so that the result does not
    // depend on which side is merged into which.
    const bool swap = other.count > count || (other.count == count && other.mean < mean);
    const Moments &a = swap ? other : *this, &b = swap ? *this : other;
    const T share = static_cast<T>(b.count) / static_cast<T>(a.count + b.count);
    const T delta = b.mean - a.mean;
    const T merged_mean = a.mean + delta * share;
    const T merged_m2 = (a.m2 + b.m2) + delta * delta * (static_cast<T>(a.count) * share);
    count += other.count;
    mean = merged_mean;
    m2 = merged_m2;
  }

  HEADRACE_HOST_DEVICE constexpr Result finalize() const {
    return count == 0 ? Result{0, 0} : Result{mean, m2 / static_cast<T>(count)};
  }
};

// The K largest values with their indices, largest first. Of equal values the lower index ranks first, NaN ranks
// above every number: a total order, so that the result is the same, bit for bit, for every order of updates and
// merges. An index must not be given twice.
template <typename T, int K>
struct TopK {
  static_assert(K >= 1);
  struct Entry {
    T value = streaming::minus_infinity<T>();
    long long index = -1;  // -1: fewer than K values were given
  };

  Entry entry[K];

  HEADRACE_HOST_DEVICE constexpr void update(T value, long long index) { insert({value, index}); }

  // Values with the indices first_index, first_index + 1, ...
  HEADRACE_HOST_DEVICE constexpr void update(const T* values, long long count, long long first_index) {
    for (long long n = 0; n < count; ++n) insert({values[n], first_index + n});
  }

  HEADRACE_HOST_DEVICE constexpr void merge(const TopK& other) {
    for (int k = 0; k < K; ++k) {
      if (other.entry[k].index >= 0) insert(other.entry[k]);
    }
  }

  // How many entries are there: K, or all values if fewer were given.
  HEADRACE_HOST_DEVICE constexpr int size() const {
    int n = 0;
    while (n < K && entry[n].index >= 0) ++n;
    return n;
  }

  // [K]
  HEADRACE_HOST_DEVICE constexpr const Entry* finalize() const { return entry; }

 private:
  HEADRACE_HOST_DEVICE static constexpr bool before(const Entry& a, const Entry& b) {
    if (b.index < 0) return true;
    const bool a_nan = streaming::is_nan(a.value), b_nan = streaming::is_nan(b.value);
    if (a_nan != b_nan) return a_nan;
    if (!a_nan && a.value != b.value) return a.value > b.value;
    return a.index < b.index;
  }

  // Without early exit: with constant subscripts the entries stay in registers of a device.
  HEADRACE_HOST_DEVICE constexpr void insert(Entry candidate) {
    for (int k = 0; k < K; ++k) {
      if (!before(candidate, entry[k])) continue;
      const Entry displaced = entry[k];
      entry[k] = candidate;
      candidate = displaced;
    }
  }
};

}  // namespace headrace
