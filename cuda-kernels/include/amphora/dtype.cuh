// Element types: widening to f32, and the one rounding back. No vendor header, so that compiling a
// kernel takes the compiler alone.
#pragma once

#include "amphora/args.h"

namespace amphora {

struct bf16 {
  unsigned short bits;
};
struct f16 {
  unsigned short bits;
};

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(bf16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}
__device__ __forceinline__ float widen(f16 value) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value.bits));
  return out;
}

// Rounds to nearest, ties to even.
template <class T>
__device__ __forceinline__ T narrow(float value);
template <>
__device__ __forceinline__ float narrow<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ bf16 narrow<bf16>(float value) {
  bf16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
  return out;
}
template <>
__device__ __forceinline__ f16 narrow<f16>(float value) {
  f16 out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
  return out;
}

// Element `index` of an array whose type is an argument: weights are stored in a type of their own.
__device__ __forceinline__ float widen_at(const void* data, long long index, int type) {
  switch (type) {
    case kBf16:
      return widen(static_cast<const bf16*>(data)[index]);
    case kF16:
      return widen(static_cast<const f16*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

}  // namespace amphora
