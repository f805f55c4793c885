// One gradient of attention by itself: of a float32 problem dq, dk or dv, and of any problem that of the bias. A block
// of threads has a tile of 64 queries or keys and walks over all tiles of the others, makes scores and dout . v again,
// and sums in registers: nothing is summed in device memory, and all is deterministic. It reads tensors of any strides
// where they lie.
//
// Products are those of tf32, 11 bits of a value. A float32 value is the sum of two, and a product that of three;
// 16-bit values are exact. The four warps have 16 rows each of the own tile.
//
// Constants of the compilation:
// - TARGET: 0 dq, 1 dk, 2 dv, 3 the gradient of the bias
// - FLOAT32, FLOAT16: the type of all tensors: float32, else float16 or bfloat16
// - COLUMNS: of dq, dk or dv that a block of threads sums: a head may have more
// - QUERIES: of a tile of the statistics
// - SMALL_SCALE, SOFTCAP, ALIBI, BIAS, MASK, BLOCK_MASK, DROPOUT: as in hopper_backward.cuh
#define HEADRACE_MMA_TYPE "bf16"
#include "backward_scores.cuh"
#include "hopper_backward_params.hpp"
#include "options.cuh"
#include "ptx/mma.cuh"

namespace headrace::cuda {

constexpr int kOfQueries = 0, kOfKeys = 1, kOfValues = 2, kOfBias = 3;
constexpr bool kOwnIsQueries = TARGET == kOfQueries || TARGET == kOfBias;
constexpr int kTile = 64, kChunk = 32, kThreads = 128;
constexpr int kPitch = kChunk + 4;  // of rows in shared memory: neighbours lie in different banks

// A value as a sum of what tf32 has, 11 bits each: a float32 has three such parts.
struct Parts {
  float high;
#if FLOAT32
  float middle, low;
#endif
  __device__ explicit Parts(float x) {
    high = ptx::cut_to_tf32(x);
#if FLOAT32
    const float rest = finite_or_zero(x - high);
    middle = ptx::cut_to_tf32(rest);
    low = rest - middle;
#endif
  }
  // An infinite value has no rest.
  __device__ static float finite_or_zero(float x) { return x - x == 0.0f ? x : 0.0f; }
};

// d += a b, of the parts' products those that count in float32. Tensor cores cut partial sums off, they do not round:
// so of each 8 terms the sum is made apart.
__device__ inline void multiply_add(float (&d)[4], const Parts (&a)[4], const Parts (&b)[2]) {
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const auto product = [&](auto of_a, auto of_b) {
    ptx::mma_tf32(sum, a[0].*of_a, a[1].*of_a, a[2].*of_a, a[3].*of_a, b[0].*of_b, b[1].*of_b);
  };
#if FLOAT32
  product(&Parts::low, &Parts::high);
  product(&Parts::middle, &Parts::middle);
  product(&Parts::high, &Parts::low);
  product(&Parts::middle, &Parts::high);
  product(&Parts::high, &Parts::middle);
#endif
  product(&Parts::high, &Parts::high);
#pragma unroll
  for (int e = 0; e < 4; ++e) d[e] += sum[e];
}

struct Shared {
  float own[kTile][kPitch], other[kTile][kPitch];
};

// A tensor's rows of one head.
struct HeadRows {
  const void* data;
  long long at, row_stride;
  int rows, columns;

