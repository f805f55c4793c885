// Attention backward for Hopper, 16-bit inputs, heads up to 128: a block of threads has 128 keys of a head, keeps their
// dk and dv in registers and walks over the queries (FlashAttention-3, Shah et al. 2024, section 3; FlashAttention-2,
// Dao 2023, section 3.1). Two warpgroups have 64 keys each. They compute transposed scores, S^T = k q^T, so that p and
// ds lie in registers as the left operands of dv += p^T dout and dk += ds^T q need them; ds goes to shared memory for
// dq = ds k, of which each warpgroup makes one half for all 128 keys.
//
// A step of a warpgroup is its arithmetic on scores, which are in registers when it begins, and then one run of all
// products on the tensor cores: dv, dk, dq of the step before, S^T and dp^T of the next step. The warpgroups take turns
// with these runs, so that the arithmetic of one hides behind the products of the other.
//
// Blocks of threads stay: each takes key tile after key tile, and loads the first queries of the next while it stores
// what it made of the last.
//
// dq is summed in device memory, in float32, by bulk reductions out of shared memory. In turns the key tiles of a head
// add to a query tile's dq in a fixed order, and follow one another over the queries, so that few ever wait; see
// turn_of().
//
// Constants of the compilation:
// - FLOAT16: the type of q, k, v, out and their gradients: 1 float16, 0 bfloat16
// - HEAD_DIM, VALUE_DIM: multiples of 32, at most 128; TMA fills smaller dimensions up with zeros
// - QUERIES: of a step: 128 where HEAD_DIM is 64, else 64
// - STAGES, BIAS_STAGES: steps of q and dout, and of the bias, in shared memory
// - PREFETCH: groups of 8 queries whose statistics are read a step ahead
// - SMALL_SCALE: 0 < scale <= ln(2): it is folded into the exponent
// - DETERMINISTIC: key tiles take turns
// - SOFTCAP, ALIBI, BIAS (1 type of q, 2 float32, 3 type of q and loaded by TMA), MASK, BLOCK_MASK, DROPOUT: the
//   options in use
// - DBIAS: the gradient of a bias that has an element for every score is made, too, where key tiles go; not with many
//   options. 2: it is ds, as that is in shared memory for dq, from where TMA stores it; 1: it is stored one by one
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
#include "ptx/turns.cuh"
#include "ptx/wgmma.cuh"

namespace headrace::cuda {

constexpr int kOwnKeys = 64;  // of a warpgroup
constexpr int kKeyPanelBytes = kKeys * 128, kQueryPanelBytes = kQueries * 128;
// A warpgroup's half of dq of a step, 64 x 64: rows where there are 128, else columns.
constexpr bool kHalfIsRows = kQueries == 128;
static_assert(!(DBIAS && kManyOptions));  // finish_any() passes over what is hidden
constexpr bool kLoadsBias = BIAS == 3;
static_assert(kHalfIsRows ? HEAD_DIM == 64 : kQueries == 64 && kHeadPanels == 2);
constexpr int kHalfFloats = 64 * 64;
constexpr int kStatisticsBytes = 4 * statistics_words(kQueries);
constexpr int kBiasStages = kLoadsBias ? BIAS_STAGES : 1;
constexpr int kSenders = 3;  // of dq
constexpr int kItems = 2;    // that are known ahead
// Named barriers: kTurn, kTurn + 1 the warpgroups' turns, kTurn + 2, kTurn + 3 within one; 1 of both.
constexpr int kTurn = 4;

// ---- what a block of threads does ----

// The order of all items: some heads at a time, a section, as many as leave room in the L2 cache for what is read and
// summed. In order (p.in_order: under a band, or where a head has few key tiles) a section's heads take turns; key
// tiles that see few queries come first, so that none waits for one behind it, but in the last section, where what
// takes long comes first; it has all heads that are needed for all blocks of threads to end at the same time. Else a
// section is done gang by gang, what fills the device at a time: a gang of a head is every key tile whose number leaves
// the same rest.
struct Item : KeyTile {
  int gang, member;  // n = gang + member * gangs
  int members;       // of the gang

  static constexpr int kNone = -1;  // n where there are no more items

