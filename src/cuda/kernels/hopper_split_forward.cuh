// Attention forward for Hopper, float32: tensor cores multiply 16-bit values, so q, k and v come as the two float16
// parts that split_rows.cuh made of them, and of the four products of parts the three large ones are summed, the large
// one last. p is split in registers. The products p v of a block are summed apart and then added to the output in
// float32: tensor cores truncate each partial sum, which over a long sequence would show.
//
// The parts have a common unit for a group of rows, and are exact to 2^-39 of its largest value only. Where that may
// show in a score or in the output, the warp computes its 16 rows again from the float32 values, without tensor cores:
// exact_rows(). The same where a result is not finite.
//
// One thread brings the parts by TMA; each of WARPGROUPS warpgroups has 64 query rows. VALUE_DIM columns of v at a
// time: wider heads are several tiles, each with scores of its own.
//
// Constants of the compilation, beside those of forward_tiles.cuh and forward_scores.cuh:
// - HEAD_DIM, VALUE_DIM: multiples of 16 and 32; TMA fills smaller dimensions up with zeros. VALUE_DIM is at most 128
// - STAGES, Q_IN_REGISTERS (the large part), PRODUCER_REGISTERS, CONSUMER_REGISTERS: see HopperForwardTile
// - SINKS, DROPOUT: options in use
#define FLOAT16 1
#define HEADRACE_MMA_TYPE "f16"
#include "exact_rows.cuh"
#include "forward_pipeline.cuh"
#include "forward_scores.cuh"
#include "forward_tiles.cuh"
#include "hopper_split_forward_params.hpp"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace headrace::cuda {

using SplitParams = HopperSplitForwardParams;

constexpr int kParts = 2;  // 0: the large one
// p is at most 2^14: its small part then reaches down to 2^-38 of that.
constexpr float kOffset = 14.0f, kWithoutOffset = 0x1p-14f;
// Errors of 2^-39 of the largest values are below 2^-24 of a score of 1 up to here.
constexpr float kLargestProducts = 16384.0f, kLargestValues = 32768.0f;

struct alignas(1024) Shared {
  Element q[WARPGROUPS][kParts][kHeadPanels][kRowsOfWarpgroup * kPanel];
  Element k[STAGES][kParts][kHeadPanels][kKeys * kPanel];
  Element v[STAGES][kParts][kValuePanels][kKeys * kPanel];
  unsigned long long q_full[1], q_empty[1];
  unsigned long long k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

extern "C" __constant__ unsigned dynamic_shared_bytes = sizeof(Shared);

// A tile of a head's chunk of value columns.
struct ChunkTile : Tile {
  int chunk;
};
__device__ inline Find next_chunk_tile(const SplitParams& p, TileWalk& walk, ChunkTile& tile) {
  const Find found = walk.next(p.forward, tile);
  const int h = static_cast<int>(p.value_chunks.quotient(tile.h));
  tile.chunk = tile.h - h * static_cast<int>(p.value_chunks.divisor);
  tile.h = h;
  return found;
}

// ---- the producer: one thread ----

struct Producer {
  const SplitParams& p;
  const ptx::TensorMap &q, &k, &v;
  Shared& shared;
  unsigned q_parity = 0;
  ptx::RingPosition<STAGES> k_ring, v_ring;

  template <int kPanels>
  __device__ void load_block(Element (&slots)[STAGES][kParts][kPanels][kKeys * kPanel],
                             unsigned long long (&full)[STAGES], unsigned long long (&empty)[STAGES],
                             ptx::RingPosition<STAGES>& ring, const ptx::TensorMap& map, int first_column,
                             const ChunkTile& tile, int block) {
    const unsigned barrier = ptx::shared_address(&full[ring.slot]);
    ptx::mbarrier_wait(ptx::shared_address(&empty[ring.slot]), ring.parity ^ 1);
    ptx::mbarrier_expect(barrier, sizeof(slots[0]));
    for (int part = 0; part < kParts; ++part) {
      for (int panel = 0; panel < kPanels; ++panel) {
        ptx::tma_load(ptx::shared_address(slots[ring.slot][part][panel]), map, barrier, first_column + panel * kPanel,
                      block * kKeys, p.forward.group.quotient(tile.h), part * p.batch + tile.b);
      }
    }
    ring.advance();
  }
  __device__ void load_k(const ChunkTile& tile, int block) {
    load_block(shared.k, shared.k_full, shared.k_empty, k_ring, k, 0, tile, block);
  }
  __device__ void load_v(const ChunkTile& tile, int block) {
    load_block(shared.v, shared.v_full, shared.v_empty, v_ring, v, tile.chunk * VALUE_DIM, tile, block);
  }

