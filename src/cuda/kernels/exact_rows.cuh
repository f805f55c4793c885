// Rows of attention without tensor cores, for float32 inputs of any magnitude: what hopper_split_forward.cuh falls back
// on. Slow, and meant to be rare.
//
// Constants of the compilation, beside those of forward_scores.cuh: VALUE_DIM, SINKS, DROPOUT, as in
// hopper_split_forward.cuh.
#pragma once

#include "forward_scores.cuh"
#include "hopper_split_forward_params.hpp"

namespace headrace::cuda {

constexpr int kColumnsOfLane = VALUE_DIM / 32;
// That are worked on at a time. Their code is half of a plain kernel, and grows with every option.
constexpr bool kAnyOption = SOFTCAP || ALIBI || BIAS || MASK || BLOCK_MASK || DROPOUT;
constexpr int kExactRows = kAnyOption ? 4 : kRowsOfWarp;
// Values from 2^64 on are summed times 2^-64: sums of p v could overflow where their mean does not.
constexpr float kLargeValue = 0x1p64f, kLargeValueScale = 0x1p-64f;

// Where a chunk of VALUE_DIM columns of a row of out begins.
__device__ inline float* row_of_out(const HopperSplitForwardParams& p, const Tile& tile, int chunk, int row) {
  const Params& forward = p.forward;
  return static_cast<float*>(forward.out) + tile.b * forward.out_strides.s0 + row * forward.out_strides.s1 +
         tile.h * forward.out_strides.s2 + chunk * VALUE_DIM;
}
__device__ inline void write_lse(const Params& p, const Tile& tile, int row, float lse) {
  if (p.lse == nullptr || row >= p.seqlen_q) return;
  p.lse[tile.b * p.lse_strides.s0 + tile.h * p.lse_strides.s1 + row * p.lse_strides.s2] = lse;
}

__device__ inline double double_infinity() { return __longlong_as_double(0x7FF0000000000000LL); }
// e^difference, which is at most 0. In two factors: as a float a large exponent would be rounded.
__device__ inline float exact_exponential(double difference) {
  const double exact = difference * 1.4426950408889634;
  const double exponent = exact < -1000.0 ? -1000.0 : exact, whole = rint(exponent);  // of -inf nothing is whole
  return ptx::exp2(static_cast<float>(whole)) * ptx::exp2(static_cast<float>(exponent - whole));
}
// The largest magnitude of the values of these keys; NaN may be passed over. The same in all lanes.
__device__ inline float largest_value(const SplitTensor& v, int batch, int head, Range keys) {
  const SplitGroup* groups = v.groups + (static_cast<long long>(batch) * v.heads + head) * v.groups_of_head;
  float largest = 0.0f;
  for (int n = keys.begin / kKeys + lane_of_thread(); n < ceil_div(keys.end, kKeys); n += 32)
    largest = fmaxf(largest, groups[n].largest);
  for (int distance = 16; distance > 0; distance /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
  return largest;
}
// sum * inverse / scale. An average of finite values is finite, also where its rounding would not be.
__device__ inline float average(float sum, float inverse, float scale) {
  constexpr float kLargest = 3.40282347e38f;
  const float x = sum * inverse / scale;
  return DROPOUT || !(fabsf(sum) <= kLargest) ? x : fminf(fmaxf(x, -kLargest), kLargest);
}
__device__ inline double exact_score(const Params& p, const Tile& tile, float slope, double product, int i, int j) {
  double x = product * static_cast<double>(p.scale);
  if constexpr (SOFTCAP) x = static_cast<double>(p.softcap) * tanh(x / static_cast<double>(p.softcap));
  if constexpr (BIAS) x += static_cast<double>(bias_of(p, tile, i, j));
  if constexpr (ALIBI) x -= static_cast<double>(slope) * abs(distance(p, i, j));
  return x;
}

// Up to kExactRows rows of a tile, from row0 on, by one warp: each lane has one of 32 keys while scores are made, in
// float64, which no product of floats overflows; then every 32nd column of the output.
__device__ inline void exact_rows(const HopperSplitForwardParams& p, const Tile& tile, int chunk, int row0,
                                  float slope) {
  const Params& forward = p.forward;
  const int h = tile.h, head_kv = static_cast<int>(forward.group.quotient(h));
  const int lane = lane_of_thread(), count = min(kExactRows, forward.seqlen_q - row0);
  const float* q = p.q.from + tile.b * p.q.batch_stride + h * p.q.head_stride + row0 * p.q.row_stride;
  const float* k = p.k.from + tile.b * p.k.batch_stride + head_kv * p.k.head_stride;
  const float* v = p.v.from + tile.b * p.v.batch_stride + head_kv * p.v.head_stride + chunk * VALUE_DIM;
  const Visibility vis = visibility(forward, tile);
  const Range keys = vis.keys_of_rows({row0, row0 + count});
  const float value_scale = largest_value(p.v, tile.b, head_kv, keys) < kLargeValue ? 1.0f : kLargeValueScale;
  double top[kExactRows];
  float sum[kExactRows], out[kExactRows][kColumnsOfLane];
#pragma unroll
  for (int r = 0; r < kExactRows; ++r) {
    top[r] = -double_infinity();
    sum[r] = 0.0f;
#pragma unroll
    for (int c = 0; c < kColumnsOfLane; ++c) out[r][c] = 0.0f;
  }
  for (Index begin = keys.begin; begin < keys.end; begin += 32) {
    const int j = begin + lane;
    double x[kExactRows];
#pragma unroll
    for (int r = 0; r < kExactRows; ++r) x[r] = 0.0;
    if (j < keys.end) {
#pragma unroll 1
      for (int c = 0; c < p.head_dim; ++c) {
        const double key = k[j * p.k.row_stride + c];
#pragma unroll
        for (int r = 0; r < kExactRows; ++r)
          x[r] = fma(static_cast<double>(q[min(r, count - 1) * p.q.row_stride + c]), key, x[r]);
      }
    }
    float weight[kExactRows];
    unsigned seen[kExactRows];  // by lane: whether the key is visible to the row
#pragma unroll
    for (int r = 0; r < kExactRows; ++r) {
      const int i = row0 + r;
      const bool visible = r < count && j < keys.end && vis.band.visible(i, j) &&
                           (!(MASK || BLOCK_MASK) || visible_by_data(forward, tile, i, j));
      seen[r] = __ballot_sync(~0u, visible);
      const double score = visible ? exact_score(forward, tile, slope, x[r], i, j) : -double_infinity();
      double highest = score;
      for (int distance = 16; distance > 0; distance /= 2)
        highest = fmax(highest, __shfl_xor_sync(~0u, highest, distance));
      const double raised = fmax(top[r], highest);
      const float kept = raised == -double_infinity() ? 1.0f : exact_exponential(top[r] - raised);
      top[r] = raised;
      weight[r] = score == -double_infinity() ? 0.0f : exact_exponential(score - raised);
      sum[r] = fmaf(sum[r], kept, weight[r]);
      if constexpr (DROPOUT) {
        const Dropout dropout{0.0, forward.seed};
        if (dropout.block(tile.b, h, i, j).word[2 * (i & 1) + (j & 1)] < forward.dropout_threshold) weight[r] = 0.0f;
      }
#pragma unroll
      for (int c = 0; c < kColumnsOfLane; ++c) out[r][c] *= kept;
    }
    // Summed apart: the sum over all keys would gather rounding errors.
    float block[kExactRows][kColumnsOfLane] = {};
#pragma unroll 1
    for (int n = 0; n < 32 && begin + n < keys.end; ++n) {
      float value[kColumnsOfLane];
#pragma unroll
      for (int c = 0; c < kColumnsOfLane; ++c) {
        const int column = lane + 32 * c;
        value[c] = chunk * VALUE_DIM + column < forward.value_dim
                       ? value_scale * v[(begin + n) * p.v.row_stride + column]
                       : 0.0f;
      }
#pragma unroll
      for (int r = 0; r < kExactRows; ++r) {
        const float of_key = __shfl_sync(~0u, weight[r], n);
        if ((seen[r] >> n & 1) == 0) continue;
#pragma unroll
        for (int c = 0; c < kColumnsOfLane; ++c) block[r][c] = fmaf(of_key, value[c], block[r][c]);
      }
    }
#pragma unroll
    for (int r = 0; r < kExactRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumnsOfLane; ++c) out[r][c] += block[r][c];
    }
  }
#pragma unroll
  for (int r = 0; r < kExactRows; ++r) {
    if (r >= count) break;
    float total = sum[r];
    for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(~0u, total, distance);
    // Under a high sink large values may be a number where their weight is none: it is applied in two halves.
    float half = 1.0f;
    if constexpr (SINKS) {
      const double sink = static_cast<double>(forward.sinks[h * forward.sinks_stride]), highest = fmax(top[r], sink);
      if (highest != -double_infinity()) {
        half = exact_exponential(0.5 * (top[r] - highest));
        total = total * half * half + exact_exponential(sink - highest);
        top[r] = highest;
      }
    }
    const float inverse = total == 0.0f ? 0.0f : half * (DROPOUT ? forward.dropout_kept : 1.0f) / total;
#pragma unroll
    for (int c = 0; c < kColumnsOfLane; ++c) {
      const int column = lane + 32 * c;
      if (chunk * VALUE_DIM + column < forward.value_dim)
        row_of_out(p, tile, chunk, row0 + r)[column] = average(out[r][c] * half, inverse, value_scale);
    }
    const double log_sum = static_cast<double>(log2_of(total)) * 0.6931471805599453;
    if (lane == 0 && chunk == 0)
      write_lse(forward, tile, row0 + r, total == 0.0f ? minus_infinity() : static_cast<float>(top[r] + log_sum));
  }
  __syncwarp();
}

// The rows of a warp, from row0 on.
__device__ inline void exact_rows_of_warp(const HopperSplitForwardParams& p, const Tile& tile, int chunk, int row0,
                                          float slope) {
  HEADRACE_ROLLED
  for (int n = 0; n < kRowsOfWarp; n += kExactRows) exact_rows(p, tile, chunk, row0 + n, slope);
}

}  // namespace headrace::cuda
