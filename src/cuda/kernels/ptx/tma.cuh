// The tensor memory accelerator: copies of tiles between device and shared memory, described by a tensor map that the
// host encodes. PTX ISA, "Data Movement and Conversion Instructions: Tensor copy".
#pragma once

namespace headrace::ptx {

struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// "cp.async.bulk.tensor.4d": the box of the map at these coordinates (the first counts along the contiguous
// dimension) to shared memory; completes on the barrier. Elements outside the tensor become 0.
__device__ inline void tma_load(unsigned shared, const TensorMap& map, unsigned barrier, int c0, int c1, int c2,
                                int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

}  // namespace headrace::ptx