  __device__ Item(const HopperBackwardParams& p, unsigned index) {
    if (index >= p.items) {
      n = kNone;
      return;
    }
    const int key_tiles = static_cast<int>(p.key_tiles), gangs = static_cast<int>(p.gangs);
    const unsigned section = min(p.section_items.quotient(index), p.turned_section);
    const unsigned in_section = index - section * p.section_items.divisor;
    const unsigned first_head = section * p.section_heads, heads_left = p.heads - first_head;
    const unsigned heads = section == p.turned_section ? heads_left : min(p.section_heads, heads_left);
    const int place = static_cast<int>(in_section / heads), head = static_cast<int>(first_head + in_section % heads);
    // The first gangs have one member more than the others.
    const int most = ceil_div(key_tiles, gangs), larger = key_tiles - (most - 1) * gangs;
    if (place < larger * most) {
      gang = place / most;
      member = place - gang * most;
      members = most;
    } else {
      gang = larger + (place - larger * most) / (most - 1);
      member = (place - larger * most) % (most - 1);
      members = most - 1;
    }
    b = static_cast<int>(p.heads_kv.quotient(head));
    h = head - b * static_cast<int>(p.heads_kv.divisor);
    step = p.in_order && (section == p.turned_section) != (p.downwards != 0) ? -1 : 1;
    if (DETERMINISTIC && p.in_order && step > 0) member = members - 1 - member;
    n = gang + member * gangs;
    find_queries(p);
    start = !p.in_order ? member * end / members : step > 0 ? begin : end - 1;
  }
};

struct alignas(1024) Shared {
  Element k[kHeadPanels][kKeys * kPanel];
  Element v[kValuePanels][kKeys * kPanel];
  Element q[STAGES][kHeadPanels][kQueries * kPanel];
  Element dout[STAGES][kValuePanels][kQueries * kPanel];
  Element ds[2][2][kQueries * kPanel];                               // of two steps, the warpgroups' keys
  float dq[kWarpgroups][4][8 * 32 * 4];                              // on its way out, warp by warp as in registers
  Element bias[kBiasStages][2][kLoadsBias ? kQueries * kPanel : 8];  // as ds
  float statistics[STAGES][kStatisticsBytes / 4];
  unsigned long long k_full, v_full, keys_empty;
  unsigned long long q_full[STAGES], q_empty[STAGES];  // with dout and statistics
  unsigned long long bias_full[kBiasStages], bias_empty[kBiasStages];
  unsigned long long ds_full[2];
  unsigned long long dq_full[kWarpgroups][kSenders], dq_empty[kWarpgroups];  // full: for each sender
  unsigned long long item_full[kItems], item_empty[kItems], sent;
  Item item[kItems];
};

extern "C" __constant__ unsigned dynamic_shared_bytes = sizeof(Shared);

// When a key tile may add to the dq of query tile m: after so many others. The key tiles that visit m are an interval.
// They come gang after gang.
//
// In order each begins at its first query tile, under a causal mask later than the key tile before it: the last one is
// the first to come to m, and the others follow. In the last section they go down from the last query tile, and key
// tile 0, which is begun first, is the first to come to m. With only a lower bound of the band all this is turned
// round.
//
// Else the starts of a gang are spread over the queries: the member that starts last at or before m comes first, then
// those before it, then round. They wait for one another, and are no more than the device works on at a time.
//
// Nothing waits for ever: a ticket says which item a block of threads takes, so that all items before it have been
// begun, or will be by a block that waits for none behind them; no item waits for one behind it, but inside gangs.
// There a block takes a ticket when all that it did before has been added: so it has none that waits for it.
__device__ inline int turn_of(const HopperBackwardParams& p, const Item& item, int m) {
  const int gangs = static_cast<int>(p.gangs);
  const Range keys = band(p).keys_of_rows(rows_of(p, m));
  const int first = keys.begin / kKeys, end = ceil_div(keys.end, kKeys);
  const auto in_gangs_before = [&](int tiles) { return tiles / gangs * item.gang + min(tiles % gangs, item.gang); };
  const int before = in_gangs_before(end) - in_gangs_before(first);
  const auto members_below = [&](int tile) { return (max(tile - item.gang, 0) + gangs - 1) / gangs; };
  const int low = members_below(first), high = members_below(end) - 1;
  if (p.in_order) return before + (item.step > 0 ? high - item.member : item.member - low);
  const int leader = static_cast<int>(p.query_tiles.quotient((m + 1) * item.members - 1));
  return before + (item.member <= leader ? leader - item.member : leader + 1 + high - item.member);
}

// The items of a block of threads, one after another, as the loading thread makes them known.
using ItemRing = ptx::RingPosition<kItems>;
__device__ inline const Item& wait_item(const Shared& shared, const ItemRing& ring) {
  ptx::mbarrier_wait(ptx::shared_address(&shared.item_full[ring.slot]), ring.parity);
  return shared.item[ring.slot];
}
__device__ inline void release_item(Shared& shared, const ItemRing& ring) {
  ptx::mbarrier_arrive(ptx::shared_address(&shared.item_empty[ring.slot]));
}

// ---- the producer's threads: one loads, three send dq ----

struct Loader {
  const HopperBackwardParams& p;
  const ptx::TensorMap &q, &k, &v, &dout, &bias;
  Shared& shared;
  ptx::RingPosition<kBiasStages> bias_ring;

