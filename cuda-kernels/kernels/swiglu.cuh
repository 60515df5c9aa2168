// out[r, i] = activation(gate, up) of row r of x, in f32, rounded once.
// Grid: (rows, activations / those of a block). A thread makes a 16-byte piece of out where rows of both tensors lie on
// such pieces and are whole ones, else one activation after another, a block's width apart.
#pragma once

#include "amphora/activation.cuh"
#include "amphora/args.h"
#include "amphora/dtype.cuh"
#include "amphora/octet.cuh"
#include "amphora/overlap.cuh"

namespace amphora {

// As activation.cuh has it, but inlined and with a quotient that may be two units in the last place off: no other
// kernel has to give these rows' bits. A sigmoid of less than 2^-126 is 0.
__device__ __forceinline__ float dense_activation(int kind, const SwigluArgs& args, float gate, float up) {
  if (kind == kClampedInterleaved) {
    const float g = fminf(gate, args.limit), u = fminf(fmaxf(up, -args.limit), args.limit);
    return __fdividef((u + 1.f) * g, 1.f + expf(-args.alpha * g));
  }
  return __fdividef(gate, 1.f + expf(-gate)) * up;
}

// The piece of out that begins at activation i of a row.
template <bool kInterleaved, class Element>
__device__ __forceinline__ Vector<Element> swiglu_piece(const SwigluArgs& args, const Element* x, int i) {
  using Piece = Vector<Element>;
  constexpr int kElements = Piece::kElements;
  const Piece first(x + (kInterleaved ? 2 * i : i)), second(x + (kInterleaved ? 2 * i + kElements : args.inner + i));
  Piece made;
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    const Piece& pair = 2 * e < kElements ? first : second;
    const Element gate = kInterleaved ? pair.of[2 * e % kElements] : first.of[e];
    const Element up = kInterleaved ? pair.of[2 * e % kElements + 1] : second.of[e];
    const int kind = kInterleaved ? kClampedInterleaved : kSwiglu;
    made.of[e] = narrow<Element>(dense_activation(kind, args, widen(gate), widen(up)));
  }
  return made;
}

template <class Config, int kThreads>
__device__ void swiglu(const SwigluArgs& args) {
  let_next_begin();
  using Element = typename Config::Element;
  using Piece = Vector<Element>;
  constexpr int kElements = Piece::kElements;
  const Element* x = static_cast<const Element*>(args.x) + blockIdx.x * args.x_pitch;
  Element* out = static_cast<Element*>(args.out) + blockIdx.x * args.out_pitch;
  const bool interleaved = args.activation == kClampedInterleaved;
  wait_for_front();
  if (whole(x) && whole(out) && args.inner % kElements == 0) {
    const int i = (blockIdx.y * kThreads + threadIdx.x) * kElements;
    if (i >= args.inner) return;
    const Piece made = interleaved ? swiglu_piece<true>(args, x, i) : swiglu_piece<false>(args, x, i);
    made.store(out + i);
    return;
  }
  const int behind = min(args.inner, static_cast<int>(blockIdx.y + 1) * kThreads * kElements);
  for (int i = blockIdx.y * kThreads * kElements + threadIdx.x; i < behind; i += kThreads) {
    const float gate = widen(x[gate_up_column(args.activation, i, 0, args.inner)]);
    const float up = widen(x[gate_up_column(args.activation, i, 1, args.inner)]);
    out[i] = narrow<Element>(dense_activation(args.activation, args, gate, up));
  }
}

}  // namespace amphora
