// Attention forward for Hopper: 16-bit inputs, persistent blocks of threads, warp-specialised (FlashAttention-3, Shah
// et al. 2024, section 3). One thread brings q, k and v by TMA into rings of shared memory; WARPGROUPS warpgroups have
// 64 query rows each, keep their rows' state in registers, and take turns on the tensor cores, so that the
// exponentials of one run while another multiplies. Within a warpgroup S = q k^T of a block is issued before P v of
// the block before it. A tile ends before the next one begins: their overlap would gain less than its code costs.
//
// The running maximum is not followed: exponents are taken relative to a reference, the maximum of the tile's first
// block. A later score may lie above it, and its p above 1, without harm as long as p and the sums stay finite.
// So most blocks need no maximum, which costs a tenth of the time; when a thread's sum of a block passes 2^14 the
// reference is raised by a power of two. If a result is not finite in the end (a score more than 2^127 above the
// reference, or values near the largest number), the tile is done again at the end with the maximum of every block, and
// scaled down so that no finite input overflows. Masked blocks use the maximum anyway.
//
// Constants of the compilation:
// - FLOAT16: the type of q, k, v, out: 1 float16, 0 bfloat16
// - HEAD_DIM, VALUE_DIM: multiples of 16 and 32, at most 256; TMA fills smaller dimensions up with zeros
// - BLOCKS_PER_SM, WARPGROUPS, KEYS, STAGES, Q_BUFFERS, Q_IN_REGISTERS, OUT_PANELS, PRODUCER_REGISTERS,
//   CONSUMER_REGISTERS: the tile, see HopperForwardTile
// - SMALL_SCALE: 0 < scale <= ln(2): it is folded into the exponent
// - PAIRED: rows see different numbers of keys, and two tiles make a piece of work
// - SOFTCAP, ALIBI, BIAS (1 type of q, 2 float32, 3 type of q and loaded by TMA), MASK, BLOCK_MASK, SINKS, DROPOUT: the
//   options in use
#if FLOAT16
#define HEADRACE_MMA_TYPE "f16"
#else
#define HEADRACE_MMA_TYPE "bf16"
#endif
#include "forward_pipeline.cuh"
#include "forward_scores.cuh"
#include "forward_tiles.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace headrace::cuda {

constexpr int kOutPanels = kValuePanels < OUT_PANELS ? kValuePanels : OUT_PANELS;  // of a warp, written at a time
constexpr int kRedoWords = 64;
// Scores are brought to their final value before the softmax, in natural units: log2(e) times a score might overflow.
// Else scale and log2(e) are folded into the exponent, and references are in units of log2.
constexpr bool kFinalScores = SOFTCAP || ALIBI || BIAS || !SMALL_SCALE;
// In plain blocks they can be folded into the exponent all the same: what overflows there is made to be found in the
// end.
constexpr bool kLoadsBias = BIAS == 3;
constexpr bool kFolds = SMALL_SCALE && (!BIAS || kLoadsBias);
constexpr float kUnit = kFinalScores ? kLn2 : 1.0f;  // of references, where p doubles
// Work on each element, and so code, that outweighs what overlapping the products of two blocks gains: there is one way
// through such a kernel, which compiles in seconds.
constexpr bool kOverlap = !((BIAS && !kLoadsBias) || MASK || BLOCK_MASK || DROPOUT);
constexpr float kRaiseAbove = 16384.0f;
// A bias that all but hides a block's keys leaves a reference far below the scores to come, and in float16 p has no
// room above 1 for what a bias may add. Such a reference is no reason to do without the maximum.
constexpr bool kSettles = !(BIAS && FLOAT16);
constexpr float kLeastReference = -64.0f;
// In the second pass p is at most 2^-64 in bfloat16, so that sums of p v cannot overflow; float16 values are too small
// for that.
constexpr float kSafeOffset = FLOAT16 ? 0.0f : 64.0f * kUnit;

constexpr int kBiasPanels = kLoadsBias ? kKeys / kPanel : 1;

struct alignas(1024) Shared {
  Element q[Q_BUFFERS][WARPGROUPS][kHeadPanels][kRowsOfWarpgroup * kPanel];
  Element k[STAGES][kHeadPanels][kKeys * kPanel];
  Element v[STAGES][kValuePanels][kKeys * kPanel];
  Element out[4 * WARPGROUPS][kOutPanels][kRowsOfWarp * kPanel];  // on its way out
  Element bias[WARPGROUPS][kBiasPanels][kLoadsBias ? kRowsOfWarpgroup * kPanel : 8];
  unsigned long long bias_full[WARPGROUPS], bias_empty[WARPGROUPS];
  unsigned long long q_full[Q_BUFFERS], q_empty[Q_BUFFERS];
  unsigned long long k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  unsigned redo[kRedoWords];
  unsigned never_read;
};

