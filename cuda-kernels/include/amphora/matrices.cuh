// Operands of single warps' products from shared memory: rows of two-byte numbers along k.
// Compute capability 8.0 and later.
#pragma once

#include "amphora/mma.cuh"

namespace amphora {

// Four 8 x 8 matrices of two-byte numbers; lane l gives the address of row l % 8 of matrix l / 8, and
// gets of each the numbers 2t, 2t + 1 of row g (lane 4g + t).
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// d += A · Bᵀ, four of `d`. A of 16 rows: matrices (rows, k) 0-7 0-7, 8-15 0-7, 0-7 8-15, 8-15 8-15.
// B of 8 rows: k 0-7, 8-15.
template <class Element>
__device__ __forceinline__ void warp_product(float* d, const unsigned (&a)[4], unsigned b0, unsigned b1) {
  mma_k16<Element>(reinterpret_cast<float(&)[4]>(*d), a[0], a[1], a[2], a[3], b0, b1);
}

}  // namespace amphora
