// What lies between the two products of an MLP, of one gate and its up.
#pragma once

#include "amphora/args.h"

namespace amphora {

// Not inlined, so that both products run the same instructions: where a compiler contracts a multiply
// and an add may depend on what surrounds them, and a base row must have the same bits from both.
__device__ __noinline__ float activate(int kind, float limit, float alpha, float gate, float up) {
  if (kind == kClampedInterleaved) {
    const float g = fminf(gate, limit);
    const float u = fminf(fmaxf(up, -limit), limit);
    return (u + 1.f) * g / (1.f + expf(-alpha * g));
  }
  return gate / (1.f + expf(-gate)) * up;
}

// Where the gate (`up` 0) or the up (1) of activation `i` lies in a row of 2 · inner.
__device__ __forceinline__ int gate_up_column(int kind, int i, int up, int inner) {
  return kind == kClampedInterleaved ? 2 * i + up : i + up * inner;
}

}  // namespace amphora
