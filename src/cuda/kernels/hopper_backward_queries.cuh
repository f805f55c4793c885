// Attention backward for Hopper, 16-bit inputs, heads of 129 to 256 columns: dq. See hopper_backward_keys.cuh, which
// makes dk and dv.
//
// A block of threads has 128 queries of a head, 64 of each of two warpgroups, keeps their dq in registers and walks
// over the keys: dq += ds k of a step, S = q k^T, dp = dout v^T and ds of the next. They take turns on the tensor
// cores, and the arithmetic of one hides behind the products of the other.
//
// There is little room for k and v, and their way from memory is long. So products begin with the panels that are
// there, v goes panel by panel, and the second warpgroup makes dp first: then there is as much time to load k as v.
//
// Constants of the compilation:
// - FLOAT16, SMALL_SCALE, SOFTCAP, ALIBI, BIAS, MASK, BLOCK_MASK, DROPOUT: as in hopper_backward.cuh
// - HEAD_DIM, VALUE_DIM: multiples of 64, at most 256; TMA fills smaller dimensions up with zeros
// - KEYS: 64, of a step; QUERIES: 64, of a tile of the statistics
// - K_STAGES, V_STAGES: steps of k and of v in shared memory
#if FLOAT16
#define HEADRACE_MMA_TYPE "f16"
#else
#define HEADRACE_MMA_TYPE "bf16"
#endif
#include "backward_pipeline.cuh"
#include "backward_scores.cuh"
#include "backward_store.cuh"
#include "hopper_backward_params.hpp"
#include "options.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace headrace::cuda {

static_assert(KEYS == 64 && QUERIES == 64);
constexpr int kKeys = KEYS, kOwnRows = 64, kRows = kWarpgroups * kOwnRows;
constexpr int kRowPanelBytes = kRows * 128, kKeyPanelBytes = kKeys * 128;
constexpr int kTurn = 3;  // barriers kTurn, kTurn + 1: the warpgroups' turns on the tensor cores

struct alignas(1024) Shared {
  Element q[kHeadPanels][kRows * kPanel];
  Element dout[kValuePanels][kRows * kPanel];
  Element k[K_STAGES][kHeadPanels][kKeys * kPanel];
  Element v[V_STAGES][kValuePanels][kKeys * kPanel];
  unsigned long long q_full;  // and dout
  unsigned long long k_full[K_STAGES][kHeadPanels], k_empty[K_STAGES];
  unsigned long long v_full[V_STAGES][kValuePanels], v_empty[V_STAGES][kValuePanels];
};

extern "C" __constant__ unsigned dynamic_shared_bytes = sizeof(Shared);

// The queries [m * kRows, ...) of a head, and the blocks of keys that they see, from the last to the first.
struct Blocks {
  const HopperBackwardParams& p;
  Head head;
  int m, next, last;  // next < last: none are left

  __device__ Blocks(const HopperBackwardParams& params, const Head& of, int tile) : p(params), head(of), m(tile) {
    const Visibility vis{{p.forward.band_lo, p.forward.band_hi}, p.forward.seqlen_q, p.forward.seqlen_k, {}};
    const Range keys = vis.keys_of_rows(rows());
    next = keys.empty() ? -1 : (keys.end - 1) / kKeys;
    last = keys.empty() ? 0 : keys.begin / kKeys;
    skip_hidden();
  }
  __device__ bool any() const { return next >= last; }
  __device__ void advance() {
    --next;
    skip_hidden();
  }
  __device__ Range rows() const { return {m * kRows, min_index(p.forward.seqlen_q, (m + 1) * kRows)}; }
  __device__ Range keys() const { return {next * kKeys, min_index(p.forward.seqlen_k, (next + 1) * kKeys)}; }
  // Whether some of the rows from row0 on do not see all of the keys.
  __device__ bool edge(int row0) const {
    if ((next + 1) * kKeys > p.forward.seqlen_k) return true;
    const Range own{row0, min_index(p.forward.seqlen_q, row0 + kOwnRows)};
    return !own.empty() && visibility(p.forward, head).classify(own, keys()) != TileKind::full;
  }

 private:
  __device__ void skip_hidden() {
    if constexpr (BLOCK_MASK) {
      while (any() && visibility(p.forward, head).classify(rows(), keys()) == TileKind::hidden) --next;
    }
  }
};

struct Loader {
  const HopperBackwardParams& p;
  const ptx::TensorMap &q, &k, &v, &dout;
  Shared& shared;