  __device__ void run() {
    ChunkTile tile;
    for (TileWalk walk;;) {
      const Find found = next_chunk_tile(p, walk, tile);
      if (found == Find::end) return;
      if (found == Find::nothing) continue;
      Blocks blocks(p.forward, tile);
      const unsigned full = ptx::shared_address(&shared.q_full[0]);
      ptx::mbarrier_wait(ptx::shared_address(&shared.q_empty[0]), q_parity ^ 1);
      q_parity ^= 1;
      ptx::mbarrier_expect(full, sizeof(shared.q));
      for (int w = 0; w < WARPGROUPS; ++w) {
        for (int part = 0; part < kParts; ++part) {
          for (int panel = 0; panel < kHeadPanels; ++panel) {
            ptx::tma_load(ptx::shared_address(shared.q[w][part][panel]), q, full, panel * kPanel,
                          tile.m * kRows + w * kRowsOfWarpgroup, tile.h, part * p.batch + tile.b);
          }
        }
      }
      for (; blocks.any(); blocks.advance()) {
        load_k(tile, blocks.next);
        load_v(tile, blocks.next);
      }
    }
  }
};

// ---- the consumers: a warpgroup with 64 rows ----

struct Consumer {
  const SplitParams& p;
  Shared& shared;
  const int warpgroup, warp, lane;
  unsigned q_parity = 0;
  ptx::RingPosition<STAGES> k_ring, v_ring;

  float s[kKeys / 2];             // scores of a block, then p
  float products[VALUE_DIM / 2];  // p v of a block
  float o[VALUE_DIM / 2];
  unsigned probabilities[kParts][kKeys / 4];
  unsigned q_large[Q_IN_REGISTERS ? HEAD_DIM / 16 : 1][4];

  struct Rows : ThreadRows {
    float reference[2];  // the maximum of what was seen, in units of log2; -inf: no key was seen
    float sum[2];        // of p: this thread's share
    float reach[2];      // of p times the largest value of its block
  };
  Rows rows;
  int chunk = 0;
  bool exact = false;  // the parts do: this warp's rows are not to be computed again

  // The three products of parts that count, the largest last.
  __device__ static constexpr int left_part(int product) { return product == 0 ? 1 : 0; }
  __device__ static constexpr int right_part(int product) { return product == 1 ? 1 : 0; }

  __device__ void multiply_qk() {
    constexpr unsigned kPartOfQ = sizeof(shared.q[0][0]) / 16, kPartOfK = sizeof(shared.k[0][0]) / 16;
    // The number of the warpgroup found anew: it would be kept in local memory.
    const unsigned q = ptx::descriptor_low(ptx::shared_address(shared.q[uniform(threadIdx.x / 128)]), 16);
    const unsigned k =
        ptx::descriptor_low(ptx::shared_address(shared.k), 16) + uniform(k_ring.slot) * (sizeof(shared.k[0]) / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int product = 0; product < 3; ++product) {
#pragma unroll
      for (int step = 0; step < HEAD_DIM / 16; ++step) {
        const unsigned long long left = ptx::descriptor(q + left_part(product) * kPartOfQ +
                                                        (step / 4) * (kRowsOfWarpgroup * 128 / 16) + (step % 4) * 2);
        const unsigned long long right =
            ptx::descriptor(k + right_part(product) * kPartOfK + (step / 4) * (kKeys * 128 / 16) + (step % 4) * 2);
        const unsigned(&a)[4] = q_large[Q_IN_REGISTERS ? step : 0];
        if (product == 0 && step == 0) {
          ptx::Wgmma<kKeys>::ss<0, 0>(s, left, right);
        } else if (Q_IN_REGISTERS && left_part(product) == 0) {
          ptx::Wgmma<kKeys>::rs<1, 0>(s, a[0], a[1], a[2], a[3], right);
        } else {
          ptx::Wgmma<kKeys>::ss<1, 0>(s, left, right);
        }
      }
    }
    ptx::wgmma_commit();
  }

