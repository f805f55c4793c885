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

// "cp.async.bulk.tensor.4d", from shared memory: what lies outside the tensor is not written. Writes of shared memory
// by threads are made known to it by the fence. Stores are waited for in groups, by the thread that asked for them.
__device__ inline void tma_store_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void tma_store(const TensorMap& map, unsigned shared, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
// "cp.async.bulk.commit_group", "cp.async.bulk.wait_group": until all groups have read shared memory; have been
// written.
__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ inline void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// "cp.async.bulk": `bytes` contiguous bytes, a multiple of 16 at multiples of 16, to shared memory; completes on the
// barrier.
__device__ inline void bulk_load(unsigned shared, const void* from, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// The same from shared memory; "cp.reduce.async.bulk" adds float32 values to those that are there. Waited for like
// stores.
__device__ inline void bulk_store(void* to, unsigned shared, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared), "r"(bytes)
               : "memory");
}
__device__ inline void bulk_add(float* to, unsigned shared, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(shared),
               "r"(bytes)
               : "memory");
}
// "fence.proxy.async.global": orders such accesses of device memory with ordinary ones of this thread.
__device__ inline void bulk_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace headrace::ptx