extern "C" __constant__ unsigned dynamic_shared_bytes = sizeof(Shared);

// ---- the producers: one thread, and one more for each warpgroup's bias ----

template <typename Wanted>
__device__ inline Tile next_tile(const Params& p, TileWalk& walk, const Wanted& wanted) {
  for (;;) {
    Tile tile;
    const Find found = walk.next(p, tile);
    if (found == Find::end) return {{0, 0}, -1, 0};
    if (found == Find::tile && wanted(tile.n)) return tile;
  }
}

// Loads the bias of the blocks that its warpgroup does not pass over.
struct BiasProducer {
  const Params& p;
  const ptx::TensorMap& bias;
  Shared& shared;
  const int warpgroup;
  unsigned parity = 0;

  template <typename Wanted>
  __device__ void run(const Wanted& wanted) {
    const unsigned full = ptx::shared_address(&shared.bias_full[warpgroup]);
    TileWalk walk;
    for (Tile tile = next_tile(p, walk, wanted); tile.m >= 0; tile = next_tile(p, walk, wanted)) {
      Blocks blocks(p, tile);
      const int row0 = tile.m * kRows + warpgroup * kRowsOfWarpgroup;
      const OwnBlocks own(blocks.vis, row0);
      for (; blocks.any(); blocks.advance()) {
        if (hidden(blocks, own)) continue;
        ptx::mbarrier_wait(ptx::shared_address(&shared.bias_empty[warpgroup]), parity ^ 1);
        parity ^= 1;
        ptx::mbarrier_expect(full, sizeof(shared.bias[0]));
        for (int panel = 0; panel < kBiasPanels; ++panel)
          ptx::tma_load(ptx::shared_address(shared.bias[warpgroup][panel]), bias, full,
                        blocks.next * kKeys + panel * kPanel, row0, tile.h, tile.b);
      }
    }
  }
};

struct Producer {
  const Params& p;
  const ptx::TensorMap &q, &k, &v;
  Shared& shared;
  ptx::RingPosition<Q_BUFFERS> q_ring;
  ptx::RingPosition<STAGES> k_ring, v_ring;

  // Starts a tile: loads its q, if it reads any keys.
  __device__ void start(const Tile& tile, bool any_keys) {
    const unsigned full = ptx::shared_address(&shared.q_full[q_ring.slot]);
    ptx::mbarrier_wait(ptx::shared_address(&shared.q_empty[q_ring.slot]), q_ring.parity ^ 1);
    if (any_keys) {
      ptx::mbarrier_expect(full, sizeof(shared.q[0]));
      for (int w = 0; w < WARPGROUPS; ++w) {
        for (int panel = 0; panel < kHeadPanels; ++panel) {
          ptx::tma_load(ptx::shared_address(shared.q[q_ring.slot][w][panel]), q, full, panel * kPanel,
                        tile.m * kRows + w * kRowsOfWarpgroup, tile.h, tile.b);
        }
      }
    } else {
      ptx::mbarrier_arrive(full);
    }
    q_ring.advance();
  }

  template <int kPanels>
  __device__ void load_block(Element (&slots)[STAGES][kPanels][kKeys * kPanel], unsigned long long (&full)[STAGES],
                             unsigned long long (&empty)[STAGES], ptx::RingPosition<STAGES>& ring,
                             const ptx::TensorMap& map, const Tile& tile, int block) {
    const unsigned barrier = ptx::shared_address(&full[ring.slot]);
    ptx::mbarrier_wait(ptx::shared_address(&empty[ring.slot]), ring.parity ^ 1);
    ptx::mbarrier_expect(barrier, sizeof(slots[0]));
    for (int panel = 0; panel < kPanels; ++panel) {
      ptx::tma_load(ptx::shared_address(slots[ring.slot][panel]), map, barrier, panel * kPanel, block * kKeys,
                    p.group.quotient(tile.h), tile.b);
    }
    ring.advance();
  }
  __device__ void load_k(const Tile& tile, int block) {
    load_block(shared.k, shared.k_full, shared.k_empty, k_ring, k, tile, block);
  }
  __device__ void load_v(const Tile& tile, int block) {
    load_block(shared.v, shared.v_full, shared.v_empty, v_ring, v, tile, block);
  }

