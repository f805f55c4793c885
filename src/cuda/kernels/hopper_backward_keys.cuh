// Attention backward for Hopper, 16-bit inputs, heads of 129 to 256 columns: dk and dv. What hopper_backward.cuh keeps
// in registers does not fit here, so that this kernel and hopper_backward_queries.cuh each make scores and dout . v of
// all tiles: seven products in place of five, but nothing is summed in device memory, and all is deterministic.
//
// A block of threads has 64 keys of a head and walks over the queries. One warpgroup makes S^T = k q^T, p and
// dv += p^T dout; it hands p over to the other, which makes dp^T = v dout^T, ds and dk += ds^T q. In each the
// arithmetic on a step hides behind the products of the step before, and behind the other's.
//
// Constants of the compilation:
// - FLOAT16, SMALL_SCALE, SOFTCAP, ALIBI, BIAS, MASK, BLOCK_MASK, DROPOUT: as in hopper_backward.cuh
// - HEAD_DIM, VALUE_DIM: multiples of 64, at most 256; TMA fills smaller dimensions up with zeros
// - KEYS, QUERIES: 64
// - STAGES: steps of q and dout in shared memory
#if FLOAT16
#define HEADRACE_MMA_TYPE "f16"
#else
#define HEADRACE_MMA_TYPE "bf16"
#endif
#include "backward_pipeline.cuh"
#include "backward_scores.cuh"
#include "backward_steps.cuh"
#include "backward_store.cuh"
#include "hopper_backward_params.hpp"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace headrace::cuda {

static_assert(KEYS == 64 && QUERIES == 64);
constexpr int kPanelBytes = 64 * 128;
constexpr int kStatisticsBytes = 4 * statistics_words(kQueries);
// Barriers by which p is handed over: its two places are full, are empty.
constexpr int kFull = 1, kEmpty = 3;
constexpr int kTurn = 5;  // barriers kTurn, kTurn + 1: the warpgroups' turns on the tensor cores

struct alignas(1024) Shared {
  Element k[kHeadPanels][kKeys * kPanel];
  Element v[kValuePanels][kKeys * kPanel];
  Element q[STAGES][kHeadPanels][kQueries * kPanel];
  Element dout[STAGES][kValuePanels][kQueries * kPanel];
  uint4 p[2][4][128];  // of two steps, as the threads have it in registers
  float statistics[STAGES][kStatisticsBytes / 4];
  unsigned long long k_full, v_full;
  unsigned long long q_full[STAGES], q_empty[STAGES];  // with statistics
  unsigned long long dout_full[STAGES], dout_empty[STAGES];
};

extern "C" __constant__ unsigned dynamic_shared_bytes = sizeof(Shared);

struct Loader {
  const HopperBackwardParams& p;
  const ptx::TensorMap &q, &k, &v, &dout;
  Shared& shared;

  __device__ void load_q(const Steps& steps, int slot) const {
    const unsigned barrier = ptx::shared_address(&shared.q_full[slot]);
    const Head head = steps.query_head();
    ptx::mbarrier_expect(barrier, sizeof(shared.q[0]) + kStatisticsBytes);
    load_panels<64>(shared.q[slot], q, barrier, steps.m * kQueries, head.h, head.b);
    ptx::bulk_load(ptx::shared_address(shared.statistics[slot]), p.statistics + steps.place() * (kStatisticsBytes / 4),
                   kStatisticsBytes, barrier);
  }
  __device__ void load_dout(const Steps& steps, int slot) const {
    const unsigned barrier = ptx::shared_address(&shared.dout_full[slot]);
    const Head head = steps.query_head();
    ptx::mbarrier_expect(barrier, sizeof(shared.dout[0]));
    load_panels<64>(shared.dout[slot], dout, barrier, steps.m * kQueries, head.h, head.b);
  }
  __device__ void run(const KeyTile& tile) const {
    Steps steps(p, tile);
    if (!steps.any()) return;
    const unsigned k_full = ptx::shared_address(&shared.k_full), v_full = ptx::shared_address(&shared.v_full);
    ptx::mbarrier_expect(k_full, sizeof(shared.k));
    load_panels<64>(shared.k, k, k_full, tile.n * kKeys, tile.h, tile.b);
    load_q(steps, 0);
    ptx::mbarrier_expect(v_full, sizeof(shared.v));
    load_panels<64>(shared.v, v, v_full, tile.n * kKeys, tile.h, tile.b);
    load_dout(steps, 0);
    ptx::RingPosition<STAGES> ring;
    ring.advance();
    for (steps.advance(); steps.any(); steps.advance()) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.q_empty[ring.slot]), ring.parity ^ 1);
      load_q(steps, ring.slot);
      ptx::mbarrier_wait(ptx::shared_address(&shared.dout_empty[ring.slot]), ring.parity ^ 1);
      load_dout(steps, ring.slot);
      ring.advance();
    }
  }
};

