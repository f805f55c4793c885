// Attention backward for Hopper, 16-bit inputs, heads of 129 to 256 columns: dk and dv. What hopper_backward.cuh keeps
// in registers does not fit here, so that this kernel and hopper_backward_queries.cuh each make scores and dout . v of
// all tiles: seven products in place of five, but nothing is summed in device memory, and all is deterministic.
//
// A block of threads has 64 keys of a head and walks over the queries. One warpgroup makes dv += p^T dout of a step and
// S^T = k q^T and p of the next; it hands p over to the other, which makes dk += ds^T q of a step and dp^T = v dout^T
// and ds of the next. They take turns on the tensor cores, and the arithmetic of each hides behind the products of the
// other.
//
// There is little room for q and dout, and their way from memory is long. q of a step is in use for three times as long
// as dout: it comes to the place of dout of STAGES steps before, and dout to that of q, so that there is as much time
// to load either. And products begin with the panels that are there.
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
constexpr int kRowPanels = kHeadPanels > kValuePanels ? kHeadPanels : kValuePanels;
constexpr int kStatisticsBytes = 4 * statistics_words(kQueries);
// Named barriers: kTurn, kTurn + 1 the warpgroups' turns on the tensor cores, kTurn + 2 of both, kTurn + 3, kTurn + 4
// within one.
constexpr int kTurn = 1;
// Whether the arithmetic on a step stands at the beginning of the loop over the steps, and not before it and at its
// end: once instead of twice, where it is long.
constexpr bool kPreparesFirst = kLongOptions > 1;
// p is handed over as the type of q. Where a cap is flat p times its slope may be far below what float16 has: so times
// this.
constexpr float kHandedScale = FLOAT16 && SOFTCAP ? 0x1p15f : 1.0f;

struct alignas(1024) Shared {
  Element k[kHeadPanels][kKeys * kPanel];
  Element v[kValuePanels][kKeys * kPanel];
  Element rows[STAGES][2][kRowPanels][kQueries * kPanel];  // q and dout of a step, see q_place()
  uint4 p[2][4][128];                                      // of two steps, as the threads have it in registers
  float statistics[STAGES][2][kStatisticsBytes / 4];       // where q is
  unsigned long long k_full, v_full;
  unsigned long long rows_full[STAGES][2][kRowPanels], rows_empty[STAGES][2];  // statistics with q's first panel
  unsigned long long p_full[2], p_empty[2];
};

extern "C" __constant__ unsigned dynamic_shared_bytes = sizeof(Shared);

// Where q and dout of a step are: in turns.
using Ring = ptx::RingPosition<STAGES>;
__device__ inline unsigned q_place(const Ring& ring) { return ring.parity; }
__device__ inline unsigned dout_place(const Ring& ring) { return ring.parity ^ 1; }

struct Loader {
  const HopperBackwardParams& p;
  const ptx::TensorMap &q, &k, &v, &dout;
  Shared& shared;

