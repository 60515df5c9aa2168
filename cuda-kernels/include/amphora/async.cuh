// Copies of single 16-byte pieces that run beside the threads, and what orders them before tensor cores.
// Compute capability 8.0 and later, where not said otherwise.
#pragma once

#include "amphora/bulk.cuh"

namespace amphora {

// Copies 16 bytes to shared memory, or writes zeros and reads nothing where `there` is false. Both
// addresses are multiples of 16.
__device__ __forceinline__ void copy16(unsigned to, const void* from, bool there) {
  const int bytes = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void copy16(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Starts bringing the line of an address to the second-level cache.
__device__ __forceinline__ void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Copies 4 bytes to shared memory.
__device__ __forceinline__ void copy4(unsigned to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kGroups` of this thread's groups are under way.
template <int kGroups>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Lets a barrier count one arrival of this thread when its copies so far have landed. Compute capability
// 8.0 has the instruction, 9.0 the barrier's other uses.
__device__ __forceinline__ void copies_arrive(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Orders writes to shared memory that this thread knows of (its own, or others' behind a barrier) before
// what warpgroup products read there. Compute capability 9.0.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A barrier of `threads` threads of the block, by number; 0 is __syncthreads'.
__device__ __forceinline__ void named_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Counts at such a barrier and does not wait.
__device__ __forceinline__ void named_barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

}  // namespace amphora