  __device__ void load_bias(const Steps& steps) {
    if constexpr (kLoadsBias) {
      const unsigned barrier = ptx::shared_address(&shared.bias_full[bias_ring.slot]);
      const Head head = steps.query_head();
      ptx::mbarrier_wait(ptx::shared_address(&shared.bias_empty[bias_ring.slot]), bias_ring.parity ^ 1);
      ptx::mbarrier_expect(barrier, sizeof(shared.bias[0]));
      for (int w = 0; w < kWarpgroups; ++w)
        ptx::tma_load(ptx::shared_address(shared.bias[bias_ring.slot][w]), bias, barrier,
                      steps.tile.n * kKeys + w * kOwnKeys, steps.m * kQueries, head.h, head.b);
      bias_ring.advance();
    }
  }
  __device__ void load_step(const Steps& steps, int slot) {
    const unsigned barrier = ptx::shared_address(&shared.q_full[slot]);
    const Head head = steps.query_head();
    ptx::mbarrier_expect(barrier, sizeof(shared.q[0]) + sizeof(shared.dout[0]) + kStatisticsBytes);
    load_panels<kQueries>(shared.q[slot], q, barrier, steps.m * kQueries, head.h, head.b);
    load_panels<kQueries>(shared.dout[slot], dout, barrier, steps.m * kQueries, head.h, head.b);
    ptx::bulk_load(ptx::shared_address(shared.statistics[slot]), p.statistics + steps.place() * (kStatisticsBytes / 4),
                   kStatisticsBytes, barrier);
  }
  // The number of the block's next item.
  __device__ unsigned take(unsigned taken) const {
    // Without queries nothing set the tickets to 0.
    return p.forward.seqlen_q > 0 ? atomicAdd(p.tickets, 1) : blockIdx.x + taken * gridDim.x;
  }
  __device__ void run() {
    ptx::RingPosition<STAGES> ring;
    ItemRing items;
    unsigned parity = 0;  // of the item
    for (unsigned taken = 0;; ++taken, parity ^= 1) {
      if (DETERMINISTIC && p.in_order == 0 && taken > 0)
        ptx::mbarrier_wait(ptx::shared_address(&shared.sent), parity ^ 1);
      const unsigned index = take(taken);
      ptx::mbarrier_wait(ptx::shared_address(&shared.item_empty[items.slot]), items.parity ^ 1);
      shared.item[items.slot] = Item(p, index);
      ptx::mbarrier_arrive(ptx::shared_address(&shared.item_full[items.slot]));
      if (index >= p.items) return;
      load(shared.item[items.slot], ring, parity);
      items.advance();
    }
  }
  __device__ void load(const Item& item, ptx::RingPosition<STAGES>& ring, unsigned parity) {
    const unsigned k_full = ptx::shared_address(&shared.k_full), v_full = ptx::shared_address(&shared.v_full);
    const unsigned keys_empty = ptx::shared_address(&shared.keys_empty);
    bool first = true;
    for (Steps steps(p, item); steps.any(); steps.advance(), first = false) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.q_empty[ring.slot]), ring.parity ^ 1);
      load_step(steps, ring.slot);
      load_bias(steps);
      ring.advance();
      if (!first) continue;
      ptx::mbarrier_wait(keys_empty, parity ^ 1);
      ptx::mbarrier_expect(k_full, sizeof(shared.k));
      load_panels<kKeys>(shared.k, k, k_full, item.n * kKeys, item.h, item.b);
      ptx::mbarrier_expect(v_full, sizeof(shared.v));
      load_panels<kKeys>(shared.v, v, v_full, item.n * kKeys, item.h, item.b);
    }
    if (!first) return;
    // Nothing is loaded, but phases are counted.
    ptx::mbarrier_wait(keys_empty, parity ^ 1);
    ptx::mbarrier_arrive(k_full);
    ptx::mbarrier_arrive(v_full);
  }
};

// Sends dq. Each of several threads has every so manieth step: a sum is in memory, and its turn ends, later than the
// next step has its dq.
struct Sender {
  const HopperBackwardParams& p;
  Shared& shared;

  // A half of a step; leaves when its room is free.
  __device__ void send(const Steps& steps, int half, const ptx::RingPosition<kSenders>& ring, bool add) const {
    ptx::mbarrier_wait(ptx::shared_address(&shared.dq_full[half][ring.slot]), ring.parity);
    const unsigned from = ptx::shared_address(shared.dq[half]);
    float* to = p.dq + (2 * steps.place() + half) * kHalfFloats;
    if (add) {
      ptx::bulk_add(to, from, sizeof(shared.dq[0]));
    } else {
      ptx::bulk_store(to, from, sizeof(shared.dq[0]));
    }
    ptx::tma_store_commit();
    ptx::tma_store_wait_read();
    ptx::mbarrier_arrive(ptx::shared_address(&shared.dq_empty[half]));
  }

