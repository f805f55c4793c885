// Counters in device memory by which blocks of threads take turns. PTX ISA, "ld", "red", "Memory Consistency Model".
#pragma once

namespace headrace::ptx {

// "ld.acquire": waits until the counter is `turn`; what was written before it was counted up is visible then.
__device__ inline void wait_for_turn(const int* counter, int turn) {
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (now != turn);
}
// "red.release": counts up, behind all that this thread wrote.
__device__ inline void end_turn(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

}  // namespace headrace::ptx