  __device__ void multiply_pv() {
    constexpr unsigned kPartOfV = sizeof(shared.v[0][0]) / 16;
    const unsigned v = ptx::descriptor_low(ptx::shared_address(shared.v), kKeys * 128) +
                       uniform(v_ring.slot) * (sizeof(shared.v[0]) / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int product = 0; product < 3; ++product) {
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) {
        const unsigned(&a)[kKeys / 4] = probabilities[left_part(product)];
        const unsigned long long right = ptx::descriptor(v + right_part(product) * kPartOfV + step * (16 * 128 / 16));
        if (product == 0 && step == 0) {
          ptx::Wgmma<VALUE_DIM>::rs<0, 1>(products, a[0], a[1], a[2], a[3], right);
        } else {
          ptx::Wgmma<VALUE_DIM>::rs<1, 1>(products, a[4 * step], a[4 * step + 1], a[4 * step + 2], a[4 * step + 3],
                                          right);
        }
      }
    }
    ptx::wgmma_commit();
  }

  // The groups of a head's rows.
  __device__ const SplitGroup* groups_of(const SplitTensor& t, int head) const {
    return t.groups + (static_cast<long long>(rows.tile.b) * t.heads + head) * t.groups_of_head;
  }

  // -- softmax --

  // Rounded, so that kOffset less it is exact where that is as large as kOffset: lse would show what it is not.
  __device__ static float as_reference(float x) { return __fadd_rn(__fadd_rn(x, 12.0f), -12.0f); }

  // s becomes p, in its parts. factor: what o is to be scaled by.
  __device__ void exponentiate(float (&factor)[2], float largest_value) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = s[2 * r];
#pragma unroll
      for (int n = 1; n < kKeys / 4; ++n) top = fmaxf(top, s[4 * (n / 2) + 2 * r + n % 2]);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float raised = fmaxf(rows.reference[r], as_reference(top * kLog2E));
      exact = exact && (top * kLog2E != minus_infinity() || top == minus_infinity());
      factor[r] = raised == minus_infinity() ? 1.0f : ptx::exp2(rows.reference[r] - raised);
      rows.reference[r] = raised;
      const float minus = raised == minus_infinity() ? 0.0f : kOffset - raised;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeys / 4; ++n) {
        float& x = s[4 * (n / 2) + 2 * r + n % 2];
        x = ptx::exp2(fmaf(x, kLog2E, minus));
        sum += x;
      }
      rows.sum[r] = fmaf(rows.sum[r], factor[r], sum);
      rows.reach[r] = fmaf(rows.reach[r], factor[r], sum * largest_value);
    }
  }
  __device__ void split_probabilities() {
#pragma unroll
    for (int n = 0; n < kKeys / 4; ++n) {
      const unsigned large = ptx::pack(s[2 * n], s[2 * n + 1]);
      probabilities[0][n] = large;
      probabilities[1][n] = ptx::pack(s[2 * n] - to_float(static_cast<Element>(large)),
                                      s[2 * n + 1] - to_float(static_cast<Element>(large >> 16)));
    }
  }

  // -- blocks and tiles --

  __device__ void step(const SplitGroup& of_q, const SplitGroup* k_groups, const SplitGroup* v_groups, int block,
                       bool is_edge) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.k_full[k_ring.slot]), k_ring.parity);
    multiply_qk();
    const SplitGroup of_k = k_groups[block], of_v = v_groups[block];  // from device memory, meanwhile
    const float products_reach = fabsf(p.forward.scale) * (of_q.row_sum * of_k.largest + of_q.largest * of_k.row_sum);
    exact = exact && products_reach <= kLargestProducts;
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    release(shared.k_empty[k_ring.slot], lane);
    k_ring.advance();

    finish_scores(p.forward, rows, block, s, nan_if_infinite(scale_of(p.forward) * of_q.unit * of_k.unit),
                  BiasInMemory{p.forward, rows, block});
    if (is_edge || MASK) mask_scores(p.forward, rows, block, s);
    float factor[2];
    exponentiate(factor, of_v.largest);
    if constexpr (DROPOUT) drop_scores(p.forward, rows, block, s, 1.0f);
    split_probabilities();

    ptx::mbarrier_wait(ptx::shared_address(&shared.v_full[v_ring.slot]), v_ring.parity);
    multiply_pv();
    ptx::wgmma_wait<0>();
    ptx::pin(products);
    release(shared.v_empty[v_ring.slot], lane);
    v_ring.advance();
    if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int e = 0; e < VALUE_DIM / 2; ++e) o[e] *= factor[(e >> 1) & 1];
    }