  __device__ void run(unsigned which) const {
    ptx::RingPosition<kSenders> ring;
    for (ItemRing items;; items.advance()) {
      const Item& item = wait_item(shared, items);
      if (item.n == Item::kNone) break;
      send_item(item, which, ring);
      release_item(shared, items);
      if (DETERMINISTIC) ptx::mbarrier_arrive(ptx::shared_address(&shared.sent));
    }
  }
  // In turns, what a block mask hides takes its turn too: so all know how many come before them.
  __device__ void send_item(const Item& item, unsigned which, ptx::RingPosition<kSenders>& ring) const {
    for (Steps steps(p, item, true); steps.any(); steps.next()) {
      const bool hidden = steps.hidden();
      if (ring.slot == which) {
        int* const counter = p.turns + steps.place();
        const int turn = DETERMINISTIC ? turn_of(p, item, steps.m) : 0;
        if (DETERMINISTIC && turn > 0) {
          ptx::wait_for_turn(counter, turn);
          ptx::bulk_fence();
        }
        if (!hidden) {
          // Who comes first need not add. A block mask may hide the tile from it.
          const bool add = !DETERMINISTIC || BLOCK_MASK || turn > 0;
          send(steps, 0, ring, add);
          send(steps, 1, ring, add);
        }
        if constexpr (DETERMINISTIC) {
          ptx::tma_store_wait();
          ptx::bulk_fence();
          ptx::end_turn(counter);
        }
      }
      if (!hidden) ring.advance();
    }
  }
};

// ---- the consumers: a warpgroup with 64 keys ----

struct Consumer {
  const HopperBackwardParams& p;
  const ptx::TensorMap& dbias;
  Shared& shared;
  const int warpgroup, warp, lane;

  float s[kQueries / 2], dp[kQueries / 2];  // transposed scores and dout . v of a step
  unsigned probabilities[kQueries / 4], ds[kQueries / 4];
  float dq[kHalfFloats / 128];
  float dk[HEAD_DIM / 2], dv[VALUE_DIM / 2];
  float statistics[PREFETCH][4];
  unsigned count;  // of all steps of all items
  ptx::RingPosition<STAGES> ring;
  ptx::RingPosition<kBiasStages> bias_ring;
  ptx::RingPosition<kSenders> dq_ring;  // of the step before

  unsigned base;  // of shared memory, as descriptors of operands have it

  // Of the step before: where its ds belongs.
  int last_m;
  Head last_head;

