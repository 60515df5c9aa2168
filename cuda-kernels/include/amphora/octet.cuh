// Rows by 16 bytes at a time, where they start at multiples of that.
#pragma once

#include "amphora/dtype.cuh"

namespace amphora {

// Elements of 16 bytes.
template <class Element>
struct Vector {
  static constexpr int kElements = 16 / sizeof(Element);
  union {
    uint4 words;
    Element of[kElements];
  };
  __device__ __forceinline__ Vector() : words(make_uint4(0, 0, 0, 0)) {}
  __device__ __forceinline__ explicit Vector(const Element* from) : words(*reinterpret_cast<const uint4*>(from)) {}
  __device__ __forceinline__ void store(Element* to) const { *reinterpret_cast<uint4*>(to) = words; }
};

// Whether an address is a multiple of 16; null is.
__device__ __forceinline__ bool whole(const void* at) {
  return (reinterpret_cast<unsigned long long>(at) & 15) == 0;
}

// Copies a row, the threads of a block together.
template <class Element, int kThreads>
__device__ __forceinline__ void copy_row(const Element* from, Element* to, int width) {
  constexpr int kElements = Vector<Element>::kElements;
  if (whole(from) && whole(to) && width % kElements == 0) {
    for (int i = threadIdx.x * kElements; i < width; i += kThreads * kElements) {
      Vector<Element>(from + i).store(to + i);
    }
    return;
  }
  for (int i = threadIdx.x; i < width; i += kThreads) to[i] = from[i];
}

}  // namespace amphora
