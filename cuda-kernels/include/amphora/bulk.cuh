// Bulk copies from global to shared memory, the barriers that they complete on, and flags and
// numbers between blocks. Compute capability 9.0 and later.
#pragma once

namespace amphora {

using Barrier = unsigned long long;  // in shared memory, 8-byte aligned

__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// A phase of the barrier ends when `arrivals` have arrived and all bytes expected have landed.
__device__ __forceinline__ void barrier_init(Barrier* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine; a block-wide barrier follows.
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives, and adds `bytes` to what the phase waits for.
__device__ __forceinline__ void barrier_expect(Barrier* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// Arrives for `arrivals` threads, and adds `bytes` to what the phase waits for.
__device__ __forceinline__ void barrier_expect(Barrier* barrier, unsigned bytes, unsigned arrivals) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n"
      "mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %2;" ::"r"(shared_address(barrier)),
      "r"(bytes), "r"(arrivals)
      : "memory");
}

// Returns when the phase of this parity has ended; phases count from 0, and the one before the first
// has parity 1 and has ended.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, unsigned parity) {
  asm volatile(
      "{\n .reg .pred p;\n W_%=:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @p bra D_%=;\n"
      " bra W_%=;\n D_%=:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Both addresses and `bytes` are multiples of 16. A destination that is not on a 128-byte line costs a
// tenth of the bandwidth.
__device__ __forceinline__ void bulk_copy_to(unsigned shared, const void* global, unsigned bytes,
                                             Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, unsigned bytes,
                                          Barrier* barrier) {
  bulk_copy_to(shared_address(shared), global, bytes, barrier);
}

__device__ __forceinline__ unsigned load_acquire(const unsigned* flag) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ void add_release(unsigned* flag, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Numbers that other blocks write or read meanwhile, each whole and in no order with others.
__device__ __forceinline__ float4 load_relaxed(const float* from) {
  float4 value;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(from)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed(float* to, float first, float second) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(first), "f"(second)
               : "memory");
}

}  // namespace amphora