  // v of a block is asked for after k of the block behind it, in the order of use. The next tile is started when the
  // first blocks of this one are under way; where its q has no room of its own yet, at the end.
  template <typename Wanted>
  __device__ void run(const Wanted& wanted) {
    TileWalk walk;
    Tile tile = next_tile(p, walk, wanted);
    if (tile.m >= 0) start(tile, Blocks(p, tile).any());
    while (tile.m >= 0) {
      Tile following;
      const auto look_ahead = [&] {
        following = next_tile(p, walk, wanted);
        if (following.m >= 0) start(following, Blocks(p, following).any());
      };
      int before = -1, step = 0;
      for (Blocks blocks(p, tile); blocks.any(); blocks.advance(), ++step) {
        load_k(tile, blocks.next);
        if (before >= 0) load_v(tile, before);
        before = blocks.next;
        if ((Q_BUFFERS > 1 || Q_IN_REGISTERS) && step == 1) look_ahead();
      }
      if (before >= 0) load_v(tile, before);
      if (!(Q_BUFFERS > 1 || Q_IN_REGISTERS) || step < 2) look_ahead();
      tile = following;
    }
  }
};

// ---- the consumers: a warpgroup with 64 rows ----

struct Consumer {
  const Params& p;
  const ptx::TensorMap& out;
  Shared& shared;
  const int warpgroup, warp, lane;
  ptx::RingPosition<Q_BUFFERS> q_ring;
  ptx::RingPosition<STAGES> k_ring, v_ring;
  unsigned bias_parity = 0;

  float s[kKeys / 2];      // scores of a block, then p
  float o[VALUE_DIM / 2];  // sum of p v
  unsigned probabilities[kKeys / 4];
  unsigned q[Q_IN_REGISTERS ? HEAD_DIM / 16 : 1][4];

  struct Rows : ThreadRows {
    float reference[2];  // -inf: no key was seen
    float sum[2];        // of p: this thread's share
  };
  Rows rows;                      // of the tile at hand
  bool products_pending = false;  // p v of the block before are still to be made

  // -- taking turns on the tensor cores: barrier 1 + w is warpgroup w's turn --
  __device__ void begin_turns() {
    if (warpgroup == 0) ptx::barrier_arrive(1, 256);
  }
  __device__ void wait_turn() { ptx::barrier_sync(1 + warpgroup, 256); }
  __device__ void pass_turn() { ptx::barrier_arrive(1 + (warpgroup + 1 == WARPGROUPS ? 0 : warpgroup + 1), 256); }