  // Panels of rows into a place that is empty.
  template <int kPanels>
  __device__ void load(const Steps& steps, const ptx::TensorMap& map, const Ring& ring, unsigned place,
                       unsigned more_bytes) const {
    const Head head = steps.query_head();
    ptx::mbarrier_wait(ptx::shared_address(&shared.rows_empty[ring.slot][place]), ring.parity ^ 1);
    for (int panel = 0; panel < kPanels; ++panel) {
      const unsigned barrier = ptx::shared_address(&shared.rows_full[ring.slot][place][panel]);
      ptx::mbarrier_expect(barrier, kPanelBytes + (panel == 0 ? more_bytes : 0));
      ptx::tma_load(ptx::shared_address(shared.rows[ring.slot][place][panel]), map, barrier, panel * kPanel,
                    steps.m * kQueries, head.h, head.b);
    }
    // What comes to this place next may have more panels, and counts phases too.
    for (int panel = kPanels; panel < kRowPanels; ++panel)
      ptx::mbarrier_arrive(ptx::shared_address(&shared.rows_full[ring.slot][place][panel]));
  }
  __device__ void load_q(const Steps& steps, const Ring& ring) const {
    load<kHeadPanels>(steps, q, ring, q_place(ring), kStatisticsBytes);
    ptx::bulk_load(ptx::shared_address(shared.statistics[ring.slot][q_place(ring)]),
                   p.statistics + steps.place() * (kStatisticsBytes / 4), kStatisticsBytes,
                   ptx::shared_address(&shared.rows_full[ring.slot][q_place(ring)][0]));
  }
  __device__ void load_dout(const Steps& steps, const Ring& ring) const {
    load<kValuePanels>(steps, dout, ring, dout_place(ring), 0);
  }
  __device__ void run(const KeyTile& tile) const {
    Steps steps(p, tile);
    if (!steps.any()) return;
    const unsigned k_full = ptx::shared_address(&shared.k_full), v_full = ptx::shared_address(&shared.v_full);
    ptx::mbarrier_expect(k_full, sizeof(shared.k));
    load_panels<64>(shared.k, k, k_full, tile.n * kKeys, tile.h, tile.b);
    Ring ring;
    load_q(steps, ring);
    ptx::mbarrier_expect(v_full, sizeof(shared.v));
    load_panels<64>(shared.v, v, v_full, tile.n * kKeys, tile.h, tile.b);
    load_dout(steps, ring);
    for (steps.advance(); steps.any(); steps.advance()) {
      ring.advance();
      load_q(steps, ring);
      load_dout(steps, ring);
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
  // The thread's two keys, 8 apart, and the first of its queries: of every 8 it has two.
  __device__ int key(int r) const { return tile.n * kKeys + 16 * warp + lane / 4 + 8 * r; }
  __device__ int query(const Steps& steps) const { return steps.m * kQueries + 2 * (lane & 3); }

  // Where rows begin, in units of descriptors.
  __device__ unsigned rows_at(const Ring& ring, unsigned place) const {
    return uniform(2 * ring.slot + place) * (sizeof(shared.rows[0][0]) / 16);
  }
  __device__ void wait_rows(const Ring& ring, unsigned place, int panel) const {
    wait(shared.rows_full[ring.slot][place][panel], ring.parity);
  }

  // s = keys * rows^T, over kPanels panels of columns, each when it is there. Without `more` of anything.
  template <int kPanels, int kCount>
  __device__ void multiply_keys(const Element (&keys)[kPanels][kCount], const Ring& ring, unsigned place, bool more) {
    const unsigned a = ptx::descriptor_low(ptx::shared_address(keys), 16);
    const unsigned b = ptx::descriptor_low(ptx::shared_address(shared.rows), 16) + rows_at(ring, place);
#pragma unroll
    for (int n = 0; n < kPanels * 4; ++n) {
      if (n % 4 == 0) {
        if (more) wait_rows(ring, place, n / 4);
        ptx::wgmma_fence();
      }
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
  template <int kColumns>
  __device__ void multiply_queries(float (&to)[kColumns / 2], const Ring& ring, unsigned place) const {
    const unsigned b = ptx::descriptor_low(ptx::shared_address(shared.rows), kPanelBytes) + rows_at(ring, place);
#pragma unroll
    for (int n = 0; n < kQueries / 16; ++n)
      ptx::Wgmma<kColumns>::template rs<1, 1>(to, left[4 * n], left[4 * n + 1], left[4 * n + 2], left[4 * n + 3],
                                              ptx::descriptor(b + n * (16 * 128 / 16)));
    ptx::wgmma_commit();
  }
  __device__ const float* statistics(const Ring& ring) const { return shared.statistics[ring.slot][q_place(ring)]; }
  __device__ void load_statistics(float (&to)[4], const Ring& ring, int g) const {
    const RowPair& pair = reinterpret_cast<const RowPair*>(statistics(ring))[4 * g + (lane & 3)];
    to[0] = pair.minus_lse[0];
    to[1] = pair.minus_lse[1];
    to[2] = pair.minus_d[0];
    to[3] = pair.minus_d[1];
  }
  // Each issues all products of a step in its turn: the arithmetic that follows hides behind those of the other.
  __device__ static void wait_turn(int warpgroup) { ptx::barrier_sync(kTurn + warpgroup, 256); }
  __device__ static void pass_turn(int warpgroup) { ptx::barrier_arrive(kTurn + 1 - warpgroup, 256); }
  // Arrives for a warp, when all its lanes have read or written.
  __device__ void release(unsigned long long& empty) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty));
  }
  // q and the statistics, which threads read, and not tensor cores alone.
  template <int kWarpgroup>
  __device__ void release_q(const Ring& ring) const {
    ptx::barrier_sync(kTurn + 3 + kWarpgroup, 128);
    release(shared.rows_empty[ring.slot][q_place(ring)]);
  }
  __device__ static void wait(const unsigned long long& full, unsigned parity) {
    ptx::mbarrier_wait(ptx::shared_address(&full), parity);
  }

  // Whether something of a tile is hidden, or needs care.
  __device__ bool needs_care(const Steps& steps, const Ring& ring) const {
    if constexpr (kOptions) return true;
    if (statistics(ring)[2 * kQueries] != 0.0f) return true;
    return (tile.n + 1) * kKeys > p.forward.seqlen_k ||
           visibility(p.forward, steps.query_head()).classify(rows_of(p, steps.m), tile.keys(p)) != TileKind::full;
  }
};

struct ProbabilityConsumer : Consumer {
  float dv[VALUE_DIM / 2];

