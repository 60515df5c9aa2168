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

// A vector in pieces of 16 bytes, and the weights of its elements.
template <class Element, int kThreads>
struct NormPieces {
  static constexpr int kElements = Vector<Element>::kElements;
  static constexpr int kMost = kThreads * kNormPieces * kElements;
  const RmsNormArgs& args;
  float weight[kNormPieces][kElements];

  // The weights alone: they are there before the kernel in front has ended.
  __device__ __forceinline__ explicit NormPieces(const RmsNormArgs& args) : args(args) {
#pragma unroll
    for (int piece = 0; piece < kNormPieces; ++piece) {
      if (at(piece) >= args.width) continue;
#pragma unroll
      for (int i = 0; i < kElements; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(args.weight + at(piece) + i);
        weight[piece][i] = four.x;
        weight[piece][i + 1] = four.y;
        weight[piece][i + 2] = four.z;
        weight[piece][i + 3] = four.w;
      }
    }
  }

  static __device__ __forceinline__ int at(int piece) { return (piece * kThreads + threadIdx.x) * kElements; }

  // `add` may be null.
  __device__ __forceinline__ void run(Element* x, const Element* add, Element* out, float* scratch) const {
    Vector<Element> kept[kNormPieces], more[kNormPieces];
#pragma unroll
    for (int piece = 0; piece < kNormPieces; ++piece) {
      if (at(piece) >= args.width) continue;
      kept[piece] = Vector<Element>(x + at(piece));
      if (add != nullptr) more[piece] = Vector<Element>(add + at(piece));
    }
    float squares = 0.f;
#pragma unroll
    for (int piece = 0; piece < kNormPieces; ++piece) {
      if (at(piece) >= args.width) continue;
      if (add != nullptr) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          kept[piece].of[i] = narrow<Element>(widen(kept[piece].of[i]) + widen(more[piece].of[i]));
        }
        kept[piece].store(x + at(piece));
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
      if (at(piece) >= args.width) continue;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        kept[piece].of[i] = narrow<Element>(widen(kept[piece].of[i]) * inverse * weight[piece][i]);
      }
      kept[piece].store(out + at(piece));
    }
  }
};

template <class Config, int kThreads>
__device__ void rms_norm(const RmsNormArgs& args) {
  let_next_begin();
  using Element = typename Config::Element;
  __shared__ float scratch[kThreads / kWarp];
  const long long row = blockIdx.x / args.inner, inside = blockIdx.x % args.inner;
  const long long skip = inside * args.width;
  Element* x = static_cast<Element*>(args.x) + row * args.x_pitch + skip;
  Element* out = static_cast<Element*>(args.out) + row * args.out_pitch + skip;
  const Element* add = static_cast<const Element*>(args.add);
  if (add != nullptr) add += row * args.add_pitch + skip;

  using Pieces = NormPieces<Element, kThreads>;
  if (whole(x) && whole(out) && whole(add) && whole(args.weight) && args.width % Pieces::kElements == 0 &&
      args.width <= Pieces::kMost) {
    const Pieces pieces(args);
    wait_for_front();
    pieces.run(x, add, out, scratch);
    return;
  }
  wait_for_front();
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
