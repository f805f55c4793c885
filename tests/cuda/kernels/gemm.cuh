// D (128 x WIDTH, float32) = A (128 x K) B (K x WIDTH) by each wgmma instruction and with the machinery around it: TMA
// into a ring of shared memory, mbarriers over many phases, registers handed over, warpgroups that take turns; and the
// way out, by stmatrix and TMA, rounded to the type of A. One warpgroup loads; two have 64 rows each.
//
// Constants of the compilation:
// - FLOAT16: 1 float16, 0 bfloat16
// - WIDTH: the instruction's width
// - LEFT_IN_REGISTERS: A comes from registers, by ldmatrix, else from shared memory
// - TRANS_B: B is [K, WIDTH] in memory (MN-major), else [WIDTH, K] (K-major). A is [128, K].
#if FLOAT16
#define HEADRACE_MMA_TYPE "f16"
#else
#define HEADRACE_MMA_TYPE "bf16"
#endif
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace headrace::test {

constexpr int kWarpgroups = 2, kRows = 64, kStages = 2;
constexpr int kPanel = 64;   // columns of a panel of shared memory: 128 bytes
constexpr int kChunk = 128;  // of K, in one stage
constexpr int kLeftPanels = kChunk / kPanel;
constexpr int kRightPanels = TRANS_B ? (WIDTH + kPanel - 1) / kPanel : kChunk / kPanel;
constexpr int kRightRows = TRANS_B ? kChunk : WIDTH;
constexpr int kSteps = kChunk / 16;

using Element = unsigned short;

struct alignas(1024) Shared {
  Element left[kStages][kWarpgroups][kLeftPanels][kRows * kPanel];
  Element right[kStages][kRightPanels][kRightRows * kPanel];
  Element out[4 * kWarpgroups][16 * kPanel];  // of a warp
  unsigned long long full[kStages], empty[kStages];
  int turns;
};
extern "C" __constant__ unsigned dynamic_shared_bytes = sizeof(Shared);

__device__ inline void load(Shared& shared, const ptx::TensorMap& left, const ptx::TensorMap& right, int chunks) {
  ptx::RingPosition<kStages> ring;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const unsigned full = ptx::shared_address(&shared.full[ring.slot]);
    ptx::mbarrier_wait(ptx::shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
    ptx::mbarrier_expect(full, sizeof(shared.left[0]) + sizeof(shared.right[0]));
    for (int w = 0; w < kWarpgroups; ++w) {
      for (int panel = 0; panel < kLeftPanels; ++panel) {
        ptx::tma_load(ptx::shared_address(shared.left[ring.slot][w][panel]), left, full,
                      chunk * kChunk + panel * kPanel, w * kRows, 0, 0);
      }
    }
    for (int panel = 0; panel < kRightPanels; ++panel) {
      ptx::tma_load(ptx::shared_address(shared.right[ring.slot][panel]), right, full,
                    TRANS_B ? panel * kPanel : chunk * kChunk + panel * kPanel, TRANS_B ? chunk * kChunk : 0, 0, 0);
    }
    ring.advance();
  }
}

struct Consumer {
  Shared& shared;
  int* order;  // whose turn it was, turn by turn
  const int warpgroup, warp, lane;
  ptx::RingPosition<kStages> ring;
  float d[WIDTH / 2];

  // kFirst: overwrites d.
  template <bool kFirst>
  __device__ void multiply(bool last) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[ring.slot]), ring.parity);
    ptx::barrier_sync(1 + warpgroup, 256);  // its turn
    if (warp == 0 && lane == 0) order[shared.turns++] = warpgroup;
    const unsigned right =
        ptx::descriptor_low(ptx::shared_address(shared.right[ring.slot]), TRANS_B ? kChunk * 128 : 16);
    const auto right_of = [&](int step) {
      return ptx::descriptor(
          right + (TRANS_B ? step * (16 * 128 / 16) : (step / 4) * (WIDTH * 128 / 16) + (step % 4) * (32 / 16)));
    };
    const unsigned left_address = ptx::shared_address(shared.left[ring.slot][warpgroup]);
#if LEFT_IN_REGISTERS
    unsigned a[kSteps][4];
    const int r = warp * 16 + (lane & 15);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int chunk = (step % 4) * 2 + (lane >> 4);  // of 16 bytes; swizzled with the row
      ptx::load_matrices(a[step], left_address + (step / 4) * (kRows * 128) + r * 128 + ((chunk ^ (r & 7)) << 4));
    }
    ptx::wgmma_fence();
    ptx::Wgmma<WIDTH>::rs<kFirst ? 0 : 1, TRANS_B>(d, a[0][0], a[0][1], a[0][2], a[0][3], right_of(0));