  // Where a thread reads and writes. Made in each step, of a number that the compiler does not keep: registers are
  // short.
  __device__ static int thread_now() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread & 127;
  }
  // A row of the 8 x 8 matrices of ds, or of the bias, of this warpgroup's keys: rows are queries, columns the warp's
  // keys, 16 bytes swizzled with the row.
  __device__ unsigned matrix_address(unsigned of_step) const {
    const int thread = thread_now(), row = thread & 7, chunk = thread / 32 * 2 + (thread >> 3 & 1);
    return of_step + warpgroup * kQueryPanelBytes + (8 * (thread >> 4 & 1) + row) * 128 + ((chunk ^ row) << 4);
  }
  __device__ unsigned dq_address() const {
    const int thread = thread_now();
    return ptx::shared_address(shared.dq[warpgroup]) + thread / 32 * sizeof(shared.dq[0][0]) + thread % 32 * 16;
  }
  __device__ unsigned statistics_address(unsigned slot) const {
    return ptx::shared_address(shared.statistics) + (thread_now() & 3) * 16 + slot * kStatisticsBytes;
  }

  // Where operands begin, their panels so many bytes apart: constants beside the base, which cost no registers.
  template <typename Place>
  __device__ unsigned operand(const Place& place, int panel_bytes) const {
    const auto offset = reinterpret_cast<const char*>(&place) - reinterpret_cast<const char*>(&shared);
    return base + static_cast<unsigned>(offset / 16) + (static_cast<unsigned>(panel_bytes / 16) << 16);
  }
  // This warpgroup's keys as left operands.
  __device__ unsigned own_k() const { return operand(shared.k, 16) + warpgroup * (kOwnKeys * 128 / 16); }
  __device__ unsigned own_v() const { return operand(shared.v, 16) + warpgroup * (kOwnKeys * 128 / 16); }
  // ds of a step, and all keys.
  __device__ unsigned dq_left(unsigned buffer) const {
    return operand(shared.ds, 16) + buffer * (sizeof(shared.ds[0]) / 16) +
           (kHalfIsRows ? warpgroup * (64 * 128 / 16) : 0);
  }
  __device__ unsigned dq_right() const {
    return operand(shared.k, kKeyPanelBytes) + (kHalfIsRows ? 0 : warpgroup * (kKeyPanelBytes / 16));
  }
  // q and dout of a step as right operands of S^T and dp^T, where panels are read one by one, and of dk and dv.
  __device__ unsigned q_right(unsigned slot, int panel_bytes) const {
    return operand(shared.q, panel_bytes) + slot * (sizeof(shared.q[0]) / 16);
  }
  __device__ unsigned dout_right(unsigned slot, int panel_bytes) const {
    return operand(shared.dout, panel_bytes) + slot * (sizeof(shared.dout[0]) / 16);
  }

  __device__ void start() { base = ptx::descriptor_low(ptx::shared_address(&shared), 0); }

  // -- taking turns on the tensor cores --
  __device__ void begin_turns() {
    if (warpgroup == 1) ptx::barrier_arrive(kTurn, 256);
  }
  __device__ void wait_turn() { ptx::barrier_sync(kTurn + warpgroup, 256); }
  // Nobody waits for the last turn.
  __device__ void pass_turn(bool more) {
    if (warpgroup == 0 || more) ptx::barrier_arrive(kTurn + 1 - warpgroup, 256);
  }

  // -- products --

  // to = k q^T or v dout^T: steps [kBegin, kEnd) of the reduction over the head's columns.
  template <int kBegin, int kEnd>
  __device__ static void multiply_keys(float (&to)[kQueries / 2], unsigned keys, unsigned queries) {
#pragma unroll
    for (int n = kBegin; n < kEnd; ++n) {
      const unsigned long long left = ptx::descriptor(keys + (n / 4) * (kKeyPanelBytes / 16) + (n % 4) * 2);
      const unsigned long long right = ptx::descriptor(queries + (n / 4) * (kQueryPanelBytes / 16) + (n % 4) * 2);
      if (n == 0) {
        ptx::Wgmma<kQueries>::template ss<0, 0>(to, left, right);
      } else {
        ptx::Wgmma<kQueries>::template ss<1, 0>(to, left, right);
      }
    }
  }
  // to += left^T right, over the queries.
  template <int kColumns>
  __device__ static void multiply_queries(float (&to)[kColumns / 2], const unsigned (&left)[kQueries / 4],
                                          unsigned right) {
#pragma unroll
    for (int n = 0; n < kQueries / 16; ++n) {
      ptx::Wgmma<kColumns>::template rs<1, 1>(to, left[4 * n], left[4 * n + 1], left[4 * n + 2], left[4 * n + 3],
                                              ptx::descriptor(right + n * (16 * 128 / 16)));
    }
  }
  // dq = ds k over all keys, of the step whose ds is in this buffer.
  __device__ void multiply_dq(unsigned buffer) {
    const unsigned left_begin = dq_left(buffer), right_begin = dq_right();
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      const unsigned long long left = ptx::descriptor(left_begin + (n / 4) * (kQueryPanelBytes / 16) + (n % 4) * 2);
      const unsigned long long right = ptx::descriptor(right_begin + n * (16 * 128 / 16));
      if (n == 0) {
        ptx::Wgmma<64>::ss<0, 1>(dq, left, right);
      } else {
        ptx::Wgmma<64>::ss<1, 1>(dq, left, right);
      }
    }
  }

  // -- scores to p and ds --

  // The thread's two keys, 8 apart, and the first of its queries: of every 8 it has two.
  __device__ int key(const Steps& steps, int r) const {
    return steps.tile.n * kKeys + warpgroup * kOwnKeys + 16 * warp + lane / 4 + 8 * r;
  }
  __device__ int query(const Steps& steps) const { return steps.m * kQueries + 2 * (lane & 3); }

  __device__ static void load_statistics(float (&to)[4], unsigned address) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "r"(address)
                 : "memory");
  }
  // Without `more` of anything: of k, which nobody overwrites now.
  __device__ void prefetch_statistics(bool more) {
    const unsigned from = more ? statistics_address(ring.slot) : ptx::shared_address(shared.k);
#pragma unroll
    for (int g = 0; g < PREFETCH; ++g) load_statistics(statistics[g], from + g * sizeof(RowPair) * 4);
  }

  // Elements of a tile in which nothing is hidden and no option is in use but dropout.
  __device__ void finish_plain(const Steps& steps, unsigned statistics_of_step) {
    const float scale = p.forward.scale * kLog2E;
    const Kept<kQueries / 8, false> kept(p.forward, steps.query_head(), key(steps, 0), query(steps));
#pragma unroll
    for (int g = 0; g < kQueries / 8; ++g) {
      float(&row)[4] = statistics[g % PREFETCH];
      const float lse0 = row[0], lse1 = row[1], d0 = row[2], d1 = row[3];
      if (g + PREFETCH < kQueries / 8) load_statistics(row, statistics_of_step + (g + PREFETCH) * sizeof(RowPair) * 4);
      const float p0 = ptx::exp2(fmaf(s[4 * g], scale, lse0)), p1 = ptx::exp2(fmaf(s[4 * g + 1], scale, lse1));
      const float p2 = ptx::exp2(fmaf(s[4 * g + 2], scale, lse0)), p3 = ptx::exp2(fmaf(s[4 * g + 3], scale, lse1));
      const float kept0 = kept.factor(p.forward, 4 * g), kept1 = kept.factor(p.forward, 4 * g + 1);
      const float kept2 = kept.factor(p.forward, 4 * g + 2), kept3 = kept.factor(p.forward, 4 * g + 3);
      probabilities[2 * g] = ptx::pack(p0 * kept0, p1 * kept1);
      probabilities[2 * g + 1] = ptx::pack(p2 * kept2, p3 * kept3);
      ds[2 * g] = pack_gradients(fmaf(dp[4 * g], kept0, d0) * p0, fmaf(dp[4 * g + 1], kept1, d1) * p1);
      ds[2 * g + 1] = pack_gradients(fmaf(dp[4 * g + 2], kept2, d0) * p2, fmaf(dp[4 * g + 3], kept3, d1) * p3);
    }
  }

  // The gradient of the bias at query i and key j, if they are inside the sequence.
  __device__ void store_dbias(const Head& head, int i, int j, float gradient) const {
    if (i >= p.forward.seqlen_q || j >= p.forward.seqlen_k) return;
    const long long at = head.b * p.dbias_strides.batch + head.h * p.dbias_strides.head + i * p.dbias_strides.row +
                         j * p.dbias_strides.key;
    if constexpr (BIAS == 2) {
      static_cast<float*>(p.dbias)[at] = gradient;
    } else {
      static_cast<Element*>(p.dbias)[at] = to_element(gradient);
    }
  }

  // Any tile. What is hidden gets p = 0 and ds = 0, and p <= 1 whatever lse's rounding. kInside: nothing lies outside
  // the sequences, the band and the blocks of the mask.
  template <bool kInside>
  __device__ void finish_any(const Steps& steps, unsigned statistics_of_step) {
    const Params& forward = p.forward;
    const Head head = steps.query_head();
    const float slope = slope_of(forward, head);
    const int i0 = query(steps);
    const auto visible = kInside && !MASK ? VisibleByData{{~0u, ~0u}}
                                          : visible_of_two<kQueries / 4, false>(forward, head, i0, key(steps, 0));
    const Kept<kQueries / 8, false> keeps(forward, head, key(steps, 0), i0);
    unsigned bias[4], bias_from = 0;  // of two groups, in pairs as ds
    if constexpr (kLoadsBias) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.bias_full[bias_ring.slot]), bias_ring.parity);
      bias_from = matrix_address(ptx::shared_address(shared.bias[bias_ring.slot]));
    }
