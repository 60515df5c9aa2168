// What both forms of the expert products of a prefill step share: which row of the weight is where, and
// what becomes of a result.
//
// In gate_up the 64 rows of a unit are 32 outputs: 8 gates, their 8 ups, the next 8 gates, and so on.
// In a product of 16 rows a thread has rows g and g + 8, which so are the gate and the up of one output.
// In down they are neighbours where the rows of a weight are whole sixteens: 2g and 2g + 1 of them.
#pragma once

#include "amphora/args.h"
#include "amphora/dtype.cuh"
#include "amphora/reduce.cuh"
#include "kernels/moe_prefill_plan.cuh"

namespace amphora {

// Units of an expert's weight.
template <bool kGateUp>
__device__ __forceinline__ int prefill_units(const MoePrefillArgs& args) {
  return kGateUp ? (args.inner + 31) / 32 : (args.hidden + 63) / 64;
}

// Row `r` from the start of unit `unit` of down.
__device__ __forceinline__ int down_row(const MoePrefillArgs& args, int unit, int r) {
  return unit * 64 + (args.hidden % 16 == 0 ? r / 16 * 16 + r % 8 * 2 + r / 8 % 2 : r);
}

// Row `r` from the start of unit `unit`, as a row of the expert's weight; -1: beyond it.
template <bool kGateUp>
__device__ __forceinline__ int weight_row(const MoePrefillArgs& args, int unit, int r) {
  if constexpr (kGateUp) {
    const int i = unit * 32 + r / 16 * 8 + r % 8, up = r / 8 % 2;
    if (i >= args.inner) return -1;
    return args.activation == kClampedInterleaved ? 2 * i + up : i + up * args.inner;
  } else {
    const int row = down_row(args, unit, r);
    return row < args.hidden ? row : -1;
  }
}

// The row of block B that the same row is: of gate's or down's (0) or up's (1).
struct DeltaRow {
  int row;
  int block;
  bool there;
};
template <bool kGateUp>
__device__ __forceinline__ DeltaRow delta_row(const MoePrefillArgs& args, int unit, int r) {
  if constexpr (kGateUp) {
    const int i = unit * 32 + r / 16 * 8 + r % 8;
    return DeltaRow{i, r / 8 % 2, i < args.inner};
  } else {
    const int row = down_row(args, unit, r);
    return DeltaRow{row, 0, row < args.hidden};
  }
}

// The activation of one gate and up, in separate operations: nothing is left to contraction. The
// exponential and the quotient are the fast ones, within 4e-6 of the exact value for what a gate may
// be; the result is rounded to 8 or 11 bits.
__device__ __forceinline__ float quick_activate(const MoePrefillArgs& args, float gate, float up) {
  constexpr float kLog2E = 1.44269504f;
  const bool clamped = args.activation == kClampedInterleaved;
  const float g = clamped ? fminf(gate, args.limit) : gate;
  const float u = clamped ? __fadd_rn(fminf(fmaxf(up, -args.limit), args.limit), 1.f) : up;
  const float slope = clamped ? args.alpha : 1.f;
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(__fmul_rn(-slope, g), kLog2E)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(__fadd_rn(1.f, e)));
  return __fmul_rn(__fmul_rn(u, g), r);
}

// Stores the results of one sixteen of rows of an expert's weight, eight tokens at a time. Every lane of
// the warp takes part.
template <class Element, bool kGateUp>
class PrefillStore {
 public:
  // `sixteen`: 16 rows, counted from the start of the expert's weight.
  __device__ __forceinline__ PrefillStore(const MoePrefillArgs& args, const Work& work, int sixteen)
      : args_(&args), count_(work.count), bias_{0.f, 0.f}, inside_{false, false} {
    const int lane = threadIdx.x % kWarp, g = lane / 4;
    if constexpr (kGateUp) {
      const int i = sixteen * 8 + g;
      inside_[0] = i < args.inner;
      if (args.bias != nullptr && inside_[0]) {
        const float* bias = args.bias + 2ll * args.inner * work.expert;
        const bool interleaved = args.activation == kClampedInterleaved;
        bias_[0] = bias[interleaved ? 2 * i : i];
        bias_[1] = bias[interleaved ? 2 * i + 1 : i + args.inner];
      }
      // Two outputs of one token are stored at once: odd g take the second of two tokens.
      out_ = reinterpret_cast<char*>(static_cast<Element*>(args.out) +
                                     static_cast<long long>(work.first) * args.inner + (i - g % 2));
    } else {
      const int row = down_row(args, 0, sixteen * 16 + g), second = down_row(args, 0, sixteen * 16 + g + 8);
      inside_[0] = row < args.hidden;
      inside_[1] = second < args.hidden;
      if (args.bias != nullptr) {
        const float* bias = args.bias + static_cast<long long>(args.hidden) * work.expert;
        if (inside_[0]) bias_[0] = bias[row];
        if (inside_[1]) bias_[1] = bias[second];
      }
      out_ = reinterpret_cast<char*>(static_cast<float*>(args.out) + row);
    }
  }

  // Of eight tokens, that of which this lane has outputs i - g % 2 and the next, for gate_up; and these.
  __device__ __forceinline__ static int token() {
    return 2 * (threadIdx.x % 4) + threadIdx.x / 4 % 2;
  }
  __device__ __forceinline__ unsigned outputs(const float* acc) const {
    const bool odd = threadIdx.x / 4 % 2 == 1;
    float v[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      v[c] = quick_activate(*args_, __fadd_rn(acc[c], bias_[0]), __fadd_rn(acc[2 + c], bias_[1]));
    }
    const float other = __shfl_xor_sync(kFullWarp, odd ? v[0] : v[1], 4);
    const Element low = narrow<Element>(odd ? other : v[0]);
    const Element high = narrow<Element>(odd ? v[1] : other);
    return low.bits | static_cast<unsigned>(high.bits) << 16;
  }

  // acc of tokens first .. first + 8; index: the pair of each token of the tile.
  __device__ __forceinline__ void operator()(const float* acc, int first, const int* index) const {
    const int lane = threadIdx.x % kWarp;
    if constexpr (kGateUp) {
      const int n = first + token();
      const unsigned both = outputs(acc);
      if (n < count_ && inside_[0]) {
        *reinterpret_cast<unsigned*>(out_ + static_cast<long long>(n) * args_->inner * 2) = both;
      }
    } else {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int n = first + 2 * (lane % 4) + c;
        if (n < count_) {
          float* y = reinterpret_cast<float*>(out_) + static_cast<long long>(index[n]) * args_->hidden;
          const float low = __fadd_rn(acc[c], bias_[0]), high = __fadd_rn(acc[2 + c], bias_[1]);
          if (args_->hidden % 16 == 0) {
            if (inside_[0]) *reinterpret_cast<float2*>(y) = make_float2(low, high);
          } else {
            if (inside_[0]) y[0] = low;
            if (inside_[1]) y[8] = high;
          }
        }
      }
    }
  }

 private:
  const MoePrefillArgs* args_;
  int count_;
  float bias_[2];
  bool inside_[2];
  char* out_;
};

}  // namespace amphora
