// What the kernels of dense projections share: operands by 16 bytes, and the place of a slice's outputs.
#pragma once

#include "amphora/args.h"
#include "amphora/copies.cuh"
#include "amphora/mma.cuh"
#include "kernels/lora_expand.cuh"

namespace amphora {

// Bits of LinearArgs::aligned.
constexpr int kAlignedOperands = 1;  // rows of x and of the weight start at multiples of 16 bytes
constexpr int kAlignedPairs = 2;     // two neighbouring outputs, the first of even number, are one store
constexpr int kAlignedRows = 4;      // eight of them are, in the compute type

// Elements of 16 bytes.
constexpr int kOctet = 8;

// Elements [at, at + 8) of a row of `width`, zeros beyond it; rows that are not aligned are read one
// element at a time.
template <class Element>
__device__ __forceinline__ uint4 load_octet(const Element* row, int at, int width, bool aligned) {
  if (aligned && at + kOctet <= width) return load_fresh(row + at);
  unsigned words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    if (at + i < width) words[i / 2] |= static_cast<unsigned>(row[at + i].bits) << (i % 2 * 16);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void store_shared(unsigned to, const uint4& octet) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(octet.x), "r"(octet.y), "r"(octet.z),
               "r"(octet.w)
               : "memory");
}

// The same into shared memory, without passing through registers where it can.
template <class Element>
__device__ __forceinline__ void copy_octet(unsigned to, const Element* row, int at, int width, bool aligned) {
  const int left = width - at;
  if (aligned) {
    // Rows are whole octets then, so an octet is all there or not at all.
    copy_16(to, left > 0 ? row + at : row, left > 0 ? 16 : 0);
    return;
  }
  store_shared(to, load_octet(row, at, width, false));
}

__device__ __forceinline__ uint4 load_shared(unsigned from) {
  uint4 out;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "r"(from)
               : "memory");
  return out;
}

// The element of a slice that output `n` is; -1: none. Nearly all slices are runs, which takes no division.
__device__ __forceinline__ int slice_element(const SliceArgs& slice, int n) {
  const int beyond = n - slice.offset;
  if (beyond < 0) return -1;
  int element = beyond;
  if (slice.stride != 1) {
    if (beyond % slice.stride != 0) return -1;
    element = beyond / slice.stride;
  }
  return element < slice.len ? element : -1;
}

// Whether any output of [first, end) belongs to a slice.
__device__ __forceinline__ bool slice_meets(const SliceArgs& slice, int first, int end) {
  const int from = max(first - slice.offset, 0);
  const int low = slice.stride == 1 ? from : (from + slice.stride - 1) / slice.stride;
  return low < slice.len && slice.offset + low * slice.stride < end;
}

// The shrunk row of x's row `row`, [tokens, kMaxSlices, 2 · kMaxRank]: x·Aᵀ · scale in f32 as the sum of
// two elements, the rounded number and what rounding took, `rank` of the first kind and as many of the
// second behind them. So the expand is a product of twice the rank whose second half meets the same rows
// of B again, and the intermediate keeps 16 bits or more.
template <class Element>
__device__ __forceinline__ Element* shrunk_at(const LoraArgs& args, long long row, int slice) {
  return reinterpret_cast<Element*>(args.shrunk) + (row * kMaxSlices + slice) * (2 * kMaxRank);
}

// One output, or two neighbours, in the type of `out`.
template <class Element>
__device__ __forceinline__ void store_output(const LinearArgs& args, long long row, int n, float value) {
  if (args.bias != nullptr) value += args.bias[n];
  const long long at = row * args.out_pitch + n;
  if (args.out_f32) {
    static_cast<float*>(args.out)[at] = value;
  } else {
    static_cast<Element*>(args.out)[at] = narrow<Element>(value);
  }
}

template <class Element>
__device__ __forceinline__ void store_pair(const LinearArgs& args, long long row, int n, float first,
                                           float second) {
  if ((args.aligned & kAlignedPairs) == 0 || n + 1 >= args.n) {
    if (n < args.n) store_output<Element>(args, row, n, first);
    if (n + 1 < args.n) store_output<Element>(args, row, n + 1, second);
    return;
  }
  if (args.bias != nullptr) {
    first += args.bias[n];
    second += args.bias[n + 1];
  }
  const long long at = row * args.out_pitch + n;
  if (args.out_f32) {
    *reinterpret_cast<float2*>(static_cast<float*>(args.out) + at) = make_float2(first, second);
  } else {
    *reinterpret_cast<unsigned*>(static_cast<Element*>(args.out) + at) = pack_pair<Element>(first, second);
  }
}

}  // namespace amphora