  // Scores become p, and what dropout leaves of it.
  __device__ void exponentiate(const Steps& steps, const Ring& ring, unsigned (&handed)[kQueries / 4]) {
    const Kept<kQueries / 8, false> kept(p.forward, steps.query_head(), key(0), query(steps));
    if (!needs_care(steps, ring)) {
      const float scale = p.forward.scale * kLog2E;
#pragma unroll
      for (int g = 0; g < kQueries / 8; ++g) {
        float row[4];
        load_statistics(row, ring, g);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[4 * g + e] = ptx::exp2(fmaf(s[4 * g + e], scale, row[e & 1]));
        handed[2 * g] = ptx::pack(s[4 * g], s[4 * g + 1]);
        handed[2 * g + 1] = ptx::pack(s[4 * g + 2], s[4 * g + 3]);
#pragma unroll
        for (int e = 4 * g; e < 4 * g + 4; ++e) s[e] *= kept.factor(p.forward, e);
      }
      return;
    }
    const Params& forward = p.forward;
    const Head head = steps.query_head();
    const float slope = slope_of(forward, head);
    const int i0 = query(steps);
    const auto visible = visible_of_two<kQueries / 4, false>(forward, head, i0, key(0));
#pragma unroll
    for (int g = 0; g < kQueries / 8; ++g) {
      if (visible.nothing_of(g)) {
        s[4 * g] = s[4 * g + 1] = s[4 * g + 2] = s[4 * g + 3] = 0.0f;
        handed[2 * g] = handed[2 * g + 1] = 0;
        continue;
      }
      float row[4];
      load_statistics(row, ring, g);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float slopes[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int e = 4 * g + 2 * r + c;
          const int i = i0 + 8 * g + c, j = key(r);
          const float probability = probability_of(forward, slope, s[e], bias_near(forward, head, i, j), row[c], i, j,
                                                   visible(r, 2 * g + c), slopes[c]);
          slopes[c] *= probability * kHandedScale;
          s[e] = probability * kept.factor(forward, e);
        }
        handed[2 * g + r] = ptx::pack(slopes[0], slopes[1]);
      }
    }
  }

  // Scores in registers become p, which is handed over.
  __device__ void prepare(const Steps& steps, const Ring& ring, const ptx::RingPosition<2>& place) {
    unsigned handed[kQueries / 4];
    exponentiate(steps, ring, handed);
    release_q<0>(ring);
    wait(shared.p_empty[place.slot], place.parity ^ 1);
#pragma unroll
    for (int n = 0; n < 4; ++n)
      shared.p[place.slot][n][thread()] =
          make_uint4(handed[4 * n], handed[4 * n + 1], handed[4 * n + 2], handed[4 * n + 3]);
    release(shared.p_full[place.slot]);
  }

  __device__ void run(const GradientRows& to, const ptx::TensorMap& map) {
#pragma unroll
    for (int e = 0; e < VALUE_DIM / 2; ++e) dv[e] = 0.0f;
    Steps steps(p, tile);
    Ring ring;
    ptx::RingPosition<2> place;
    if (steps.any()) {
      wait(shared.k_full, 0);
      multiply_keys(shared.k, ring, q_place(ring), true);
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      if (!kPreparesFirst) prepare(steps, ring, place);
    }
#pragma unroll 1
    while (steps.any()) {
      if (kPreparesFirst) prepare(steps, ring, place);
#pragma unroll
      for (int n = 0; n < kQueries / 4; ++n) left[n] = ptx::pack(s[2 * n], s[2 * n + 1]);
      const Ring now = ring;
      steps.advance();
      ring.advance();
      place.advance();
      // In the last step scores are made of anything, and dropped: products under conditions would be taken apart.
      const bool more = steps.any();
#pragma unroll
      for (int panel = 0; panel < kValuePanels; ++panel) wait_rows(now, dout_place(now), panel);
      wait_turn(0);
      ptx::wgmma_fence();
      multiply_queries<VALUE_DIM>(dv, now, dout_place(now));
      multiply_keys(shared.k, ring, q_place(ring), more);
      pass_turn(0);
      ptx::wgmma_wait<1>();
      ptx::pin(dv);
      release(shared.rows_empty[now.slot][dout_place(now)]);
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      if (more && !kPreparesFirst) prepare(steps, ring, place);
    }
    ptx::barrier_sync(kTurn + 2, 256);  // both are done with k and v
    store_rows<VALUE_DIM>(dv, 1.0f, shared.v, 16 * warp, {tile.b, tile.h, tile.n * kKeys, p.forward.seqlen_k}, map, to);
  }
};