#pragma unroll
    for (int e = 0; e < VALUE_DIM / 2; ++e) o[e] = fmaf(products[e], of_v.unit, o[e]);
  }

  // A block that this warpgroup does not need. Its slots are full before they are given back: the phases stay in order.
  __device__ void skip() {
    ptx::mbarrier_wait(ptx::shared_address(&shared.k_full[k_ring.slot]), k_ring.parity);
    release(shared.k_empty[k_ring.slot], lane);
    k_ring.advance();
    ptx::mbarrier_wait(ptx::shared_address(&shared.v_full[v_ring.slot]), v_ring.parity);
    release(shared.v_empty[v_ring.slot], lane);
    v_ring.advance();
  }

  __device__ void run() {
    const Params& forward = p.forward;
    for (TileWalk walk;;) {
      ChunkTile tile;
      const Find found = next_chunk_tile(p, walk, tile);
      if (found == Find::end) break;
      if (found == Find::nothing) continue;
      Blocks blocks(forward, tile);
      const int row0 = tile.m * kRows + warpgroup * kRowsOfWarpgroup;
      const OwnBlocks own(blocks.vis, row0);
      rows.tile = tile;
      chunk = tile.chunk;
      for (int r = 0; r < 2; ++r) {
        rows.row[r] = row0 + warp * kRowsOfWarp + lane / 4 + 8 * r;
        rows.reference[r] = minus_infinity();
        rows.sum[r] = rows.reach[r] = 0.0f;
      }
      rows.slope = ALIBI ? forward.alibi_slopes[tile.b * forward.alibi_batch + tile.h * forward.alibi_head] : 0.0f;
      exact = true;
#pragma unroll
      for (int e = 0; e < VALUE_DIM / 2; ++e) o[e] = 0.0f;
      ptx::mbarrier_wait(ptx::shared_address(&shared.q_full[0]), q_parity);
      q_parity ^= 1;
      if constexpr (Q_IN_REGISTERS) load_left_operand(q_large, ptx::shared_address(shared.q[warpgroup][0]), warp, lane);
      if (row0 < forward.seqlen_q) {
        const SplitGroup of_q = groups_of(p.q, tile.h)[row0 / kRowsOfWarpgroup];
        const int head = static_cast<int>(forward.group.quotient(tile.h));
        const SplitGroup *k_groups = groups_of(p.k, head), *v_groups = groups_of(p.v, head);
        for (; blocks.any(); blocks.advance()) {
          if (hidden(blocks, own)) {
            skip();
          } else {
            step(of_q, k_groups, v_groups, blocks.next, edge(blocks, own));
          }
        }
      } else {
        for (; blocks.any(); blocks.advance()) skip();
      }
      release(shared.q_empty[0], lane);
      write();
    }
  }

  // -- results --

  __device__ void write() {
    const Params& forward = p.forward;
    // half: of the exponent by which a sink is above the scores: what they leave beside it may be a number where their
    // weight is none.
    float inverse[2], half[2] = {1.0f, 1.0f}, not_finite = 0.0f;  // becomes NaN
    bool good = exact;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum_of_quad(rows.sum[r]);
      const float reach = sum_of_quad(rows.reach[r]);
      float largest = 0.0f;
#pragma unroll
      for (int n = 0; n < VALUE_DIM / 4; ++n) largest = fmaxf(largest, fabsf(o[4 * (n / 2) + 2 * r + n % 2]));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      if (rows.row[r] < forward.seqlen_q) good = good && reach <= kLargestValues * largest;
      not_finite += total * 0.0f;
      float top = rows.reference[r];
      if constexpr (SINKS) {
        const float sink = forward.sinks[rows.tile.h * forward.sinks_stride];
        if (sink != minus_infinity()) {
          // The difference is rounded, not its terms, which may be much larger.
          const float above = fmaf(sink, kLog2E, -top);
          half[r] = ptx::exp2(fminf(-0.5f * above, 0.0f));
          total = total * half[r] * half[r] + ptx::exp2(fminf(above, 0.0f) + kOffset);
          top = fmaxf(top, sink * kLog2E);
        }
      }
      inverse[r] = total == 0.0f ? 0.0f : half[r] / total;
      if constexpr (DROPOUT) inverse[r] *= forward.dropout_kept;
      if (chunk == 0 && (lane & 3) == 0)
        write_lse(forward, rows.tile, rows.row[r],
                  total == 0.0f ? minus_infinity() : (top + log2_of(total * kWithoutOffset)) * kLn2);
    }
