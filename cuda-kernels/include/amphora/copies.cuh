// Asynchronous copies into shared memory, and matrices out of it (sm_80 and later).
#pragma once

#include "amphora/bulk.cuh"

namespace amphora {

// Four 8 × 8 matrices of 16-bit elements: lane l gives the address of row l%8 of matrix l/8.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix turned.
__device__ __forceinline__ void load_matrices_turned(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// 16 bytes past the first-level cache, of which `bytes` (0 to 16) are read and the rest become zeros.
// Both addresses are multiples of 16.
__device__ __forceinline__ void copy_16(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the newest `kGroups` groups of this thread are under way.
template <int kGroups>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// 16 bytes that another kernel may just have written: past the first-level cache.
__device__ __forceinline__ uint4 load_fresh(const void* from) {
  uint4 out;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "l"(from)
               : "memory");
  return out;
}

}  // namespace amphora
