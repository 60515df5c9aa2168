// The f32 numbers between shrink and expand of a prefill step, as operands of tensor cores.
//
// A step has kDeltaRank of the rank, in 128 bytes. In bf16 they are the numbers rounded, then what that
// left, rounded: together within 2^-16 of the f32, relatively. An f16 would overflow where f32 does not,
// so there the numbers stay f32, and are two TF32 numbers only in the product: within 2^-21.
#pragma once

#include "amphora/dtype.cuh"
#include "amphora/matrices.cuh"
#include "amphora/reduce.cuh"

namespace amphora {

// Numbers of the rank that one step along k adds, and steps of the largest rank.
constexpr int kDeltaRank = 32;
constexpr int kDeltaSteps = kMaxRank / kDeltaRank;
constexpr int kShrunkStep = 4 * kDeltaRank;  // bytes
// Bytes of a shrunk row: the steps of gate, then of up; or of down.
constexpr int kShrunkRow = 2 * kDeltaSteps * kShrunkStep;

// Operands in shared memory: rows of 128 bytes, the 16-byte pieces of a row exchanged by the row's
// number, so that 8 rows of one piece meet no bank twice.
constexpr int kOperandRow = 128;  // bytes
constexpr int kOperandK = 64;     // two-byte numbers
__device__ __forceinline__ unsigned swizzled(int row, int piece) {
  return row * kOperandRow + ((piece ^ (row & 7)) << 4);
}

// Lane 4g + t of a warp has eight of the rank, 8t .. 8t + 7, of two rows of B, `first` and `second`: so their 16
// bytes are one load. As rows g and g + 8 of a product of 32 of the rank in two parts, with the shrunk numbers
// in the same order.
__device__ __forceinline__ void factor_rows(unsigned (&rows)[2][4], uint4 first, uint4 second) {
  rows[0][0] = first.x;
  rows[0][1] = second.x;
  rows[0][2] = first.y;
  rows[0][3] = second.y;
  rows[1][0] = first.z;
  rows[1][1] = second.z;
  rows[1][2] = first.w;
  rows[1][3] = second.w;
}
__device__ __forceinline__ uint4 load_shared16(unsigned address) {
  uint4 out;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "r"(address)
               : "memory");
  return out;
}

// A step of eight tokens, in the registers of a warp; `b` has rows of B as factor_rows says.
template <class Element>
struct Shrunk;

template <>
struct Shrunk<bf16> {
  static constexpr bool kElements = true;  // a warpgroup product takes a step's row as it is
  // Four numbers from `r` on, to a step's row: where a product has them along k.
  static __device__ __forceinline__ void store(char* step, int r, const float (&value)[4]) {
    unsigned high[2], low[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float first = value[2 * i], second = value[2 * i + 1];
      high[i] = pack_pair<bf16>(first, second);
      low[i] = pack_pair<bf16>(first - unpack_first<bf16>(high[i]), second - unpack_second<bf16>(high[i]));
    }
    char* to = step + 2 * (r / 4 % 2 * 16 + r / 8 * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<unsigned*>(to + 16 * i) = high[i];
      *reinterpret_cast<unsigned*>(to + 16 * i + 2 * kDeltaRank) = low[i];
    }
  }

  unsigned part[2][4];

  // Rows `row` .. row + 8 of an operand.
  __device__ __forceinline__ void load(unsigned operand, int row) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int p = 0; p < 2; ++p) load_matrices(part[p], operand + swizzled(row + lane % 8, 4 * p + lane / 8));
  }
  // d += B · this.
  __device__ __forceinline__ void multiply(float* d, const unsigned (&b)[2][4]) const {
#pragma unroll
    for (int p = 1; p >= 0; --p) {
#pragma unroll
      for (int i = 0; i < 2; ++i) warp_product<bf16>(d, b[i], part[p][2 * i], part[p][2 * i + 1]);
    }
  }
};

template <>
struct Shrunk<f16> {
  static constexpr bool kElements = false;
  static __device__ __forceinline__ void store(char* step, int r, const float (&value)[4]) {
    *reinterpret_cast<float4*>(step + 4 * r) = make_float4(value[0], value[1], value[2], value[3]);
  }

  float2 number[4];  // of the rank 8t + 2i, 8t + 2i + 1

  __device__ __forceinline__ void load(unsigned operand, int row) {
    const int lane = threadIdx.x % kWarp, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 four = load_shared16(operand + swizzled(row + lane / 4, 2 * t + i));
      number[2 * i] = make_float2(__uint_as_float(four.x), __uint_as_float(four.y));
      number[2 * i + 1] = make_float2(__uint_as_float(four.z), __uint_as_float(four.w));
    }
  }
  // A pair of neighbours along the rank takes the two places t and t + 4 of a product on both sides.
  __device__ __forceinline__ void multiply(float* d, const unsigned (&b)[2][4]) const {
    float(&c)[4] = reinterpret_cast<float(&)[4]>(*d);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned row = b[i / 2][i % 2 * 2], row8 = b[i / 2][i % 2 * 2 + 1];
      const unsigned a0 = __float_as_uint(unpack_first<f16>(row));
      const unsigned a1 = __float_as_uint(unpack_first<f16>(row8));
      const unsigned a2 = __float_as_uint(unpack_second<f16>(row));
      const unsigned a3 = __float_as_uint(unpack_second<f16>(row8));
      const unsigned high0 = narrow_tf32(number[i].x), high1 = narrow_tf32(number[i].y);
      mma_k8(c, a0, a1, a2, a3, narrow_tf32(number[i].x - __uint_as_float(high0)),
             narrow_tf32(number[i].y - __uint_as_float(high1)));
      mma_k8(c, a0, a1, a2, a3, high0, high1);
    }
  }
};

}  // namespace amphora
