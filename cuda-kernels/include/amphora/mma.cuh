// Products of the tensor cores by single warps, f32 accumulation. Compute capability 8.0 and later.
//
// Lane 4g + t holds, of a 16 × 8 result, row g at columns 2t and 2t + 1 (c0, c1) and row g + 8 there
// (c2, c3); of the 16-row operand, rows g and g + 8; of the 8-column operand, column g.
#pragma once

#include "amphora/dtype.cuh"

namespace amphora {

// k = 16: each register holds two neighbours of k. Rows g, g + 8, g, g + 8 in `a`, k halves in order.
template <class Element>
__device__ __forceinline__ void mma_k16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                        unsigned a3, unsigned b0, unsigned b1);
template <>
__device__ __forceinline__ void mma_k16<bf16>(float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                              unsigned a3, unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_k16<f16>(float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                             unsigned a3, unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// k = 8 in TF32: numbers in f32 registers with 11 significant bits.
__device__ __forceinline__ void mma_k8(float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                       unsigned a3, unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned narrow_tf32(float value) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// Two neighbours in one register, the first in the low half.
template <class Element>
__device__ __forceinline__ unsigned pack_pair(float first, float second) {
  return static_cast<unsigned>(narrow<Element>(first).bits) |
         static_cast<unsigned>(narrow<Element>(second).bits) << 16;
}
template <class Element>
__device__ __forceinline__ float unpack_first(unsigned pair) {
  return widen(Element{static_cast<unsigned short>(pair)});
}
template <class Element>
__device__ __forceinline__ float unpack_second(unsigned pair) {
  return widen(Element{static_cast<unsigned short>(pair >> 16)});
}

// Eight numbers of k of one column, as the f32 value they are: a narrow part and what it leaves. The
// second part makes up for the first's rounding to about 2^-17 (bf16) or 2^-22 (TF32).
template <class Element>
struct Split;
template <>
struct Split<bf16> {
  unsigned high[4], low[4];
  __device__ __forceinline__ void set(const float (&value)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      high[i] = pack_pair<bf16>(value[2 * i], value[2 * i + 1]);
      low[i] = pack_pair<bf16>(value[2 * i] - unpack_first<bf16>(high[i]),
                               value[2 * i + 1] - unpack_second<bf16>(high[i]));
    }
  }
  // c + rest += rows · this: eight numbers of k of rows g and g + 8; nothing of columns that are not
  // `mine`.
  __device__ __forceinline__ void multiply(float (&c)[4], float (&rest)[4], const uint4& row,
                                           const uint4& row8, bool mine) const {
    const auto of = [&](unsigned part) { return mine ? part : 0u; };
    mma_k16<bf16>(c, row.x, row8.x, row.y, row8.y, of(high[0]), of(high[1]));
    mma_k16<bf16>(c, row.z, row8.z, row.w, row8.w, of(high[2]), of(high[3]));
    mma_k16<bf16>(rest, row.x, row8.x, row.y, row8.y, of(low[0]), of(low[1]));
    mma_k16<bf16>(rest, row.z, row8.z, row.w, row8.w, of(low[2]), of(low[3]));
  }
};
// An f16 half would overflow where the f32 intermediate does not; TF32 has its range, and holds every f16.
template <>
struct Split<f16> {
  float value[8];
  __device__ __forceinline__ void set(const float (&from)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = from[i];
  }
  __device__ __forceinline__ void multiply(float (&c)[4], float (&rest)[4], const uint4& row,
                                           const uint4& row8, bool mine) const {
    const unsigned rows[4] = {row.x, row.y, row.z, row.w};
    const unsigned rows8[4] = {row8.x, row8.y, row8.z, row8.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float first = mine ? value[2 * i] : 0.f, second = mine ? value[2 * i + 1] : 0.f;
      const unsigned high0 = narrow_tf32(first), high1 = narrow_tf32(second);
      const unsigned low0 = narrow_tf32(first - __uint_as_float(high0));
      const unsigned low1 = narrow_tf32(second - __uint_as_float(high1));
      const unsigned a0 = __float_as_uint(unpack_first<f16>(rows[i]));
      const unsigned a1 = __float_as_uint(unpack_first<f16>(rows8[i]));
      const unsigned a2 = __float_as_uint(unpack_second<f16>(rows[i]));
      const unsigned a3 = __float_as_uint(unpack_second<f16>(rows8[i]));
      mma_k8(c, a0, a1, a2, a3, high0, high1);
      mma_k8(rest, a0, a1, a2, a3, low0, low1);
    }
  }
};

}  // namespace amphora
