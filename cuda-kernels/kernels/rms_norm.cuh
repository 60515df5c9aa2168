// x += add, rounded; out = x / sqrt(mean(x²) + eps) · weight, rounded once.
// One block a vector; the sum runs over strided partial sums, then over the block in a fixed order.
#pragma once

#include "amphora/args.h"
#include "amphora/dtype.cuh"
#include "amphora/overlap.cuh"
#include "amphora/reduce.cuh"

namespace amphora {

template <class Config, int kThreads>
__device__ void rms_norm(const RmsNormArgs& args) {
  let_next_begin();
  wait_for_front();
  using Element = typename Config::Element;
  __shared__ float scratch[kThreads / kWarp];
  const long long row = blockIdx.x / args.inner, inside = blockIdx.x % args.inner;
  const long long skip = inside * args.width;
  Element* x = static_cast<Element*>(args.x) + row * args.x_pitch + skip;
  Element* out = static_cast<Element*>(args.out) + row * args.out_pitch + skip;
  const Element* add = static_cast<const Element*>(args.add);
  if (add != nullptr) add += row * args.add_pitch + skip;

  float squares = 0.f;
  for (int i = threadIdx.x; i < args.width; i += kThreads) {
    Element value = x[i];
    if (add != nullptr) {
      value = narrow<Element>(widen(value) + widen(add[i]));
      x[i] = value;  // read back below by this same thread
    }
    squares = fmaf(widen(value), widen(value), squares);
  }
  squares = block_reduce<kThreads>(squares, Sum{}, scratch);
  const float inverse = 1.f / sqrtf(squares / static_cast<float>(args.width) + args.eps);
  for (int i = threadIdx.x; i < args.width; i += kThreads) {
    out[i] = narrow<Element>(widen(x[i]) * inverse * args.weight[i]);
  }
}

}  // namespace amphora