  // s = q k^T of the block at hand
  __device__ void multiply_qk() {
    const unsigned k =
        ptx::descriptor_low(ptx::shared_address(shared.k), 16) + uniform(k_ring.slot) * (sizeof(shared.k[0]) / 16);
    const unsigned q_tile = ptx::descriptor_low(ptx::shared_address(shared.q[0][warpgroup]), 16) +
                            (Q_BUFFERS == 1 ? 0 : uniform(q_ring.slot) * (sizeof(shared.q[0]) / 16));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
      const unsigned long long right = ptx::descriptor(k + (step / 4) * (kKeys * 128 / 16) + (step % 4) * 2);
      if constexpr (Q_IN_REGISTERS) {
        if (step == 0) {
          ptx::Wgmma<kKeys>::rs<0, 0>(s, q[step][0], q[step][1], q[step][2], q[step][3], right);
        } else {
          ptx::Wgmma<kKeys>::rs<1, 0>(s, q[step][0], q[step][1], q[step][2], q[step][3], right);
        }
      } else {
        const unsigned long long left =
            ptx::descriptor(q_tile + (step / 4) * (kRowsOfWarpgroup * 128 / 16) + (step % 4) * 2);
        if (step == 0) {
          ptx::Wgmma<kKeys>::ss<0, 0>(s, left, right);
        } else {
          ptx::Wgmma<kKeys>::ss<1, 0>(s, left, right);
        }
      }
    }
    ptx::wgmma_commit();
  }

  // o += p v of the block that is pending
  __device__ void multiply_pv() {
    const unsigned v = ptx::descriptor_low(ptx::shared_address(shared.v), kKeys * 128) +
                       uniform(v_ring.slot) * (sizeof(shared.v[0]) / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      ptx::Wgmma<VALUE_DIM>::rs<1, 1>(o, probabilities[4 * step], probabilities[4 * step + 1],
                                      probabilities[4 * step + 2], probabilities[4 * step + 3],
                                      ptx::descriptor(v + step * (16 * 128 / 16)));
    }
    ptx::wgmma_commit();
  }

  __device__ void load_q() {
    if constexpr (Q_IN_REGISTERS)
      load_left_operand(q, ptx::shared_address(shared.q[q_ring.slot][warpgroup]), warp, lane);
  }
  __device__ void release_q() {
    __syncwarp();  // all lanes have read it
    release(shared.q_empty[q_ring.slot], lane);
    q_ring.advance();
  }

  // -- scores --

  // Scores of a plain block, capped, in units of log2. Where all are small beside the cap, by a polynomial:
  // kTanhRatio.
  __device__ void cap_scores() {
    float top = 0.0f;
#pragma unroll
    for (int e = 0; e < kKeys / 2; ++e) top = fmaxf(top, fabsf(s[e]));
    if (__any_sync(~0u, top > p.softcap_straight_below)) {
#pragma unroll
      for (int e = 0; e < kKeys / 2; ++e)
        s[e] = nan_if_infinite(p.softcap * kLog2E) * tanh_of(s[e] * p.scale_over_softcap);
    } else {
#pragma unroll
      for (int e = 0; e < kKeys / 2; ++e) {
        const float square = s[e] * s[e];
        float ratio = fmaf(square, p.softcap_polynomial[4], p.softcap_polynomial[3]);
        ratio = fmaf(square, ratio, p.softcap_polynomial[2]);
        ratio = fmaf(square, ratio, p.softcap_polynomial[1]);
        s[e] *= fmaf(square, ratio, p.softcap_polynomial[0]);
      }
    }
  }

  // -- a loaded bias --

  // Row r and a column of a block.
  __device__ float bias_at(int r, int column) const {
    const int row = warp * kRowsOfWarp + lane / 4 + 8 * r, in_panel = column % kPanel;
    return to_float(
        shared.bias[warpgroup][column / kPanel][row * kPanel + ((in_panel / 8) ^ (row & 7)) * 8 + in_panel % 8]);
  }
  // Of groups g and g + 1 of 8 columns, in pairs as p is packed.
  __device__ void load_bias(unsigned (&pairs)[4], int g) const {
    const int row = warp * kRowsOfWarp + (lane & 15), chunk = g % 8 + (lane >> 4);
    ptx::load_matrices(pairs,
                       ptx::shared_address(shared.bias[warpgroup][g / 8]) + row * 128 + ((chunk ^ (row & 7)) << 4));
  }
  __device__ void wait_bias() {
    if constexpr (kLoadsBias) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.bias_full[warpgroup]), bias_parity);
      bias_parity ^= 1;
    }
  }
  __device__ void release_bias() {
    if constexpr (kLoadsBias) {
      __syncwarp();
      release(shared.bias_empty[warpgroup], lane);
    }
  }

  // -- softmax --

  // A score, or raw product, in the units of references.
  __device__ float in_units(float score) const { return kFinalScores ? score : score * (p.scale * kLog2E); }
  // The exponential of a difference in the units of references.
  __device__ static float exponential(float difference) {
    return ptx::exp2(kFinalScores ? difference * kLog2E : difference);
  }

  // Moves the references to the maximum of what was seen, this block included. Returns whether o must be scaled by
  // factor.
  __device__ bool raise_to_maximum(float (&factor)[2], float offset) {
    bool changed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float a = s[2 * r], b = s[2 * r + 1];
#pragma unroll
      for (int g = 1; g < kKeys / 8; ++g) {
        a = fmaxf(a, s[4 * g + 2 * r]);
        b = fmaxf(b, s[4 * g + 2 * r + 1]);
      }
      a = fmaxf(a, b);
      a = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
      a = fmaxf(a, __shfl_xor_sync(~0u, a, 2));
      const float raised = fmaxf(rows.reference[r], in_units(a) + offset);
      factor[r] = raised == minus_infinity() ? 1.0f : exponential(rows.reference[r] - raised);
      changed = changed || factor[r] != 1.0f;
      rows.reference[r] = raised;
      rows.sum[r] *= factor[r];
    }
    return __any_sync(~0u, changed);
  }

  __device__ void scale_output(const float (&factor)[2]) {
#pragma unroll
    for (int e = 0; e < VALUE_DIM / 2; ++e) o[e] *= factor[(e >> 1) & 1];
  }

  // Where a block's sum is large the reference is raised by its exponent, and all that was summed, this block too,
  // scaled down. An infinite sum stays so and is found in the end.
  __device__ void raise_if_large(const float (&block_sum)[2]) {
    if (__any_sync(~0u, !(fmaxf(block_sum[0], block_sum[1]) <= kRaiseAbove))) {
      float factor[2];
      unsigned packed[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest = fmaxf(block_sum[r], __shfl_xor_sync(~0u, block_sum[r], 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const int limit = FLOAT16 ? 14 : 126;  // 2^-limit must be a normal number of the type
        const int exponent = min(limit, max(0, (__float_as_int(largest) >> 23) - 127));
        factor[r] = __int_as_float((127 - exponent) << 23);
        packed[r] = ptx::pack(factor[r], factor[r]);
        rows.reference[r] += static_cast<float>(exponent) * kUnit;
        rows.sum[r] *= factor[r];
      }
      scale_output(factor);
#pragma unroll
      for (int n = 0; n < kKeys / 4; ++n) probabilities[n] = ptx::multiply_packed(probabilities[n], packed[n & 1]);
    }
  }

  // s becomes p, summed and packed. between() is called half-way: it waits for the products that still read the packed
  // values of the block before.
  template <bool kPlain, typename Between>
  __device__ void exponentiate(int block, float (&block_sum)[2], const Between& between) {
    constexpr int kGroups = kKeys / 8, kHalf = kGroups / 2;  // groups of 8 columns, 4 values of a thread
    const float scale = p.scale * kLog2E;
    const float minus_reference[2] = {rows.reference[0] == minus_infinity() ? 0.0f : -rows.reference[0],
                                      rows.reference[1] == minus_infinity() ? 0.0f : -rows.reference[1]};
    // What is added to the scores of a plain block in units of log2: at its first column, and from column to column.
    float offset[2] = {minus_reference[0], minus_reference[1]}, slope2 = 0.0f;
    if constexpr (kFinalScores && kPlain && kFolds) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        offset[r] *= kLog2E;
        if constexpr (ALIBI) {
          slope2 = rows.slope * kLog2E;
          offset[r] =
              fmaf(-slope2, static_cast<float>(distance(p, rows.row[r], block * kKeys + 2 * (lane & 3))), offset[r]);
        }
        offset[r] = nan_if_infinite(offset[r]);
      }
    }
    unsigned bias[4];
    const auto exponentials = [&](int g) {
      if constexpr (kLoadsBias && kPlain && kFolds) {
        if (g % 2 == 0) load_bias(bias, g);
      }
#pragma unroll
      for (int e = 4 * g; e < 4 * g + 4; ++e) {
        const int r = (e >> 1) & 1;
        if constexpr (!kFinalScores) {
          s[e] = ptx::exp2(fmaf(s[e], scale, offset[r]));
        } else if constexpr (kPlain && kFolds) {
          const float added = ALIBI ? fmaf(slope2, static_cast<float>(8 * g + (e & 1)), offset[r]) : offset[r];
          float exponent = SOFTCAP ? s[e] + added : fmaf(s[e], scale, added);
          if constexpr (kLoadsBias) exponent = fmaf(of_pair(bias[g % 2 * 2 + r], e & 1), kLog2E, exponent);
          s[e] = ptx::exp2(exponent);
        } else {
          s[e] = exponential(s[e] + minus_reference[r]);
        }
      }
    };
    // Summed from the last to the first: a sum right behind its exponential would wait for it.
    const auto sum_pair = [&](int g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float late = s[4 * g + 4 + 2 * r] + s[4 * g + 4 + 2 * r + 1];
        block_sum[r] += late + s[4 * g + 2 * r] + s[4 * g + 2 * r + 1];
      }
    };
    const auto pack_group = [&](int g) {
      probabilities[2 * g] = ptx::pack(s[4 * g], s[4 * g + 1]);
      probabilities[2 * g + 1] = ptx::pack(s[4 * g + 2], s[4 * g + 3]);
    };
    block_sum[0] = block_sum[1] = 0.0f;