// What both warpgroups do alike.
struct Consumer {
  const HopperBackwardParams& p;
  const KeyTile& tile;
  Shared& shared;
  const int warp, lane;

  float s[kQueries / 2];        // transposed scores, or dout . v, of a step
  unsigned left[kQueries / 4];  // p or ds

  __device__ int thread() const { return warp * 32 + lane; }
  __device__ int key(int r) const { return tile.n * kKeys + 16 * warp + lane / 4 + 8 * r; }

  // s = keys * rows^T, over kPanels panels of columns.
  template <int kPanels, int kCount>
  __device__ void multiply_keys(const Element (&keys)[kPanels][kCount], const Element (&rows)[STAGES][kPanels][kCount],
                                unsigned slot) {
    const unsigned a = ptx::descriptor_low(ptx::shared_address(keys), 16);
    const unsigned b = ptx::descriptor_low(ptx::shared_address(rows), 16) + uniform(slot) * (sizeof(rows[0]) / 16);
#pragma unroll
    for (int n = 0; n < kPanels * 4; ++n) {
      const unsigned at = (n / 4) * (kPanelBytes / 16) + (n % 4) * 2;
      if (n == 0) {
        ptx::Wgmma<64>::ss<0, 0>(s, ptx::descriptor(a + at), ptx::descriptor(b + at));
      } else {
        ptx::Wgmma<64>::ss<1, 0>(s, ptx::descriptor(a + at), ptx::descriptor(b + at));
      }
    }
    ptx::wgmma_commit();
  }
  // to += left^T rows.
  template <int kPanels, int kCount>
  __device__ void multiply_queries(float (&to)[kPanels * kPanel / 2], const Element (&rows)[STAGES][kPanels][kCount],
                                   unsigned slot) const {
    const unsigned b =
        ptx::descriptor_low(ptx::shared_address(rows), kPanelBytes) + uniform(slot) * (sizeof(rows[0]) / 16);
#pragma unroll
    for (int n = 0; n < kQueries / 16; ++n)
      ptx::Wgmma<kPanels * kPanel>::template rs<1, 1>(to, left[4 * n], left[4 * n + 1], left[4 * n + 2],
                                                      left[4 * n + 3], ptx::descriptor(b + n * (16 * 128 / 16)));
    ptx::wgmma_commit();
  }
  __device__ void load_statistics(float (&to)[4], unsigned slot, int g) const {
    const RowPair& pair = reinterpret_cast<const RowPair*>(shared.statistics[slot])[4 * g + (lane & 3)];
    to[0] = pair.minus_lse[0];
    to[1] = pair.minus_lse[1];
    to[2] = pair.minus_d[0];
    to[3] = pair.minus_d[1];
  }
  // Each issues all products of a step in its turn: the arithmetic that follows hides behind those of the other.
  __device__ static void wait_turn(int warpgroup) { ptx::barrier_sync(kTurn + warpgroup, 256); }
  __device__ static void pass_turn(int warpgroup) { ptx::barrier_arrive(kTurn + 1 - warpgroup, 256); }
  template <int kSlots>
  __device__ void release(unsigned long long (&empty)[kSlots], unsigned slot) const {
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty[slot]));
  }
  __device__ static void wait(const unsigned long long& full, unsigned parity) {
    ptx::mbarrier_wait(ptx::shared_address(&full), parity);
  }

  // Whether something of a tile is hidden, or needs care.
  __device__ bool needs_care(const Steps& steps, unsigned slot) const {
    if constexpr (kOptions) return true;
    if (shared.statistics[slot][2 * kQueries] != 0.0f) return true;
    return (tile.n + 1) * kKeys > p.forward.seqlen_k ||
           visibility(p.forward, steps.query_head()).classify(rows_of(p, steps.m), tile.keys(p)) != TileKind::full;
  }
};

struct ProbabilityConsumer : Consumer {
  float dv[VALUE_DIM / 2];