struct GradientConsumer : Consumer {
  float dk[HEAD_DIM / 2];

  // dout . v becomes ds.
  __device__ void differentiate(const Steps& steps, const Ring& ring, const unsigned (&handed)[kQueries / 4]) {
    const Head head = steps.query_head();
    const Kept<kQueries / 8, false> kept(p.forward, head, key(0), query(steps));
    const auto value = [](unsigned pair, int which) { return of_pair(pair, which) * (1.0f / kHandedScale); };
#pragma unroll
    for (int g = 0; g < kQueries / 8; ++g) {
      float row[4];
      load_statistics(row, ring, g);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int e = 4 * g + 2 * r + c;
          s[e] = score_gradient(value(handed[2 * g + r], c), s[e], kept.factor(p.forward, e), row[2 + c], 1.0f);
        }
      }
    }
  }

  // dout . v in registers becomes ds, by the p that is handed over.
  __device__ void prepare(const Steps& steps, const Ring& ring, const ptx::RingPosition<2>& place) {
#pragma unroll
    for (int panel = 0; panel < kHeadPanels; ++panel) wait_rows(ring, q_place(ring), panel);
    wait(shared.p_full[place.slot], place.parity);
    unsigned handed[kQueries / 4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint4 x = shared.p[place.slot][n][thread()];
      handed[4 * n] = x.x;
      handed[4 * n + 1] = x.y;
      handed[4 * n + 2] = x.z;
      handed[4 * n + 3] = x.w;
    }
    release(shared.p_empty[place.slot]);
    differentiate(steps, ring, handed);
  }

  __device__ void run(const GradientRows& to, const ptx::TensorMap& map) {
#pragma unroll
    for (int e = 0; e < HEAD_DIM / 2; ++e) dk[e] = 0.0f;
    Steps steps(p, tile);
    Ring ring;
    ptx::RingPosition<2> place;
    if (steps.any()) {
      pass_turn(1);
      wait(shared.v_full, 0);
      multiply_keys(shared.v, ring, dout_place(ring), true);
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      release(shared.rows_empty[ring.slot][dout_place(ring)]);
      if (!kPreparesFirst) prepare(steps, ring, place);
    }
#pragma unroll 1
    while (steps.any()) {
      if (kPreparesFirst) prepare(steps, ring, place);
#pragma unroll
      for (int n = 0; n < kQueries / 4; ++n) left[n] = pack_gradients(s[2 * n], s[2 * n + 1]);
      const Ring now = ring;
      steps.advance();
      ring.advance();
      place.advance();
      const bool more = steps.any();  // else of anything, and dropped
      wait_turn(1);
      ptx::wgmma_fence();
      multiply_queries<HEAD_DIM>(dk, now, q_place(now));
      multiply_keys(shared.v, ring, dout_place(ring), more);
      pass_turn(1);
      ptx::wgmma_wait<1>();
      ptx::pin(dk);
      release_q<1>(now);
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      if (more) {
        release(shared.rows_empty[ring.slot][dout_place(ring)]);
        if (!kPreparesFirst) prepare(steps, ring, place);
      }
    }
    ptx::barrier_sync(kTurn + 2, 256);  // both are done with k and v
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
      for (int place = 0; place < 2; ++place) {
        for (unsigned long long& full : shared.rows_full[n][place]) init_barrier(full, 1);
        init_barrier(shared.rows_empty[n][place], kWarps);
      }
    }
    for (int n = 0; n < 2; ++n) {
      init_barrier(shared.p_full[n], 4);
      init_barrier(shared.p_empty[n], 4);
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
