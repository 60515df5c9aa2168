// Blocks of a cluster: their barrier, and each other's shared memory. Compute capability 9.0 and later;
// elsewhere a block is alone.
#pragma once

#include "amphora/bulk.cuh"

namespace amphora {

__device__ __forceinline__ int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}

__device__ __forceinline__ int cluster_blocks() {
#if __CUDA_ARCH__ >= 900
  unsigned blocks;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  return static_cast<int>(blocks);
#else
  return 1;
#endif
}

// The two halves of the barrier below: this one says that what it read may change. The instructions want
// whole warps, which a branch in front may have left apart.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Waits for all threads of all blocks; their shared memory is then as they left it.
__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  cluster_arrive();
  cluster_wait();
#else
  __syncthreads();
#endif
}

#if __CUDA_ARCH__ >= 900
// The address of one's own `shared` in the block of that rank.
__device__ __forceinline__ unsigned cluster_address(const void* shared, int rank) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
  return address;
}

__device__ __forceinline__ int cluster_load(const int* shared, int rank) {
  int value;
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(cluster_address(shared, rank)) : "memory");
  return value;
}

__device__ __forceinline__ void cluster_store(int* shared, int rank, int value) {
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(cluster_address(shared, rank)), "r"(value) : "memory");
}
#else
__device__ __forceinline__ int cluster_load(const int* shared, int) { return *shared; }
__device__ __forceinline__ void cluster_store(int* shared, int, int value) { *shared = value; }
#endif

// The number at one's own shared address `address` in the block of that rank.
__device__ __forceinline__ float read_block(unsigned address, int rank) {
  float out;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .u32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.f32 %0, [there];}"
      : "=f"(out)
      : "r"(address), "r"(rank)
      : "memory");
#else
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(out) : "r"(address) : "memory");
#endif
  return out;
}

// Arrives at the barrier that lies at the same place in block `rank`.
__device__ __forceinline__ void barrier_arrive_at(Barrier* barrier, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(
                   cluster_address(barrier, rank))
               : "memory");
#endif
}

}  // namespace amphora