  // Scores become p, and what dropout leaves of it.
  __device__ void exponentiate(const Steps& steps, unsigned slot, unsigned (&handed)[kQueries / 4]) {
    if (!needs_care(steps, slot)) {
      const float scale = p.forward.scale * kLog2E;
#pragma unroll
      for (int g = 0; g < kQueries / 8; ++g) {
        float row[4];
        load_statistics(row, slot, g);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[4 * g + e] = ptx::exp2(fmaf(s[4 * g + e], scale, row[e & 1]));
        handed[2 * g] = ptx::pack(s[4 * g], s[4 * g + 1]);
        handed[2 * g + 1] = ptx::pack(s[4 * g + 2], s[4 * g + 3]);
      }
      return;
    }
    const Params& forward = p.forward;
    const Head head = steps.query_head();
    const float slope = slope_of(forward, head);
    const int i0 = steps.m * kQueries + 2 * (lane & 3);
#pragma unroll
    for (int g = 0; g < kQueries / 8; ++g) {
      float row[4];
      load_statistics(row, slot, g);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const KeptPair kept_pair(forward, head, i0 + 8 * g, key(r));
        float slopes[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int e = 4 * g + 2 * r + c;
          const float probability =
              probability_of(forward, head, slope, s[e], row[c], i0 + 8 * g + c, key(r), slopes[c]);
          slopes[c] *= probability;
          s[e] = probability * kept_pair.factor(forward, c);
        }
        handed[2 * g + r] = ptx::pack(slopes[0], slopes[1]);
      }
    }
  }

  // Scores in registers become p, which is handed over.
  __device__ void prepare(const Steps& steps, unsigned slot, int place) {
    unsigned handed[kQueries / 4];
    exponentiate(steps, slot, handed);
    release(shared.q_empty, slot);
    ptx::barrier_sync(kEmpty + place, 256);
#pragma unroll
    for (int n = 0; n < 4; ++n)
      shared.p[place][n][thread()] = make_uint4(handed[4 * n], handed[4 * n + 1], handed[4 * n + 2], handed[4 * n + 3]);
    ptx::barrier_arrive(kFull + place, 256);
  }

  __device__ void run(const GradientRows& to, const ptx::TensorMap& map) {
#pragma unroll
    for (int e = 0; e < VALUE_DIM / 2; ++e) dv[e] = 0.0f;
    Steps steps(p, tile);
    ptx::RingPosition<STAGES> ring;
    int place = 0;
    if (steps.any()) {
      wait(shared.k_full, 0);
      wait(shared.q_full[0], 0);
      ptx::wgmma_fence();
      multiply_keys(shared.k, shared.q, 0);
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      prepare(steps, 0, place);
    }
#pragma unroll 1
    while (steps.any()) {
#pragma unroll
      for (int n = 0; n < kQueries / 4; ++n) left[n] = ptx::pack(s[2 * n], s[2 * n + 1]);
      const unsigned slot = ring.slot, parity = ring.parity;
      steps.advance();
      ring.advance();
      place ^= 1;
      const bool more = steps.any();
      // In the last step scores are made of anything, and dropped: products under conditions would be taken apart.
      if (more) wait(shared.q_full[ring.slot], ring.parity);
      wait(shared.dout_full[slot], parity);
      wait_turn(0);
      ptx::wgmma_fence();
      multiply_keys(shared.k, shared.q, ring.slot);
      ptx::wgmma_fence();
      multiply_queries(dv, shared.dout, slot);
      pass_turn(0);
      ptx::wgmma_wait<1>();
      ptx::pin(s);
      if (more) prepare(steps, ring.slot, place);
      ptx::wgmma_wait<0>();
      ptx::pin(dv);
      release(shared.dout_empty, slot);
    }
    ptx::barrier_sync(7, 256);  // both are done with k and v
    store_rows<VALUE_DIM>(dv, 1.0f, shared.v, 16 * warp, {tile.b, tile.h, tile.n * kKeys, p.forward.seqlen_k}, map, to);
  }
};

struct GradientConsumer : Consumer {
  float dk[HEAD_DIM / 2];