#pragma unroll
    for (int g = 0; g < kHalf; ++g) {
      exponentials(g);
      if (g % 2 == 1 && g > 1) sum_pair(g - 3);
    }
    keep_above(block_sum);
    between();
#pragma unroll
    for (int g = kHalf; g < kGroups; ++g) {
      exponentials(g);
      if (g % 2 == 1) sum_pair(g - 3);
      if constexpr (!DROPOUT) {
        pack_group(2 * (g - kHalf));
        if (2 * (g - kHalf) + 1 < g) pack_group(2 * (g - kHalf) + 1);
      }
    }
    sum_pair(kGroups - 2);
    if constexpr (DROPOUT) {
      drop_scores(p, rows, block, s, p.dropout_kept);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) pack_group(g);
    } else {
      pack_group(kGroups - 1);
    }
  }

  // The assembler would move the exponentials below the wait that follows; a use, though it never happens, stops it.
  __device__ void keep_above(const float (&x)[2]) const {
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.eq.f32 p, %0, 0f2F123456;\nsetp.eq.and.f32 q, %1, 0f2F123456, p;\n"
        "@q st.shared.b32 [%2], %2;\n}" ::"f"(x[0]),
        "f"(x[1]), "r"(ptx::shared_address(&shared.never_read))
        : "memory");
  }

  // -- blocks and tiles --

  // A block of keys, with the products of the block before under way meanwhile, but for the tile's first one.
  // plain: nothing is hidden, and every row has its reference; else edge tells whether something is hidden.
  enum class Block { first, masked, plain };
  template <Block kBlock>
  __device__ void step(int block, bool edge, bool safe) {
    constexpr bool kProducts = kOverlap && kBlock != Block::first, kPlain = kBlock == Block::plain;
    ptx::mbarrier_wait(ptx::shared_address(&shared.k_full[k_ring.slot]), k_ring.parity);
    wait_turn();
    multiply_qk();
    if constexpr (kProducts) start_pv();
    pass_turn();
    ptx::wgmma_wait<kProducts ? 1 : 0>();
    ptx::pin(s);
    release(shared.k_empty[k_ring.slot], lane);
    k_ring.advance();

    if constexpr (kPlain && kFolds && SOFTCAP) cap_scores();
    wait_bias();
    if constexpr (kFinalScores && !(kPlain && kFolds)) {
      if constexpr (kLoadsBias) {
        finish_scores(p, rows, block, s, scale_of(p), [&](int r, int column) { return bias_at(r, column); });
        release_bias();
      } else {
        finish_scores(p, rows, block, s, scale_of(p), BiasInMemory{p, rows, block});
      }
    }
    float factor[2] = {1.0f, 1.0f}, block_sum[2];
    bool rescale = false;
    if constexpr (!kPlain) {
      if (edge || MASK) mask_scores(p, rows, block, s);
      rescale = raise_to_maximum(factor, safe ? kSafeOffset : 0.0f);
    }
    exponentiate<kPlain>(block, block_sum, [&] {
      if constexpr (kProducts) finish_pv();
      if ((kBlock == Block::masked || !kOverlap) && rescale) scale_output(factor);
    });
    if constexpr (kPlain && kFolds) release_bias();
    rows.sum[0] += block_sum[0];
    rows.sum[1] += block_sum[1];
    if constexpr (kPlain) raise_if_large(block_sum);
    products_pending = true;
  }

  __device__ void start_pv() {
    ptx::mbarrier_wait(ptx::shared_address(&shared.v_full[v_ring.slot]), v_ring.parity);
    multiply_pv();
  }
  __device__ void finish_pv() {
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    release(shared.v_empty[v_ring.slot], lane);
    v_ring.advance();
  }
  __device__ void clear_output() {
#pragma unroll
    for (int e = 0; e < VALUE_DIM / 2; ++e) o[e] = 0.0f;
  }

  __device__ void finish_products() {
    if (products_pending) {
      start_pv();
      finish_pv();
      products_pending = false;
    }
  }

  // A block that this warpgroup does not need. Its slots are full before they are given back: the phases stay in order.
  __device__ void skip() {
    ptx::mbarrier_wait(ptx::shared_address(&shared.k_full[k_ring.slot]), k_ring.parity);
    release(shared.k_empty[k_ring.slot], lane);
    k_ring.advance();
    wait_turn();
    pass_turn();
    ptx::mbarrier_wait(ptx::shared_address(&shared.v_full[v_ring.slot]), v_ring.parity);
    release(shared.v_empty[v_ring.slot], lane);
    v_ring.advance();
  }

  // Whether ALiBi has a key before its query in it: there it raises scores from block to block, and distances are not
  // the line that exponentiate() makes of them.
  __device__ bool rises(int block, const OwnBlocks& own) const {
    return ALIBI && distance(p, own.rows.begin, (block + 1) * kKeys - 1) < 0;
  }
  // Of all rows of the warpgroup, whose tensor cores work together.
  __device__ bool reference_is_high() const {
    return ptx::barrier_all(8 + warpgroup, 128, fminf(rows.reference[0], rows.reference[1]) > kLeastReference);
  }
  // The blocks of the tile; leaves the products of the last one pending.
  __device__ void run_blocks(Blocks& blocks, const OwnBlocks& own, bool safe) {
    bool first = true, settled = false;
    while (blocks.any()) {
      const int block = blocks.next;
      if (hidden(blocks, own)) {
        // Its slot of v may be needed before the next block of this warpgroup is there.
        finish_products();
        skip();
        blocks.advance();
        continue;
      }
      const bool is_edge = edge(blocks, own);
      if constexpr (kOverlap) {
        if (settled && !is_edge && !rises(block, own) && !safe) {
          do {
            step<Block::plain>(blocks.next, false, false);
            blocks.advance();
          } while (blocks.any() && blocks.next >= own.full_begin);
          continue;
        }
        if (first) {
          step<Block::first>(block, is_edge, safe);
        } else {
          step<Block::masked>(block, is_edge, safe);
        }
        first = false;
        settled = kSettles && block < own.settled_end && block >= own.full_begin;
        if constexpr (BIAS != 0 && kSettles) settled = settled && reference_is_high();
      } else {
        step<Block::first>(block, is_edge, safe);
        finish_products();
      }
      blocks.advance();
    }
  }

  // -- results --

  // out = o / sum and lse. Notes the tile if not all is finite.
  __device__ void write(bool safe) {
    // half: of the exponent by which a sink is above the scores: what they leave beside it may be a number where their
    // weight is none.
    float inverse[2], half[2] = {1.0f, 1.0f}, not_finite = 0.0f;  // becomes NaN
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = rows.sum[r] + __shfl_xor_sync(~0u, rows.sum[r], 1);
      total += __shfl_xor_sync(~0u, total, 2);
      not_finite += total * 0.0f;
      float top = rows.reference[r];
      if constexpr (SINKS) {
        const float sink = p.sinks[rows.tile.h * p.sinks_stride] * (kFinalScores ? 1.0f : kLog2E);
        top = fmaxf(top, sink);
        if (top != minus_infinity()) {
          half[r] = exponential(0.5f * (rows.reference[r] - top));
          total = total * half[r] * half[r] + exponential(sink - top);
        }
      }
      inverse[r] = total == 0.0f ? 0.0f : __fdividef(half[r], total);
      if (p.lse != nullptr && (lane & 3) == 0 && rows.row[r] < p.seqlen_q) {
        p.lse[rows.tile.b * p.lse_strides.s0 + rows.tile.h * p.lse_strides.s1 + rows.row[r] * p.lse_strides.s2] =
            total == 0.0f ? minus_infinity() : (top + ptx::log2(total) * kUnit) * (kLn2 / kUnit);
      }
    }
