// Barriers in shared memory on which threads and TMA arrive. PTX ISA, "Parallel Synchronization and Communication
// Instructions: mbarrier". A barrier completes phase after phase; a waiter names the parity of the phase it waits for.
#pragma once

namespace headrace::ptx {

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// "mbarrier.init". The fence below makes it known to the other threads' and TMA's accesses.
__device__ inline void mbarrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// "fence.mbarrier_init", "fence.proxy.async"
__device__ inline void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
// "mbarrier.arrive"
__device__ inline void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// "mbarrier.arrive.expect_tx": arrives, and makes the phase wait for so many bytes of TMA.
__device__ inline void mbarrier_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// "mbarrier.try_wait.parity", until the phase of this parity is complete.
__device__ inline void mbarrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred complete;\n"
      "again_%=:\nmbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
      "@complete bra done_%=;\nbra again_%=;\ndone_%=:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Where a ring of kStages slots stands: the slot, and the parity of the phase in which it is filled.
template <int kStages>
struct RingPosition {
  unsigned slot = 0, parity = 0;
  __device__ void advance() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

}  // namespace headrace::ptx
