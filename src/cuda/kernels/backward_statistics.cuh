// What the backward pass asks of each query row before it begins: see RowPair. Sets its accumulators and counters to
// zero on the way.
//
// Constants of the compilation: FLOAT32, FLOAT16: the type of out and dout: float32, else float16 or bfloat16;
// QUERIES, rows of a query tile; LANES, that share a row: 8 columns for each.
#include "element.cuh"
#include "hopper_backward_params.hpp"

namespace headrace::cuda {

constexpr int kThreads = 256, kRowsAtOnce = kThreads / LANES;
constexpr int kBatch = 4 * kRowsAtOnce <= QUERIES ? 4 : QUERIES / kRowsAtOnce;
// Beyond this the rounding of an lse is worth more than 2^-2 in an exponent.
constexpr float kLargeLse = 0x1p21f;

// 8 columns of a row, as they are in memory.
struct Chunk {
  static constexpr int kWords = FLOAT32 ? 8 : 4;
  unsigned word[kWords];

  __device__ float operator[](int n) const {
#if FLOAT32
    return __uint_as_float(word[n]);
#else
    return of_pair(word[n / 2], n % 2);
#endif
  }
};

// Columns [8 lane, 8 lane + 8) of the row at `at`; 0 behind its end. kWhole: there is none, and 16 bytes can be read at
// once.
template <bool kWhole>
__device__ inline Chunk load_columns(const BackwardStatisticsParams& p, const void* data, long long at, int lane) {
  Chunk chunk;
#if FLOAT32
  const float* row = static_cast<const float*>(data) + at + 8 * lane;
#else
  const Element* row = static_cast<const Element*>(data) + at + 8 * lane;
#endif
  if constexpr (kWhole) {
#pragma unroll
    for (int n = 0; n < Chunk::kWords; n += 4) {
      const uint4 four = __ldg(reinterpret_cast<const uint4*>(row) + n / 4);
      chunk.word[n] = four.x;
      chunk.word[n + 1] = four.y;
      chunk.word[n + 2] = four.z;
      chunk.word[n + 3] = four.w;
    }
  } else {
    const auto element = [&](int n) { return 8 * lane + n < p.value_dim ? row[n] : 0; };
#pragma unroll
    for (int n = 0; n < Chunk::kWords; ++n) {
#if FLOAT32
      chunk.word[n] = __float_as_uint(element(n));
#else
      chunk.word[n] = static_cast<unsigned>(element(2 * n)) | static_cast<unsigned>(element(2 * n + 1)) << 16;
#endif
    }
  }
  return chunk;
}

// Rows first, first + kRowsAtOnce, ... of tile m, on their way from memory together. Whether one has a large lse.
template <bool kWhole>
__device__ inline bool make_rows(const BackwardStatisticsParams& p, int h, int b, int m, int first, float* to) {
  const int lane = static_cast<int>(threadIdx.x) % LANES;
  Chunk out[kBatch] = {}, dout[kBatch] = {};
  float lse[kBatch], dlse[kBatch] = {};
#pragma unroll
  for (int n = 0; n < kBatch; ++n) {
    const int i = m * QUERIES + first + n * kRowsAtOnce;
    lse[n] = minus_infinity();
    if (i >= p.seqlen_q) continue;
    const auto at = [&](const HopperForwardParams::Strides3& strides, int second, int third) {
      return b * strides.s0 + second * strides.s1 + third * strides.s2;
    };
    out[n] = load_columns<kWhole>(p, p.out, at(p.out_strides, i, h), lane);
    dout[n] = load_columns<kWhole>(p, p.dout, at(p.dout_strides, i, h), lane);
    lse[n] = p.lse[at(p.lse_strides, h, i)];
    if (p.dlse != nullptr) dlse[n] = p.dlse[at(p.dlse_strides, h, i)];
  }
  bool large = false;
#pragma unroll
  for (int n = 0; n < kBatch; ++n) {
    float d = 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) d = fmaf(out[n][c], dout[n][c], d);
    for (int distance = LANES / 2; distance > 0; distance /= 2) d += __shfl_xor_sync(~0u, d, distance);
    const bool empty = lse[n] == minus_infinity();
    large = large || (!empty && !(fabsf(lse[n]) <= kLargeLse));
    if (lane != 0) continue;
    const int r = first + n * kRowsAtOnce;
    float* pair = to + (r / 2) * (sizeof(RowPair) / sizeof(float)) + (r & 1);
    pair[0] = empty ? minus_infinity() : -lse[n] * p.lse_factor;
    pair[2] = empty ? 0.0f : dlse[n] - d;
  }
  return large;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    backward_statistics(const __grid_constant__ BackwardStatisticsParams p) {
  const int thread = static_cast<int>(threadIdx.x);
  const unsigned head = p.query_tiles.quotient(blockIdx.x);
  const int m = static_cast<int>(blockIdx.x - head * p.query_tiles.divisor);
  const int b = static_cast<int>(p.heads_q.quotient(head)), h = static_cast<int>(head - b * p.heads_q.divisor);
  float* to = p.statistics + static_cast<long long>(blockIdx.x) * statistics_words(QUERIES);
  const bool whole = p.vectors != 0 && p.value_dim == 8 * LANES;
  bool large = false;
  for (int first = thread / LANES; first < QUERIES; first += kBatch * kRowsAtOnce) {
    const bool some = whole ? make_rows<true>(p, h, b, m, first, to) : make_rows<false>(p, h, b, m, first, to);
    large = large || some;
  }
  const bool any_large = __syncthreads_or(large) != 0;
  if (thread < kTileWords) to[2 * QUERIES + thread] = any_large ? 1.0f : 0.0f;
  if (p.turns != nullptr && thread == 0) {
    p.turns[blockIdx.x] = 0;
    if (blockIdx.x == 0) *p.tickets = 0;
  }
  if (p.dq != nullptr) {
    float4* dq = reinterpret_cast<float4*>(p.dq + static_cast<long long>(blockIdx.x) * p.dq_floats);
    for (int n = thread; n < p.dq_floats / 4; n += kThreads) dq[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

}  // namespace headrace::cuda