  // A panel of k or v.
  __device__ static void load(Element (&to)[kKeys * kPanel], const ptx::TensorMap& map, unsigned long long& full,
                              int panel, int block, int h, int b) {
    const unsigned barrier = ptx::shared_address(&full);
    ptx::mbarrier_expect(barrier, sizeof(to));
    ptx::tma_load(ptx::shared_address(to), map, barrier, panel * kPanel, block * kKeys, h, b);
  }
  __device__ void run(Blocks blocks) const {
    if (!blocks.any()) return;
    const int h = blocks.head.h, b = blocks.head.b, head_kv = static_cast<int>(p.group.quotient(h));
    const unsigned q_full = ptx::shared_address(&shared.q_full);
    ptx::mbarrier_expect(q_full, sizeof(shared.q) + sizeof(shared.dout));
    load_panels<64>(shared.q, q, q_full, blocks.m * kRows, h, b);
    ptx::RingPosition<K_STAGES> k_ring;
    ptx::RingPosition<V_STAGES> v_ring;
    for (bool first = true; blocks.any(); blocks.advance(), first = false) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.k_empty[k_ring.slot]), k_ring.parity ^ 1);
      for (int panel = 0; panel < kHeadPanels; ++panel)
        load(shared.k[k_ring.slot][panel], k, shared.k_full[k_ring.slot][panel], panel, blocks.next, head_kv, b);
      k_ring.advance();
      if (first) load_panels<64>(shared.dout, dout, q_full, blocks.m * kRows, h, b);
      for (int panel = 0; panel < kValuePanels; ++panel) {
        ptx::mbarrier_wait(ptx::shared_address(&shared.v_empty[v_ring.slot][panel]), v_ring.parity ^ 1);
        load(shared.v[v_ring.slot][panel], v, shared.v_full[v_ring.slot][panel], panel, blocks.next, head_kv, b);
      }
      v_ring.advance();
    }
  }
};

struct Consumer {
  const HopperBackwardParams& p;
  Shared& shared;
  const int warpgroup, warp, lane;
  ptx::RingPosition<K_STAGES> k_ring;
  ptx::RingPosition<V_STAGES> v_ring;

  float s[kKeys / 2], dp[kKeys / 2];  // scores and dout . v of a step
  unsigned ds[kKeys / 4];
  float dq[HEAD_DIM / 2];
  int row[2];  // the thread's, 8 apart
  float minus_lse[2], minus_d[2];
  bool large_lse;