  __device__ HeadRows(const BackwardTensor& t, int b, int h)
      : data(t.data),
        at(b * t.strides.s0 + h * t.strides.s2),
        row_stride(t.strides.s1),
        rows(t.rows),
        columns(t.columns) {}
  __device__ float value(int row, int column) const {
    const long long place = at + row * row_stride + column;
#if FLOAT32
    return static_cast<const float*>(data)[place];
#else
    return to_float(static_cast<const Element*>(data)[place]);
#endif
  }
  // Rows [row0, row0 + kTile) and columns [column0, column0 + kChunk); 0 outside the tensor.
  __device__ void load(float (&to)[kTile][kPitch], int row0, int column0) const {
    const int lane = static_cast<int>(threadIdx.x) & 31, column = column0 + lane;
    for (int r = static_cast<int>(threadIdx.x) / 32; r < kTile; r += kThreads / 32)
      to[r][lane] = row0 + r < rows && column < columns ? value(row0 + r, column) : 0.0f;
  }
};

// 16 rows of the own tile x 64 of the other: of every 8 columns a thread has 2 q and 2 q + 1 of two rows, 8 apart.
using Scores = float[kTile / 8][4];

struct Gradient {
  const BackwardGradientParams& p;
  Shared& shared;
  const int warp, lane;

