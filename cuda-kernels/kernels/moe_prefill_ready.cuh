// What gate_up has stored, between the blocks of a launch that makes both products: counts in global memory of the
// units of each expert, by tiles, and of all; and with adapters, of the cuts of each expert's shrunk rows of down.
//
// All blocks of the launch are on multiprocessors at once: there is one for each, a cluster of two takes both of a pair,
// and the kernel behind begins when all have. None waits for another with something stored that it will not count
// meanwhile, so what is waited for comes. The warp that leaves last clears the counts.
#pragma once

#include "amphora/bulk.cuh"
#include "amphora/reduce.cuh"

namespace amphora {

struct Ready {
  unsigned* counts;
  int experts;

  __device__ __forceinline__ unsigned* of(int expert) const { return counts + expert; }
  __device__ __forceinline__ unsigned* all() const { return counts + experts; }
  __device__ __forceinline__ unsigned* left() const { return counts + experts + 1; }
  // Cuts of an expert whose shrunk rows of down have been stored, with what is added to make them kAllShrunk: by one
  // block, whenever it has counted them, so that nobody who waits needs to know how many there are.
  static constexpr unsigned kAllShrunk = 1 << 24;
  __device__ __forceinline__ unsigned* shrunk(int expert) const { return counts + experts + 2 + expert; }

  // Counts units whose values a thread has seen stored, behind a fence of its own.
  __device__ __forceinline__ void count(int expert, int units) const {
    atomicAdd(of(expert), units);
    atomicAdd(all(), units);
  }

  // `warps` of each block come, each when it counts and waits no more.
  template <bool kShrinks>
  __device__ __forceinline__ void leave(unsigned warps) const {
    const int lane = threadIdx.x % kWarp;
    unsigned before = 0;
    if (lane == 0) {
      __threadfence();
      before = atomicAdd(left(), 1);
      __threadfence();
    }
    if (__shfl_sync(kFullWarp, before, 0) + 1 != warps * gridDim.x) return;
    for (int i = lane; i < (kShrinks ? 2 : 1) * experts + 2; i += kWarp) counts[i] = 0;
  }
};

// Orders what this thread has seen written to global memory before what tensor maps read there.
__device__ __forceinline__ void global_proxy_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

}  // namespace amphora
