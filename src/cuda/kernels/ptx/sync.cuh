// Named barriers, and registers handed from one warpgroup to another. PTX ISA, "bar", "barrier", "setmaxnreg".
#pragma once

namespace headrace::ptx {

// "bar.sync", "bar.arrive": barrier id for `threads` threads, those that wait and those that only arrive.
__device__ inline void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// "barrier.red.and": barrier_sync(), and whether the predicate holds in all threads.
__device__ inline bool barrier_all(int id, int threads, bool predicate) {
  unsigned all;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\nbarrier.red.and.pred q, %1, %2, p;\nselp.u32 %0, 1, 0, q;\n}"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(static_cast<unsigned>(predicate))
      : "memory");
  return all != 0;
}

// "setmaxnreg": every warp of a warpgroup executes it.
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace headrace::ptx