  // to = own rows * other rows^T
  __device__ void multiply(Scores& to, const HeadRows& own, int own0, const HeadRows& other, int other0) const {
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) to[n][0] = to[n][1] = to[n][2] = to[n][3] = 0.0f;
    const int row = 16 * warp + lane / 4, column = lane & 3;
    for (int chunk = 0; chunk < own.columns; chunk += kChunk) {
      __syncthreads();
      own.load(shared.own, own0, chunk);
      other.load(shared.other, other0, chunk);
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kChunk; k += 8) {
        const Parts a[4] = {Parts(shared.own[row][k + column]), Parts(shared.own[row + 8][k + column]),
                            Parts(shared.own[row][k + column + 4]), Parts(shared.own[row + 8][k + column + 4])};
#pragma unroll
        for (int n = 0; n < kTile / 8; ++n) {
          const Parts b[2] = {Parts(shared.other[8 * n + lane / 4][k + column]),
                              Parts(shared.other[8 * n + lane / 4][k + column + 4])};
          multiply_add(to[n], a, b);
        }
      }
    }
  }

  // to += weights * other rows, from column0 on. The reduction takes the columns of weights in the order in which a
  // thread has them.
  __device__ void accumulate(float (&to)[COLUMNS / 8][4], const Scores& weights, const HeadRows& other, int other0,
                             int column0) const {
#pragma unroll
    for (int chunk = 0; chunk < COLUMNS; chunk += kChunk) {
      if (column0 + chunk >= other.columns) break;
      __syncthreads();
      other.load(shared.other, other0, column0 + chunk);
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
        const Parts a[4] = {Parts(weights[n][0]), Parts(weights[n][2]), Parts(weights[n][1]), Parts(weights[n][3])};
        const int row = 8 * n + 2 * (lane & 3);
#pragma unroll
        for (int c = 0; c < kChunk / 8; ++c) {
          const Parts b[2] = {Parts(shared.other[row][8 * c + lane / 4]),
                              Parts(shared.other[row + 1][8 * c + lane / 4])};
          multiply_add(to[chunk / 8 + c], a, b);
        }
      }
    }
  }

  struct Query {
    float minus_lse, minus_d;
  };
  __device__ Query query(const Head& head, int i) const {
    if (i >= p.forward.seqlen_q) return {minus_infinity(), 0.0f};
    const long long tile =
        (static_cast<long long>(head.b) * p.forward.heads_q.divisor + head.h) * p.query_tiles + i / QUERIES;
    const float* words = p.statistics + tile * statistics_words(QUERIES);
    const RowPair& pair = reinterpret_cast<const RowPair*>(words)[i % QUERIES / 2];
    return {pair.minus_lse[i & 1], pair.minus_d[i & 1]};
  }

  // Products become what the sum's right operand is weighted with: the gradient of scores, of the product before them,
  // or p.
  __device__ void finish(const Head& head, Scores& s, Scores& dp, int own0, int other0) const {
    const float slope = slope_of(p.forward, head);
    constexpr int kElementTurns = kLongOptions > 1 ? 8 : 1,
                  kGroups = kTile / 8 / kElementTurns;  // of 8 columns, of a turn
    const int own_row = own0 + 16 * warp + lane / 4, first = other0 + 2 * (lane & 3);
    const auto visible = visible_of_two<kTile / 4, kOwnIsQueries>(p.forward, head, kOwnIsQueries ? own_row : first,
                                                                  kOwnIsQueries ? first : own_row);
    const Kept<kTile / 8, kOwnIsQueries> kept_of(p.forward, head, own_row, first);
    HEADRACE_ROLLED
    for (int turn = 0; turn < kElementTurns; ++turn) {
      const int other_row = first + 8 * kGroups * turn;
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        const int other = other_row + 8 * n;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int own = own_row + 8 * r;
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int i = kOwnIsQueries ? own : other + c, j = kOwnIsQueries ? other + c : own;
            float& score = s[n][2 * r + c];
            const Query of = query(head, i);
            float derivative;
            const float probability =
                probability_of(p.forward, slope, score, bias_near(p.forward, head, i, j), of.minus_lse, i, j,
                               visible(r, 2 * (kGroups * turn + n) + c), derivative);
            const float kept = kept_of.factor(p.forward, 4 * (kGroups * turn + n) + 2 * r + c);
            score = TARGET == kOfValues ? probability * kept
                                        : score_gradient(probability, dp[n][2 * r + c], kept, of.minus_d,
                                                         TARGET == kOfBias ? 1.0f : derivative);
          }
        }
      }
      next_turn<kElementTurns>(s, dp);
    }
  }

  // Weights of a tile of queries and one of keys.
  __device__ void make_weights(Scores& s, const Head& head, int own0, int other0) const {
    const int head_kv = static_cast<int>(p.group.quotient(head.h));
    const HeadRows q(p.q, head.b, head.h), k(p.k, head.b, head_kv);
    kOwnIsQueries ? multiply(s, q, own0, k, other0) : multiply(s, k, own0, q, other0);
    Scores dp;  // of dv: not used
    if constexpr (TARGET != kOfValues) {
      const HeadRows dout(p.dout, head.b, head.h), v(p.v, head.b, head_kv);
      kOwnIsQueries ? multiply(dp, dout, own0, v, other0) : multiply(dp, v, own0, dout, other0);
    }
    finish(head, s, dp, own0, other0);
  }

  __device__ bool hidden(const Head& head, int i0, int j0) const {
    if (i0 >= p.forward.seqlen_q || j0 >= p.forward.seqlen_k) return true;
    return visibility(p.forward, head)
               .classify({i0, min(i0 + kTile, p.forward.seqlen_q)}, {j0, min(j0 + kTile, p.forward.seqlen_k)}) ==
           TileKind::hidden;
  }

  // dq, dk or dv: rows [own0, ...) of a head, query or key-value, from column0 on.
  __device__ void sum_rows(int b, int h, int own0, int column0) const {
    float sum[COLUMNS / 8][4];
#pragma unroll
    for (int c = 0; c < COLUMNS / 8; ++c) sum[c][0] = sum[c][1] = sum[c][2] = sum[c][3] = 0.0f;
    const int group = static_cast<int>(p.group.divisor),
              others = kOwnIsQueries ? p.forward.seqlen_k : p.forward.seqlen_q;
    for (int g = 0; g < (kOwnIsQueries ? 1 : group); ++g) {
      const Head head{kOwnIsQueries ? h : h * group + g, b};
      const int head_kv = kOwnIsQueries ? static_cast<int>(p.group.quotient(h)) : h;
      for (int other0 = 0; other0 < others; other0 += kTile) {
        if (kOwnIsQueries ? hidden(head, own0, other0) : hidden(head, other0, own0)) continue;
        Scores weights;
        make_weights(weights, head, own0, other0);
        accumulate(
            sum, weights,
            TARGET == kOfQueries ? HeadRows(p.k, b, head_kv) : HeadRows(TARGET == kOfKeys ? p.q : p.dout, b, head.h),
            other0, column0);
      }
    }
    const float factor = TARGET == kOfValues ? 1.0f : p.forward.scale;
    const int rows = kOwnIsQueries ? p.forward.seqlen_q : p.forward.seqlen_k;
#pragma unroll
    for (int c = 0; c < COLUMNS / 8; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = own0 + 16 * warp + lane / 4 + 8 * (e / 2), column = column0 + 8 * c + 2 * (lane & 3) + e % 2;
        if (row < rows && column < p.to.columns)
          static_cast<float*>(p.to.to)[b * p.to.strides.s0 + row * p.to.strides.s1 + h * p.to.strides.s2 + column] =
              sum[c][e] * factor;
      }
    }
  }

  // The gradient of the bias: of batch entry bb and head hh, query tile i0 and key tile j0, or of all where it is
  // broadcast.
  __device__ void sum_bias(int bb, int hh, int i0, int j0) const {
    const bool *full = p.bias_is_full, all_b = !full[0], all_h = !full[1], all_i = !full[2], all_j = !full[3];
    Scores sum;
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.0f;
    for (int b = all_b ? 0 : bb; b < (all_b ? p.batch : bb + 1); ++b) {
      for (int h = all_h ? 0 : hh; h < (all_h ? p.heads_q : hh + 1); ++h) {
        const Head head{h, b};
        for (int i = i0; i < (all_i ? p.forward.seqlen_q : i0 + 1); i += kTile) {
          for (int j = j0; j < (all_j ? p.forward.seqlen_k : j0 + 1); j += kTile) {
            if (hidden(head, i, j)) continue;
            Scores weights;
            make_weights(weights, head, i, j);
#pragma unroll
            for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
              for (int e = 0; e < 4; ++e) sum[n][e] += weights[n][e];
            }
          }
        }
      }
    }
    // By way of shared memory, where one thread sums what becomes one element.
    float(&tile)[kTile][kTile + 1] = *reinterpret_cast<float(*)[kTile][kTile + 1]>(&shared);
    static_assert(sizeof(tile) <= sizeof(Shared));
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) tile[16 * warp + lane / 4 + 8 * (e / 2)][8 * n + 2 * (lane & 3) + e % 2] = sum[n][e];
    }
    __syncthreads();
    const int rows = all_i ? 1 : min(kTile, p.forward.seqlen_q - i0),
              columns = all_j ? 1 : min(kTile, p.forward.seqlen_k - j0);
    for (int n = static_cast<int>(threadIdx.x); n < rows * columns; n += kThreads) {
      const int r = n / columns, c = n % columns;
      float total = 0.0f;
      for (int row = all_i ? 0 : r; row < (all_i ? kTile : r + 1); ++row)
        for (int column = all_j ? 0 : c; column < (all_j ? kTile : c + 1); ++column) total += tile[row][column];
      const long long at = bb * p.dbias_strides.batch + hh * p.dbias_strides.head + (i0 + r) * p.dbias_strides.row +
                           (j0 + c) * p.dbias_strides.key;
      if constexpr (BIAS == 2) {
        static_cast<float*>(p.to.to)[at] = total;
      } else {
        static_cast<Element*>(p.to.to)[at] = to_element(total);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    backward_gradient(const __grid_constant__ BackwardGradientParams p) {
  __shared__ Shared shared;
  const int thread = static_cast<int>(threadIdx.x);
  const Gradient gradient{p, shared, thread / 32, thread & 31};
  // Grid: tiles of a head, or of an entry of the bias; heads; batch.
  const unsigned outer = p.tiles.quotient(blockIdx.x);
  const int tile = static_cast<int>(blockIdx.x - outer * p.tiles.divisor);
  const int b = static_cast<int>(p.heads.quotient(outer)), h = static_cast<int>(outer - b * p.heads.divisor);
  if constexpr (TARGET == kOfBias) {
    const int row = tile / p.bias_key_tiles;
    gradient.sum_bias(b, h, row * kTile, (tile - row * p.bias_key_tiles) * kTile);
  } else {
    const int chunk = tile % p.column_chunks;
    gradient.sum_rows(b, h, tile / p.column_chunks * kTile, chunk * COLUMNS);
  }
}

}  // namespace headrace::cuda
