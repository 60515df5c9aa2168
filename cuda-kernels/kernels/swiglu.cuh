// out[r, i] = activation(gate, up) of row r of x, in f32, rounded once.
// Grid: (rows, activations / threads); one thread an activation.
#pragma once

#include "amphora/activation.cuh"
#include "amphora/args.h"
#include "amphora/dtype.cuh"

namespace amphora {

template <class Config, int kThreads>
__device__ void swiglu(const SwigluArgs& args) {
  using Element = typename Config::Element;
  const int i = blockIdx.y * kThreads + threadIdx.x;
  if (i >= args.inner) return;
  const Element* x = static_cast<const Element*>(args.x) + blockIdx.x * args.x_pitch;
  Element* out = static_cast<Element*>(args.out) + blockIdx.x * args.out_pitch;
  const float gate = widen(x[gate_up_column(args.activation, i, 0, args.inner)]);
  const float up = widen(x[gate_up_column(args.activation, i, 1, args.inner)]);
  out[i] = narrow<Element>(activate(args.activation, args.limit, args.alpha, gate, up));
}

}  // namespace amphora