  __device__ void release(unsigned long long& empty) const {
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty));
  }

  __device__ void wait_k(int panel) const {
    ptx::mbarrier_wait(ptx::shared_address(&shared.k_full[k_ring.slot][panel]), k_ring.parity);
  }
  __device__ void wait_v(int panel) const {
    ptx::mbarrier_wait(ptx::shared_address(&shared.v_full[v_ring.slot][panel]), v_ring.parity);
  }
  // Gives the last kLeft panels of v back, as the groups of products end that read them, one for each and kBehind
  // others behind them.
  template <int kLeft, int kBehind>
  __device__ void release_v() const {
    if constexpr (kLeft > 0) {
      ptx::wgmma_wait<kLeft - 1 + kBehind>();
      release(shared.v_empty[v_ring.slot][kValuePanels - kLeft]);
      release_v<kLeft - 1, kBehind>();
    }
  }

  // to = rows * keys^T, of this warpgroup's rows, each panel when wait(panel) returns. A panel is a group of products.
  template <int kPanels, int kRowCount, int kSlots, int kKeyCount, typename Wait>
  __device__ void multiply_keys(float (&to)[kKeys / 2], const Element (&rows)[kPanels][kRowCount],
                                const Element (&keys)[kSlots][kPanels][kKeyCount], unsigned slot,
                                const Wait& wait) const {
    const unsigned a = ptx::descriptor_low(ptx::shared_address(rows) + warpgroup * kOwnRows * 128, 16);
    const unsigned b =
        ptx::descriptor_low(ptx::shared_address(keys), 16) + (kSlots == 1 ? 0 : uniform(slot) * (sizeof(keys[0]) / 16));
#pragma unroll
    for (int n = 0; n < kPanels * 4; ++n) {
      if (n % 4 == 0) {
        wait(n / 4);
        ptx::wgmma_fence();
      }
      const unsigned long long left = ptx::descriptor(a + (n / 4) * (kRowPanelBytes / 16) + (n % 4) * 2);
      const unsigned long long right = ptx::descriptor(b + (n / 4) * (kKeyPanelBytes / 16) + (n % 4) * 2);
      if (n == 0) {
        ptx::Wgmma<kKeys>::ss<0, 0>(to, left, right);
      } else {
        ptx::Wgmma<kKeys>::ss<1, 0>(to, left, right);
      }
      if (n % 4 == 3) ptx::wgmma_commit();
    }
  }
  // dq += ds k
  __device__ void multiply_ds(unsigned slot) {
    const unsigned b =
        ptx::descriptor_low(ptx::shared_address(shared.k), kKeyPanelBytes) + uniform(slot) * (sizeof(shared.k[0]) / 16);
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n)
      ptx::Wgmma<HEAD_DIM>::rs<1, 1>(dq, ds[4 * n], ds[4 * n + 1], ds[4 * n + 2], ds[4 * n + 3],
                                     ptx::descriptor(b + n * (16 * 128 / 16)));
    ptx::wgmma_commit();
  }

  __device__ void load_statistics(const Head& head, int m) {
    const int tile = m * kWarpgroups + warpgroup, r0 = 16 * warp + lane / 4;
    large_lse = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row[r] = tile * kOwnRows + r0 + 8 * r;
      minus_lse[r] = minus_infinity();
      minus_d[r] = 0.0f;
    }
    if (tile >= static_cast<int>(p.query_tiles.divisor)) return;
    const long long place =
        (static_cast<long long>(head.b) * p.forward.heads_q.divisor + head.h) * p.query_tiles.divisor + tile;
    const float* from = p.statistics + place * statistics_words(QUERIES);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowPair& pair = reinterpret_cast<const RowPair*>(from)[(r0 + 8 * r) / 2];
      minus_lse[r] = pair.minus_lse[r0 & 1];
      minus_d[r] = pair.minus_d[r0 & 1];
    }
    large_lse = from[2 * QUERIES] != 0.0f;
  }

  // A block in which nothing is hidden, and no option is in use but dropout.
  __device__ void finish_plain(const Blocks& blocks) {
    const float scale = p.forward.scale * kLog2E;
    const Kept<kKeys / 8, true> kept(p.forward, blocks.head, row[0], blocks.next * kKeys + 2 * (lane & 3));
#pragma unroll
    for (int g = 0; g < kKeys / 8; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float gradient[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int e = 4 * g + 2 * r + c;
          gradient[c] = fmaf(dp[e], kept.factor(p.forward, e), minus_d[r]) * ptx::exp2(fmaf(s[e], scale, minus_lse[r]));
        }
        ds[2 * g + r] = pack_gradients(gradient[0], gradient[1]);
      }
    }
  }
  __device__ void finish_any(const Blocks& blocks) {
    const float slope = slope_of(p.forward, blocks.head);
    const int j0 = blocks.next * kKeys + 2 * (lane & 3);
    const auto visible = visible_of_two<kKeys / 4, true>(p.forward, blocks.head, row[0], j0);
    const Kept<kKeys / 8, true> kept(p.forward, blocks.head, row[0], j0);
#pragma unroll
    for (int g = 0; g < kKeys / 8; ++g) {
      if (visible.nothing_of(g)) {
        ds[2 * g] = ds[2 * g + 1] = 0;
        continue;
      }
      const int j = j0 + 8 * g;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float gradient[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int e = 4 * g + 2 * r + c;
          float derivative;
          const float bias = bias_near(p.forward, blocks.head, row[r], j + c);
          const float probability = probability_of(p.forward, slope, s[e], bias, minus_lse[r], row[r], j + c,
                                                   visible(r, 2 * g + c), derivative);
          gradient[c] = score_gradient(probability, dp[e], kept.factor(p.forward, e), minus_d[r], derivative);
        }
        ds[2 * g + r] = pack_gradients(gradient[0], gradient[1]);
      }
    }
  }

  __device__ void run(Blocks blocks, const ptx::TensorMap& map) {
#pragma unroll
    for (int e = 0; e < HEAD_DIM / 2; ++e) dq[e] = 0.0f;
    load_statistics(blocks.head, blocks.m);
    const bool any = blocks.any();
    if (any) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.q_full), 0);
      multiply_keys(s, shared.q, shared.k, 0, [&](int panel) { wait_k(panel); });
      multiply_keys(dp, shared.dout, shared.v, 0, [&](int panel) { wait_v(panel); });
      release_v<kValuePanels, 0>();
      ptx::pin(s);
      ptx::pin(dp);
      v_ring.advance();
      if (warpgroup == 1) ptx::barrier_arrive(kTurn, 256);
    }