#pragma unroll
    for (int g = 0; g < kQueries / 8; ++g) {
      if constexpr (kLoadsBias) {
        if (g % 2 == 0) ptx::load_matrices_transposed(bias, bias_from + g / 2 * (16 * 128));
      }
      if (visible.nothing_of(g)) {
        probabilities[2 * g] = probabilities[2 * g + 1] = ds[2 * g] = ds[2 * g + 1] = 0;
        continue;
      }
      float row[4];
      load_statistics(row, statistics_of_step + g * sizeof(RowPair) * 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int j = key(steps, r);
        float of_p[2], of_ds[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int i = i0 + 8 * g + c, e = 4 * g + 2 * r + c;
          float derivative;
          float bias_here = 0.0f;
          if constexpr (kLoadsBias) {
            bias_here = of_pair(bias[g % 2 * 2 + r], c);
          } else {
            bias_here = bias_near(forward, head, i, j);
          }
          const float probability =
              probability_of<kInside>(forward, slope, s[e], bias_here, row[c], i, j, visible(r, 2 * g + c), derivative);
          const float kept = keeps.factor(forward, e);
          of_p[c] = probability * kept;
          const float gradient = score_gradient(probability, dp[e], kept, row[2 + c], 1.0f);
          if constexpr (DBIAS == 1) store_dbias(head, i, j, gradient);
          of_ds[c] = gradient * derivative;
        }
        probabilities[2 * g + r] = ptx::pack(of_p[0], of_p[1]);
        ds[2 * g + r] = pack_gradients(of_ds[0], of_ds[1]);
      }
    }
    if constexpr (kLoadsBias) {
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.bias_empty[bias_ring.slot]));
      bias_ring.advance();
    }
  }

  // Whether nothing of this warpgroup's part of a tile is outside the sequence of keys, the band, or the block mask's
  // blocks.
  __device__ bool is_inside(const Steps& steps) const {
    const int key0 = steps.tile.n * kKeys + warpgroup * kOwnKeys;
    const int nearest = key0 - (steps.m * kQueries + kQueries - 1), farthest = key0 + kOwnKeys - 1 - steps.m * kQueries;
    if (key0 + kOwnKeys > p.forward.seqlen_k || nearest < p.forward.band_lo || farthest > p.forward.band_hi)
      return false;
    if constexpr (BLOCK_MASK) {
      return visibility(p.forward, steps.query_head())
                 .classify(rows_of(p, steps.m), {key0, min_index(p.forward.seqlen_k, key0 + kOwnKeys)}) ==
             TileKind::full;
    }
    return true;
  }
  // s and dp of a step become p and ds.
  __device__ void finish(const Steps& steps) {
    const unsigned statistics_of_step = statistics_address(ring.slot);
    if constexpr (kManyOptions || DBIAS == 1) {  // long enough
      finish_any<false>(steps, statistics_of_step);
    } else if constexpr (kOptions) {
      if (is_inside(steps)) {
        finish_any<true>(steps, statistics_of_step);
      } else {
        finish_any<false>(steps, statistics_of_step);
      }
    } else {
      if (shared.statistics[ring.slot][2 * kQueries] == 0.0f && is_inside(steps)) {
        finish_plain(steps, statistics_of_step);
      } else {
        finish_any<false>(steps, statistics_of_step);
      }
    }
  }

  // -- steps --

  // Half a tile of dq goes to shared memory, from where it is sent.
  __device__ void stage_dq(unsigned parity) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.dq_empty[warpgroup]), parity ^ 1);
    const unsigned to = dq_address();
