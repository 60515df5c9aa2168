// Reductions over a warp and over a block, in an order that depends on the block's size alone.
#pragma once

namespace amphora {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarp = 32;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Larger values have smaller keys; all of IEEE's total order, so +0 comes before -0.
__device__ __forceinline__ unsigned descending_key(float value) {
  const unsigned bits = __float_as_uint(value);
  return bits & 0x80000000u ? bits : ~(bits | 0x80000000u);
}

struct Sum {
  template <class V>
  __device__ __forceinline__ V operator()(V a, V b) const {
    return a + b;
  }
};
struct Max {
  template <class V>
  __device__ __forceinline__ V operator()(V a, V b) const {
    return a > b ? a : b;
  }
};
struct Min {
  template <class V>
  __device__ __forceinline__ V operator()(V a, V b) const {
    return a < b ? a : b;
  }
};

// Every lane gets the result.
template <class Op, class V>
__device__ __forceinline__ V warp_reduce(V value, Op op) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    value = op(value, __shfl_xor_sync(kFullWarp, value, lanes));
  }
  return value;
}

// Every thread gets the result. `scratch` holds one value for each warp and may be used again at
// once: the first barrier keeps it until the last reader of a reduction before has passed.
template <int kThreads, class Op, class V>
__device__ __forceinline__ V block_reduce(V value, Op op, V* scratch) {
  constexpr int kWarps = kThreads / kWarp;
  static_assert(kThreads % kWarp == 0, "whole warps");
  value = warp_reduce(value, op);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  V total = scratch[0];
  for (int warp = 1; warp < kWarps; ++warp) total = op(total, scratch[warp]);
  return total;
}

// The sum of the values of the warp's lanes up to this one, its own with them.
template <class V>
__device__ __forceinline__ V warp_inclusive_sum(V value, int lane) {
#pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) {
    const V before = __shfl_up_sync(kFullWarp, value, lanes);
    if (lane >= lanes) value += before;
  }
  return value;
}

// The sum of the values of all threads in front of this one; `total` gets that of all.
template <int kThreads, class V>
__device__ __forceinline__ V block_exclusive_sum(V value, V* scratch, V* total) {
  constexpr int kWarps = kThreads / kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const V inclusive = warp_inclusive_sum(value, lane);
  __syncthreads();
  if (lane == kWarp - 1) scratch[warp] = inclusive;
  __syncthreads();
  V front = 0, all = 0;
  for (int other = 0; other < kWarps; ++other) {
    if (other < warp) front += scratch[other];
    all += scratch[other];
  }
  *total = all;
  return front + inclusive - value;
}

// *to += value, in whatever order blocks come.
__device__ __forceinline__ void add_relaxed(float* to, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}

}  // namespace amphora
