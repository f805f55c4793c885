// Named barriers, and registers handed from one warpgroup to another. PTX ISA, "bar", "setmaxnreg".
#pragma once

namespace headrace::ptx {

// "bar.sync", "bar.arrive": barrier id for `threads` threads, those that wait and those that only arrive.
__device__ inline void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
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
