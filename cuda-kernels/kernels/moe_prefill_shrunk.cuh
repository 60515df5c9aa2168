// The f32 numbers between shrink and expand of a prefill step, as operands of tensor cores.
//
// A step has kDeltaRank of the rank, in 128 bytes: the numbers rounded to bf16, then what that left, rounded:
// together within 2^-17 of the f32, relatively. An f16 would overflow where f32 does not, so with B in f16
// these are in bf16 too, and B is the sum of two such factors, exactly. The smallest of the four products,
// within 2^-18 of the largest, is left out.
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

__device__ __forceinline__ uint4 load_shared16(unsigned address) {
  uint4 out;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "r"(address)
               : "memory");
  return out;
}

// Two numbers, each as one in bf16 and what that left, in bf16.
__device__ __forceinline__ void split_pair(float first, float second, unsigned& high, unsigned& low) {
  high = pack_pair<bf16>(first, second);
  low = pack_pair<bf16>(first - unpack_first<bf16>(high), second - unpack_second<bf16>(high));
}

// B of a step: lane 4g + t of a warp has eight of the rank, 8t .. 8t + 7, of two rows of B, `first` and `second`: so
// their 16 bytes are one load. They are rows g and g + 8 of a product of 32 of the rank in two parts, with the
// shrunk numbers in the same order. `zero` is 0, but the assembler is not to know: else it gathers the registers of
// both rows for each product anew.
template <class Element>
struct Factor;
template <>
struct Factor<bf16> {
  static constexpr bool kTwo = false;
  unsigned high[2][4];
  __device__ __forceinline__ void set(const uint4& first, const uint4& second, unsigned zero) {
    const unsigned rows[2][4] = {{first.x, second.x, first.y, second.y}, {first.z, second.z, first.w, second.w}};
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      high[r / 4][r % 4] = rows[r / 4][r % 4] | zero;
    }
  }
};
template <>
struct Factor<f16> {
  static constexpr bool kTwo = true;
  unsigned high[2][4], low[2][4];
  __device__ __forceinline__ void set(const uint4& first, const uint4& second, unsigned zero) {
    const unsigned rows[2][4] = {{first.x, second.x, first.y, second.y}, {first.z, second.z, first.w, second.w}};
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const unsigned row = rows[r / 4][r % 4];
      split_pair(unpack_first<f16>(row), unpack_second<f16>(row), high[r / 4][r % 4], low[r / 4][r % 4]);
    }
  }
};

__device__ __forceinline__ void clear_shared16(unsigned address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

// A step of eight tokens, in the registers of a warp.
struct Shrunk {
  // Four numbers from `r` on, to a step's row: where a product has them along k.
  static __device__ __forceinline__ void store(char* step, int r, const float (&value)[4]) {
    char* to = step + 2 * (r / 4 % 2 * 16 + r / 8 * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned high, low;
      split_pair(value[2 * i], value[2 * i + 1], high, low);
      *reinterpret_cast<unsigned*>(to + 16 * i) = high;
      *reinterpret_cast<unsigned*>(to + 16 * i + 2 * kDeltaRank) = low;
    }
  }

  unsigned part[2][4];

  // Rows `row` .. row + 8 of an operand.
  __device__ __forceinline__ void load(unsigned operand, int row) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int p = 0; p < 2; ++p) load_matrices(part[p], operand + swizzled(row + lane % 8, 4 * p + lane / 8));
  }
  // d += B · this, what is small first. Of several columns at once, as each product waits for the one before.
  template <class Element, int kEights>
  static __device__ __forceinline__ void multiply(float* d, const Factor<Element>& b, const Shrunk (&shrunk)[kEights]) {
    add(d, b.high, shrunk, 1);
    if constexpr (Factor<Element>::kTwo) add(d, b.low, shrunk, 0);
    add(d, b.high, shrunk, 0);
  }

 private:
  template <int kEights>
  static __device__ __forceinline__ void add(float* d, const unsigned (&b)[2][4], const Shrunk (&shrunk)[kEights],
                                             int p) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        warp_product<bf16>(d + 4 * j, b[i], shrunk[j].part[p][2 * i], shrunk[j].part[p][2 * i + 1]);
      }
    }
  }
};

}  // namespace amphora