#pragma unroll
    for (int e = 0; e < VALUE_DIM / 2; ++e) {
      not_finite += o[e] * 0.0f;
      if constexpr (SINKS) o[e] *= half[(e >> 1) & 1];
      o[e] *= inverse[(e >> 1) & 1];
    }
    if (__any_sync(~0u, !(good && not_finite == 0.0f))) {
      exact_rows_of_warp(p, rows.tile, chunk, rows.row[0] - lane / 4, rows.slope);
      return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (rows.row[r] >= forward.seqlen_q) continue;
      float* out = row_of_out(p, rows.tile, chunk, rows.row[r]);
      const int columns = forward.value_dim - chunk * VALUE_DIM;
#pragma unroll
      for (int g = 0; g < VALUE_DIM / 8; ++g) {
        const int column = 8 * g + 2 * (lane & 3);
        if (p.pairs_out && column < columns) {
          *reinterpret_cast<float2*>(out + column) = make_float2(o[4 * g + 2 * r], o[4 * g + 2 * r + 1]);
        } else {
          if (column < columns) out[column] = o[4 * g + 2 * r];
          if (column + 1 < columns) out[column + 1] = o[4 * g + 2 * r + 1];
        }
      }
    }
  }
  __device__ static float sum_of_quad(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }
};

}  // namespace headrace::cuda

extern "C" __global__ void __launch_bounds__(headrace::cuda::kThreads, 1)
    hopper_split_forward(const __grid_constant__ headrace::ptx::TensorMap q,
                         const __grid_constant__ headrace::ptx::TensorMap k,
                         const __grid_constant__ headrace::ptx::TensorMap v,
                         const __grid_constant__ headrace::cuda::HopperSplitForwardParams p) {
  using namespace headrace;
  using namespace headrace::cuda;
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    init_slots(shared.q_full, shared.q_empty);
    init_slots(shared.k_full, shared.k_empty);
    init_slots(shared.v_full, shared.v_empty);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(~0u, thread / 128, 0);
  if (warpgroup == WARPGROUPS) {
    ptx::give_registers<PRODUCER_REGISTERS>();
    if (thread == 128 * WARPGROUPS) Producer{p, q, k, v, shared, 0, {}, {}}.run();
  } else {
    ptx::take_registers<CONSUMER_REGISTERS>();
    Consumer consumer{.p = p, .shared = shared, .warpgroup = warpgroup, .warp = (thread / 32) & 3, .lane = thread & 31};
    consumer.run();
  }
}