  // dout . v becomes ds.
  __device__ void differentiate(const Steps& steps, unsigned slot, const unsigned (&handed)[kQueries / 4]) {
    const Head head = steps.query_head();
    const int i0 = steps.m * kQueries + 2 * (lane & 3);
    const auto value = [](unsigned pair, int which) {
      return to_float(static_cast<Element>(which == 0 ? pair & 0xFFFF : pair >> 16));
    };
#pragma unroll
    for (int g = 0; g < kQueries / 8; ++g) {
      float row[4];
      load_statistics(row, slot, g);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const KeptPair kept_pair(p.forward, head, i0 + 8 * g, key(r));
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int e = 4 * g + 2 * r + c;
          s[e] = score_gradient(value(handed[2 * g + r], c), s[e], kept_pair.factor(p.forward, c), row[2 + c], 1.0f);
        }
      }
    }
  }

  // dout . v in registers becomes ds, by the p that is handed over.
  __device__ void prepare(const Steps& steps, const ptx::RingPosition<STAGES>& ring, int place) {
    wait(shared.q_full[ring.slot], ring.parity);
    ptx::barrier_sync(kFull + place, 256);
    unsigned handed[kQueries / 4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint4 x = shared.p[place][n][thread()];
      handed[4 * n] = x.x;
      handed[4 * n + 1] = x.y;
      handed[4 * n + 2] = x.z;
      handed[4 * n + 3] = x.w;
    }
    ptx::barrier_arrive(kEmpty + place, 256);
    differentiate(steps, ring.slot, handed);
  }

  __device__ void run(const GradientRows& to, const ptx::TensorMap& map) {
#pragma unroll
    for (int e = 0; e < HEAD_DIM / 2; ++e) dk[e] = 0.0f;
    Steps steps(p, tile);
    ptx::RingPosition<STAGES> ring;
    int place = 0;
    if (steps.any()) {
      pass_turn(1);
      ptx::barrier_arrive(kEmpty, 256);
      ptx::barrier_arrive(kEmpty + 1, 256);
      wait(shared.v_full, 0);
      wait(shared.dout_full[0], 0);
      ptx::wgmma_fence();
      multiply_keys(shared.v, shared.dout, 0);
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      release(shared.dout_empty, 0);
      prepare(steps, ring, place);
    }
#pragma unroll 1
    while (steps.any()) {
#pragma unroll
      for (int n = 0; n < kQueries / 4; ++n) left[n] = pack_gradients(s[2 * n], s[2 * n + 1]);
      const unsigned slot = ring.slot;
      steps.advance();
      ring.advance();
      place ^= 1;
      const bool more = steps.any();
      // In the last step of anything, and dropped.
      if (more) wait(shared.dout_full[ring.slot], ring.parity);
      wait_turn(1);
      ptx::wgmma_fence();
      multiply_keys(shared.v, shared.dout, ring.slot);
      ptx::wgmma_fence();
      multiply_queries(dk, shared.q, slot);
      pass_turn(1);
      ptx::wgmma_wait<1>();
      ptx::pin(s);
      if (more) {
        release(shared.dout_empty, ring.slot);
        prepare(steps, ring, place);
      }
      ptx::wgmma_wait<0>();
      ptx::pin(dk);
      release(shared.q_empty, slot);
    }
    ptx::barrier_sync(7, 256);  // both are done with k and v
    store_rows<HEAD_DIM>(dk, p.forward.scale, shared.k, 16 * warp, {tile.b, tile.h, tile.n * kKeys, p.forward.seqlen_k},
                         map, to);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_backward_keys(const __grid_constant__ ptx::TensorMap q, const __grid_constant__ ptx::TensorMap k,
                         const __grid_constant__ ptx::TensorMap v, const __grid_constant__ ptx::TensorMap dout,
                         const __grid_constant__ ptx::TensorMap dk, const __grid_constant__ ptx::TensorMap dv,
                         const __grid_constant__ HopperBackwardParams p) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    init_barrier(shared.k_full, 1);
    init_barrier(shared.v_full, 1);
    for (int n = 0; n < STAGES; ++n) {
      init_barrier(shared.q_full[n], 1);
      init_barrier(shared.q_empty[n], kWarps);
      init_barrier(shared.dout_full[n], 1);
      init_barrier(shared.dout_empty[n], kWarps);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  // Head after head, so that q and dout stay in the L2 cache.
  const unsigned head = blockIdx.x / p.key_tiles;
  KeyTile tile;
  tile.n = static_cast<int>(blockIdx.x - head * p.key_tiles);
  tile.b = static_cast<int>(p.heads_kv.quotient(head));
  tile.h = static_cast<int>(head) - tile.b * static_cast<int>(p.heads_kv.divisor);
  tile.find_queries(p);
  tile.start = tile.begin;
  tile.step = 1;

  const int warpgroup = __shfl_sync(~0u, thread / 128, 0), warp = thread / 32 & 3, lane = thread & 31;
  if (warpgroup == kWarpgroups) {
    ptx::give_registers<24>();
    if (thread == 128 * kWarpgroups) Loader{p, q, k, v, dout, shared}.run(tile);
    return;
  }
  ptx::take_registers<240>();
  if (warpgroup == 0) {
    ProbabilityConsumer consumer{{.p = p, .tile = tile, .shared = shared, .warp = warp, .lane = lane}};
    consumer.run(p.dv, dv);
  } else {
    GradientConsumer consumer{{.p = p, .tile = tile, .shared = shared, .warp = warp, .lane = lane}};
    consumer.run(p.dk, dk);
  }
  if (lane == 0) ptx::tma_store_wait_read();
}

}  // namespace headrace::cuda
