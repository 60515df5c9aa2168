// x += add, rounded; out = x / sqrt(mean(x²) + eps) · weight, rounded once.
// One block a vector; the sum runs over strided partial sums, then over the block in a fixed order.
// A vector of whole 16-byte pieces that the block's registers hold is read once and by such pieces.
#pragma once

#include "amphora/args.h"
#include "amphora/dtype.cuh"
#include "amphora/octet.cuh"
#include "amphora/overlap.cuh"
#include "amphora/reduce.cuh"

namespace amphora {

constexpr int kNormPieces = 3;  // pieces of a vector that a thread keeps

// The norm of a vector in pieces. `add` may be null.
template <class Element, int kThreads>
__device__ __forceinline__ void norm_pieces(const RmsNormArgs& args, Element* x, const Element* add,
                                            Element* out, float* scratch) {
  constexpr int kElements = Vector<Element>::kElements;
  Vector<Element> kept[kNormPieces];
  float squares = 0.f;
#pragma unroll
  for (int piece = 0; piece < kNormPieces; ++piece) {
    const int at = (piece * kThreads + threadIdx.x) * kElements;
    if (at >= args.width) continue;
    kept[piece] = Vector<Element>(x + at);
    if (add != nullptr) {
      const Vector<Element> more(add + at);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        kept[piece].of[i] = narrow<Element>(widen(kept[piece].of[i]) + widen(more.of[i]));
      }
      kept[piece].store(x + at);
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      squares = fmaf(widen(kept[piece].of[i]), widen(kept[piece].of[i]), squares);
    }
  }
  squares = block_reduce<kThreads>(squares, Sum{}, scratch);
  const float inverse = 1.f / sqrtf(squares / static_cast<float>(args.width) + args.eps);
#pragma unroll
  for (int piece = 0; piece < kNormPieces; ++piece) {
    const int at = (piece * kThreads + threadIdx.x) * kElements;
    if (at >= args.width) continue;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      kept[piece].of[i] = narrow<Element>(widen(kept[piece].of[i]) * inverse * args.weight[at + i]);
    }
    kept[piece].store(out + at);
  }
}

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

  constexpr int kElements = Vector<Element>::kElements;
  if (whole(x) && whole(out) && whole(add) && args.width % kElements == 0 &&
      args.width <= kThreads * kNormPieces * kElements) {
    norm_pieces<Element, kThreads>(args, x, add, out, scratch);
    return;
  }
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