#pragma unroll
    for (int g = 0; g < 8; ++g)
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + g * 512), "f"(dq[4 * g]), "f"(dq[4 * g + 1]),
                   "f"(dq[4 * g + 2]), "f"(dq[4 * g + 3])
                   : "memory");
  }

  // S^T and dp^T of the first step.
  __device__ void first_scores(unsigned parity) {
    const unsigned slot = uniform(ring.slot);
    ptx::mbarrier_wait(ptx::shared_address(&shared.k_full), parity);
    ptx::mbarrier_wait(ptx::shared_address(&shared.q_full[ring.slot]), ring.parity);
    ptx::mbarrier_wait(ptx::shared_address(&shared.v_full), parity);
    ptx::wgmma_fence();
    multiply_keys<0, HEAD_DIM / 16>(s, own_k(), q_right(slot, 16));
    multiply_keys<0, VALUE_DIM / 16>(dp, own_v(), dout_right(slot, 16));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    ptx::pin(dp);
    prefetch_statistics(true);
  }

  // The step whose S^T and dp^T are in registers. dq of the step before is made here, so that nobody waits for the
  // other warpgroup's ds; in the first step it is made of anything, and dropped; as are, in the last one, S^T and dp^T
  // of a step that does not come. So there is one loop, without products under conditions, which the assembler would
  // take apart.
  __device__ void step(const Steps& steps, bool first, bool more) {
    const unsigned slot = uniform(ring.slot);
    finish(steps);
    const unsigned old_slot = ring.slot;
    ring.advance();
    const unsigned next_slot = uniform(ring.slot), buffer = uniform(count & 1);

    if constexpr (DBIAS == 2) {
      if (warp == 0 && lane == 0) ptx::tma_store_wait_read();  // ds of this buffer has been stored: it is written below
    }
    wait_turn();
    ptx::wgmma_fence();
    multiply_queries<VALUE_DIM>(dv, probabilities, dout_right(slot, kQueryPanelBytes));
    ptx::wgmma_commit();
    ptx::wgmma_fence();
    multiply_queries<HEAD_DIM>(dk, ds, q_right(slot, kQueryPanelBytes));
    ptx::wgmma_commit();
    const unsigned ds_to = matrix_address(ptx::shared_address(shared.ds[count & 1]));
    // The buffer is free: the other warpgroup had read it before it passed the turn the last time.
#pragma unroll
    for (int n = 0; n < kQueries / 16; ++n)
      ptx::store_matrices_transposed(ds_to + n * (16 * 128), ds[4 * n], ds[4 * n + 1], ds[4 * n + 2], ds[4 * n + 3]);
    if (!first) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.ds_full[(count - 1) & 1]), ((count - 1) >> 1) & 1);
      send_dbias(steps, buffer ^ 1);
    }
    ptx::wgmma_wait<1>();
    ptx::pin(dv);
    ptx::wgmma_fence();
    multiply_dq(buffer ^ 1);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::pin(dk);
    ptx::barrier_sync(kTurn + 2 + warpgroup, 128);  // all have read the statistics
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.q_empty[old_slot]));
    if (more) ptx::mbarrier_wait(ptx::shared_address(&shared.q_full[ring.slot]), ring.parity);
    ptx::wgmma_fence();
    multiply_keys<0, HEAD_DIM / 16>(s, own_k(), q_right(next_slot, 16));
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::pin(dq);
    if (!first) stage_dq((count - 1) & 1);
    // The turn passes when all but the last products of dp^T are made: then the other's begin without a gap.
    constexpr int kLast = VALUE_DIM / 16 - 2;
    const unsigned next_dout = dout_right(next_slot, 16);
    ptx::wgmma_fence();
    multiply_keys<0, kLast>(dp, own_v(), next_dout);
    ptx::wgmma_commit();
    multiply_keys<kLast, VALUE_DIM / 16>(dp, own_v(), next_dout);
    ptx::wgmma_commit();
    prefetch_statistics(more);
    ptx::wgmma_wait<1>();
    pass_turn(more);
    publish(first);
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    ptx::pin(dp);
    ++count;
    if constexpr (DBIAS == 2) {
      last_m = steps.m;
      last_head = steps.query_head();
    }
  }

  // ds of the step before, from where it is in shared memory, to the gradient of the bias.
  __device__ void send_dbias(const Steps& steps, unsigned buffer) const {
    if constexpr (DBIAS != 2) return;
    const int key0 = steps.tile.n * kKeys + warpgroup * kOwnKeys;
    if (warp != 0 || lane != 0 || key0 >= p.forward.seqlen_k) return;
    ptx::tma_store(dbias, ptx::shared_address(shared.ds[buffer][warpgroup]), key0, last_m * kQueries, last_head.h,
                   last_head.b);
    ptx::tma_store_commit();
  }

  // What was written to shared memory, ds of this step and dq of the one before, may be read by tensor cores and TMA.
  __device__ void publish(bool first) {
    ptx::tma_store_fence();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.ds_full[count & 1]));
    if (!first) publish_dq();
  }
  __device__ void publish_dq() {
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.dq_full[warpgroup][dq_ring.slot]));
    dq_ring.advance();
  }

  // dq of the last step.
  __device__ void last_dq(const Steps& steps) {
    const unsigned buffer = (count - 1) & 1;
    ptx::mbarrier_wait(ptx::shared_address(&shared.ds_full[buffer]), ((count - 1) >> 1) & 1);
    send_dbias(steps, buffer);
    ptx::wgmma_fence();
    multiply_dq(uniform(buffer));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(dq);
    stage_dq((count - 1) & 1);
    ptx::tma_store_fence();
    __syncwarp();
    publish_dq();
  }

  // -- results --

  __device__ void run(const ptx::TensorMap& map_dk, const ptx::TensorMap& map_dv) {
    start();
    unsigned parity = 0;  // of the item
    for (ItemRing items;; items.advance(), parity ^= 1) {
      const Item& item = wait_item(shared, items);
      if (item.n == Item::kNone) return;
      run(item, parity, map_dk, map_dv);
      if (lane == 0) release_item(shared, items);
    }
  }
  __device__ void run(const Item& item, unsigned parity, const ptx::TensorMap& map_dk, const ptx::TensorMap& map_dv) {
#pragma unroll
    for (int e = 0; e < HEAD_DIM / 2; ++e) dk[e] = 0.0f;
#pragma unroll
    for (int e = 0; e < VALUE_DIM / 2; ++e) dv[e] = 0.0f;
    Steps steps(p, item);
    if (steps.any()) {
      first_scores(parity);
      begin_turns();
      bool first = true;
#pragma unroll 1
      while (steps.any()) {
        Steps following = steps;
        following.advance();
        step(steps, first, following.any());
        first = false;
        steps.head = following.head;
        steps.m = following.m;
        steps.left = following.left;
      }
      last_dq(steps);
    } else {
      // The loading thread may still be looking for a step, and must see keys_empty in the phase before this item's.
      ptx::mbarrier_wait(ptx::shared_address(&shared.k_full), parity);
    }
    ptx::barrier_sync(kTurn + 2 + warpgroup, 128);  // this warpgroup's keys of v are not read any more,
    const int row0 = warpgroup * kOwnKeys + 16 * warp;
    const TileRows rows{item.b, item.h, item.n * kKeys, p.forward.seqlen_k};
    store_rows<VALUE_DIM>(dv, 1.0f, shared.v, row0, rows, map_dv, p.dv);
    ptx::barrier_sync(1, 256);  // and k by neither
    store_rows<HEAD_DIM>(dk, p.forward.scale, shared.k, row0, rows, map_dk, p.dk);
    if (lane == 0) ptx::tma_store_wait_read();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.keys_empty));
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_backward(const __grid_constant__ ptx::TensorMap q, const __grid_constant__ ptx::TensorMap k,
                    const __grid_constant__ ptx::TensorMap v, const __grid_constant__ ptx::TensorMap dout,
                    const __grid_constant__ ptx::TensorMap dk, const __grid_constant__ ptx::TensorMap dv,
                    const __grid_constant__ ptx::TensorMap bias, const __grid_constant__ ptx::TensorMap dbias,
                    const __grid_constant__ HopperBackwardParams p) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    init_barrier(shared.k_full, 1);
    init_barrier(shared.v_full, 1);
    init_barrier(shared.keys_empty, kWarps);
    init_barrier(shared.sent, kSenders);
    for (int n = 0; n < kItems; ++n) {
      init_barrier(shared.item_full[n], 1);
      init_barrier(shared.item_empty[n], kWarps + kSenders);
    }
    for (int n = 0; n < STAGES; ++n) {
      init_barrier(shared.q_full[n], 1);
      init_barrier(shared.q_empty[n], kWarps);
    }
    if constexpr (kLoadsBias) {
      for (int n = 0; n < kBiasStages; ++n) {
        init_barrier(shared.bias_full[n], 1);
        init_barrier(shared.bias_empty[n], kWarps);
      }
    }
    for (int n = 0; n < 2; ++n) {
      init_barrier(shared.ds_full[n], kWarps);
      for (int sender = 0; sender < kSenders; ++sender) init_barrier(shared.dq_full[n][sender], 4);
      init_barrier(shared.dq_empty[n], 1);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(~0u, thread / 128, 0);
  if (warpgroup == kWarpgroups) {
    ptx::give_registers<24>();
    const int number = thread - 128 * kWarpgroups;
    if (number == 0) {
      Loader{p, q, k, v, dout, bias, shared, {}}.run();
    } else if (number % 32 == 0) {
      Sender{p, shared}.run(number / 32 - 1);
    }
  } else {
    ptx::take_registers<240>();
    Consumer consumer{.p = p,
                      .dbias = dbias,
                      .shared = shared,
                      .warpgroup = warpgroup,
                      .warp = (thread / 32) & 3,
                      .lane = thread & 31};
    consumer.run(dk, dv);
  }
}

}  // namespace headrace::cuda