#pragma unroll
    for (int step = 1; step < kSteps; ++step)
      ptx::Wgmma<WIDTH>::rs<1, TRANS_B>(d, a[step][0], a[step][1], a[step][2], a[step][3], right_of(step));
#else
    const unsigned left = ptx::descriptor_low(left_address, 16);
    const auto left_of = [&](int step) {
      return ptx::descriptor(left + (step / 4) * (kRows * 128 / 16) + (step % 4) * (32 / 16));
    };
    ptx::wgmma_fence();
    ptx::Wgmma<WIDTH>::ss<kFirst ? 0 : 1, TRANS_B>(d, left_of(0), right_of(0));
#pragma unroll
    for (int step = 1; step < kSteps; ++step) ptx::Wgmma<WIDTH>::ss<1, TRANS_B>(d, left_of(step), right_of(step));
#endif
    ptx::wgmma_commit();
    if (!(last && warpgroup == 1)) ptx::barrier_arrive(1 + (warpgroup ^ 1), 256);  // the other's turn
    ptx::wgmma_wait<0>();
    ptx::pin(d);
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[ring.slot]));
    ring.advance();
  }

  __device__ void run(int chunks) {
#pragma unroll
    for (int n = 0; n < WIDTH / 2; ++n) d[n] = __int_as_float(0x7FC00000);  // NaN
    if (warpgroup == 0) ptx::barrier_arrive(1, 256);
    multiply<true>(chunks == 1);
    for (int chunk = 1; chunk < chunks; ++chunk) multiply<false>(chunk + 1 == chunks);
  }

  __device__ void write(float* out) const {
    const int row = warpgroup * kRows + warp * 16 + lane / 4, column = 2 * (lane % 4);
#pragma unroll
    for (int g = 0; g < WIDTH / 8; ++g) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* to = out + (row + 8 * half) * WIDTH + 8 * g + column;
        to[0] = d[4 * g + 2 * half];
        to[1] = d[4 * g + 2 * half + 1];
      }
    }
  }

  // A panel at a time.
  __device__ void write_rounded(const ptx::TensorMap& rounded) const {
    const unsigned staging = ptx::shared_address(shared.out[4 * warpgroup + warp]);
    const int row = lane & 15;
#pragma unroll
    for (int panel = 0; panel < (WIDTH + kPanel - 1) / kPanel; ++panel) {
      if (lane == 0) ptx::tma_store_wait_read();
      __syncwarp();
#pragma unroll
      for (int g = 8 * panel; g < 8 * panel + 8 && g < WIDTH / 8; g += 2) {  // of 8 columns
        const int chunk = g % 8 + (lane >> 4);                               // of 16 bytes; swizzled with the row
        ptx::store_matrices(staging + row * 128 + ((chunk ^ (row & 7)) << 4), ptx::pack(d[4 * g], d[4 * g + 1]),
                            ptx::pack(d[4 * g + 2], d[4 * g + 3]), ptx::pack(d[4 * g + 4], d[4 * g + 5]),
                            ptx::pack(d[4 * g + 6], d[4 * g + 7]));
      }
      ptx::tma_store_fence();
      __syncwarp();
      if (lane == 0) {
        ptx::tma_store(rounded, staging, panel * kPanel, warpgroup * kRows + warp * 16, 0, 0);
        ptx::tma_store_commit();
      }
    }
    if (lane == 0) ptx::tma_store_wait();
  }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    gemm(const __grid_constant__ ptx::TensorMap left, const __grid_constant__ ptx::TensorMap right,
         const __grid_constant__ ptx::TensorMap rounded, float* out, int* order, int chunks) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int n = 0; n < kStages; ++n) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[n]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[n]), 4 * kWarpgroups);
    }
    ptx::mbarrier_init_fence();
    shared.turns = 0;
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, thread / 128, 0);
  if (warpgroup == 0) {
    ptx::give_registers<24>();
    if (thread == 0) load(shared, left, right, chunks);
  } else {
    ptx::take_registers<240>();
    Consumer consumer{
        .shared = shared, .order = order, .warpgroup = warpgroup - 1, .warp = (thread / 32) & 3, .lane = thread & 31};
    consumer.run(chunks);
    consumer.write(out);
    consumer.write_rounded(rounded);
  }
}

}  // namespace headrace::test