#pragma unroll
    for (int e = 0; e < VALUE_DIM / 2; ++e) {
      not_finite += o[e] * 0.0f;
      if constexpr (SINKS) o[e] *= half[(e >> 1) & 1];
      o[e] *= inverse[(e >> 1) & 1];
    }
    store_output(rows.tile);
    if (__any_sync(~0u, not_finite != 0.0f) && !safe && lane == 0) {
      const int bit = rows.tile.n >> p.redo_shift;
      atomicOr(&shared.redo[bit / 32], 1u << (bit % 32));
    }
  }

  // Through shared memory, where each warp has room for its rows, laid out as TMA has it.
  __device__ void store_output(const Tile& tile) {
    const unsigned staging = ptx::shared_address(shared.out[4 * warpgroup + warp]);
    const int row0 = tile.m * kRows + warpgroup * kRowsOfWarpgroup + warp * kRowsOfWarp;
    const int matrix = lane / 8, row_in_matrix = lane & 7;
    const unsigned row = staging + (row_in_matrix + 8 * (matrix & 1)) * 128;
#pragma unroll
    for (int panel0 = 0; panel0 < kValuePanels; panel0 += kOutPanels) {
      if (lane == 0) ptx::tma_store_wait_read();
      __syncwarp();
#pragma unroll
      for (int g = 8 * panel0; g < 8 * (panel0 + kOutPanels) && g < VALUE_DIM / 8; g += 2) {
        const int chunk = g % 8 + matrix / 2;  // of 16 bytes; swizzled with the row
        ptx::store_matrices(row + (g / 8 - panel0) * sizeof(shared.out[0][0]) + ((chunk ^ row_in_matrix) << 4),
                            ptx::pack(o[4 * g], o[4 * g + 1]), ptx::pack(o[4 * g + 2], o[4 * g + 3]),
                            ptx::pack(o[4 * g + 4], o[4 * g + 5]), ptx::pack(o[4 * g + 6], o[4 * g + 7]));
      }
      ptx::tma_store_fence();
      __syncwarp();
      if (p.store_by_tma) {
        if (lane == 0) {
#pragma unroll
          for (int i = 0; i < kOutPanels && panel0 + i < kValuePanels; ++i) {
            ptx::tma_store(out, staging + i * sizeof(shared.out[0][0]), (panel0 + i) * kPanel, row0, tile.h, tile.b);
          }
          ptx::tma_store_commit();
        }
      } else {
        copy_output(tile, row0, panel0 * kPanel);
      }
    }
  }
  // To an out whose strides TMA cannot walk.
  __device__ void copy_output(const Tile& tile, int row0, int column0) {
#pragma unroll 1
    for (int n = lane; n < kOutPanels * kRowsOfWarp * kPanel; n += 32) {
      const int panel = n / (kRowsOfWarp * kPanel), row = n / kPanel % kRowsOfWarp, column = n % kPanel;
      const int i = row0 + row, c = column0 + panel * kPanel + column;
      if (i < p.seqlen_q && c < p.value_dim) {
        static_cast<Element*>(p.out)[tile.b * p.out_strides.s0 + i * p.out_strides.s1 + tile.h * p.out_strides.s2 + c] =
            shared.out[4 * warpgroup + warp][panel][row * kPanel + ((column / 8) ^ (row & 7)) * 8 + column % 8];
      }
    }
  }

  // -- all tiles of this block --

  __device__ void start_tile(const Tile& tile, int row0, bool any_keys) {
    rows.tile = tile;
    rows.row[0] = row0 + warp * kRowsOfWarp + lane / 4;
    rows.row[1] = rows.row[0] + 8;
    rows.reference[0] = rows.reference[1] = minus_infinity();
    rows.sum[0] = rows.sum[1] = 0.0f;
    if constexpr (ALIBI) rows.slope = p.alibi_slopes[tile.b * p.alibi_batch + tile.h * p.alibi_head];
    clear_output();
    ptx::mbarrier_wait(ptx::shared_address(&shared.q_full[q_ring.slot]), q_ring.parity);
    if (any_keys) load_q();
    if constexpr (Q_IN_REGISTERS) release_q();
  }

  template <typename Wanted>
  __device__ void run(const Wanted& wanted, bool safe) {
    bool unwritten = false;  // the tile before
    for (TileWalk walk;;) {
      // Not handed over in shared memory: found anew, it is known to the compiler to be the same in all threads.
      Tile tile;
      const Find found = walk.next(p, tile);
      if (found == Find::nothing || (found == Find::tile && !wanted(tile.n))) continue;
      Blocks blocks(p, tile);
      const int row0 = tile.m * kRows + warpgroup * kRowsOfWarpgroup;
      const OwnBlocks own(blocks.vis, row0);
      finish_products();
      if (unwritten) write(safe);
      if (found == Find::end) break;
      start_tile(tile, row0, blocks.any());
      run_blocks(blocks, own, safe);
      if constexpr (!Q_IN_REGISTERS) release_q();
      unwritten = true;
    }
  }
  // The stores of this warp are in device memory.
  __device__ void finish_stores() {
    if (lane == 0) ptx::tma_store_wait();
    __syncwarp();
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM)
    hopper_forward(const __grid_constant__ ptx::TensorMap q, const __grid_constant__ ptx::TensorMap k,
                   const __grid_constant__ ptx::TensorMap v, const __grid_constant__ ptx::TensorMap out,
                   const __grid_constant__ ptx::TensorMap bias, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    init_slots(shared.q_full, shared.q_empty);
    init_slots(shared.k_full, shared.k_empty);
    init_slots(shared.v_full, shared.v_empty);
    if constexpr (kLoadsBias) {
      for (int w = 0; w < WARPGROUPS; ++w) {
        ptx::mbarrier_init(ptx::shared_address(&shared.bias_full[w]), 1);
        ptx::mbarrier_init(ptx::shared_address(&shared.bias_empty[w]), 4);
      }
    }
    ptx::mbarrier_init_fence();
  }
  if (thread < kRedoWords) shared.redo[thread] = 0;
  __syncthreads();

  const auto every_tile = [](int) { return true; };
  const auto to_be_redone = [&](int n) {
    const int bit = n >> p.redo_shift;
    return (shared.redo[bit / 32] >> (bit % 32) & 1) != 0;
  };
  const auto any_to_be_redone = [&] {
    ptx::barrier_sync(0, kThreads);
    unsigned any = 0;
    for (int n = 0; n < kRedoWords; ++n) any |= shared.redo[n];
    return any != 0;
  };

  const int warpgroup = __shfl_sync(~0u, thread / 128, 0);
  if (warpgroup == WARPGROUPS) {
    ptx::give_registers<PRODUCER_REGISTERS>();
    Producer producer{p, q, k, v, shared, {}, {}, {}};
    const int number = thread - 128 * WARPGROUPS;
    BiasProducer bias_producer{p, bias, shared, number / 32 - 1};
    const bool loads = number == 0;
    const bool loads_bias = kLoadsBias && number % 32 == 0 && number > 0 && number <= 32 * WARPGROUPS;
    if (loads) producer.run(every_tile);
    if (loads_bias) bias_producer.run(every_tile);
    __syncwarp();
    if (any_to_be_redone()) {
      if (loads) producer.run(to_be_redone);
      if (loads_bias) bias_producer.run(to_be_redone);
    }
  } else {
    ptx::take_registers<CONSUMER_REGISTERS>();
    Consumer consumer{
        .p = p, .out = out, .shared = shared, .warpgroup = warpgroup, .warp = (thread / 32) & 3, .lane = thread & 31};
    consumer.begin_turns();
    for (int pass = 0; pass < 2; ++pass) {
      const bool safe = pass == 1;
      if (safe && !any_to_be_redone()) break;
      consumer.run([&](int n) { return !safe || to_be_redone(n); }, safe);
      consumer.finish_stores();
    }
  }
}

}  // namespace headrace::cuda