#pragma unroll 1
    while (blocks.any()) {
      if (kOptions || large_lse || blocks.edge(row[0] - 16 * warp - lane / 4)) {
        finish_any(blocks);
      } else {
        finish_plain(blocks);
      }
      const unsigned slot = k_ring.slot;
      blocks.advance();
      k_ring.advance();
      const bool more = blocks.any();
      ptx::barrier_sync(kTurn + warpgroup, 256);
      ptx::wgmma_fence();
      multiply_ds(slot);
      // In the last step S and dp are made of anything, and dropped: products under conditions would be taken apart.
      const auto next_k = [&](int panel) {
        if (more) wait_k(panel);
      };
      const auto next_v = [&](int panel) {
        if (more) wait_v(panel);
      };
      if (warpgroup == 0) {
        multiply_keys(s, shared.q, shared.k, k_ring.slot, next_k);
        multiply_keys(dp, shared.dout, shared.v, v_ring.slot, next_v);
        ptx::barrier_arrive(kTurn + 1, 256);
        ptx::wgmma_wait<kHeadPanels + kValuePanels>();
        ptx::pin(dq);
        release(shared.k_empty[slot]);
        release_v<kValuePanels, 0>();
      } else {
        multiply_keys(dp, shared.dout, shared.v, v_ring.slot, next_v);
        multiply_keys(s, shared.q, shared.k, k_ring.slot, next_k);
        ptx::barrier_arrive(kTurn, 256);
        ptx::wgmma_wait<kHeadPanels + kValuePanels>();
        ptx::pin(dq);
        release(shared.k_empty[slot]);
        release_v<kValuePanels, kHeadPanels>();
        ptx::wgmma_wait<0>();
      }
      ptx::pin(s);
      ptx::pin(dp);
      v_ring.advance();
    }
    // This warpgroup's rows of q are not read any more.
    ptx::barrier_sync(1 + warpgroup, 128);
    store_rows<HEAD_DIM>(dq, p.forward.scale, shared.q, warpgroup * kOwnRows + 16 * warp,
                         {blocks.head.b, blocks.head.h, blocks.m * kRows, p.forward.seqlen_q}, map, p.dq_rows);
    if (lane == 0) ptx::tma_store_wait_read();
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_backward_queries(const __grid_constant__ ptx::TensorMap q, const __grid_constant__ ptx::TensorMap k,
                            const __grid_constant__ ptx::TensorMap v, const __grid_constant__ ptx::TensorMap dout,
                            const __grid_constant__ ptx::TensorMap dq, const __grid_constant__ HopperBackwardParams p) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    init_barrier(shared.q_full, 1);
    for (int n = 0; n < K_STAGES; ++n) {
      for (int panel = 0; panel < kHeadPanels; ++panel) init_barrier(shared.k_full[n][panel], 1);
      init_barrier(shared.k_empty[n], kWarps);
    }
    for (int n = 0; n < V_STAGES; ++n) {
      for (int panel = 0; panel < kValuePanels; ++panel) {
        init_barrier(shared.v_full[n][panel], 1);
        init_barrier(shared.v_empty[n][panel], kWarps);
      }
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  // Head after head, so that k and v stay in the L2 cache. Under a causal mask what takes longest comes first.
  const unsigned tiles = (p.query_tiles.divisor + kWarpgroups - 1) / kWarpgroups, head = blockIdx.x / tiles;
  const int b = static_cast<int>(p.forward.heads_q.quotient(head));
  const Head query_head{static_cast<int>(head) - b * static_cast<int>(p.forward.heads_q.divisor), b};
  const Blocks blocks(p, query_head, static_cast<int>(tiles - 1 - blockIdx.x % tiles));

  const int warpgroup = __shfl_sync(~0u, thread / 128, 0);
  if (warpgroup == kWarpgroups) {
    ptx::give_registers<24>();
    if (thread == 128 * kWarpgroups) Loader{p, q, k, v, dout, shared}.run(blocks);
  } else {
    ptx::take_registers<240>();
    Consumer consumer{.p = p, .shared = shared, .warpgroup = warpgroup, .warp = (thread / 32) & 3, .lane = thread & 31};
    consumer.run(blocks, dq);
  }
}

}  // namespace headrace::cuda
