// x += add, rounded; out = x / sqrt(mean(x²) + eps) · weight, rounded once.
// One block a vector; the sum runs over strided partial sums, then over the block in a fixed order.
// A vector of whole 16-byte pieces that the block's registers hold is read once and by such pieces.
//
// rms_norm_short does the same for vectors of whole 16-byte pieces, at most as many as a warp has lanes: heads. As
// many lanes as the next power of two take one, and a few of them at a time. Grid: blocks that have all vectors when
// each group of lanes takes kShortVectors.
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

// The vectors of a thread's group of lanes: kVectors, or fewer at the end.
template <class Element, int kThreads, int kVectors>
__device__ __forceinline__ void short_vectors(const RmsNormArgs& args, int lanes) {
  using Piece = Vector<Element>;
  constexpr int kElements = Piece::kElements;
  const int at = (threadIdx.x & (lanes - 1)) * kElements;
  // Groups of a block take vectors side by side.
  const int groups = kThreads / lanes, stride = gridDim.x * groups;
  Element *from[kVectors], *to[kVectors];
  const Element* add[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int vector = blockIdx.x * groups + threadIdx.x / lanes + i * stride;
    const int row = vector / args.inner, skip = (vector - row * args.inner) * args.width + at;
    const bool mine = at < args.width && vector < args.vectors;
    from[i] = mine ? static_cast<Element*>(args.x) + row * args.x_pitch + skip : nullptr;
    to[i] = static_cast<Element*>(args.out) + row * args.out_pitch + skip;
    add[i] = static_cast<const Element*>(args.add) + row * args.add_pitch + skip;
  }
  float weight[kElements];
#pragma unroll
  for (int i = 0; i < kElements; i += 4) {
    if (at >= args.width) continue;
    const float4 four = *reinterpret_cast<const float4*>(args.weight + at + i);
    weight[i] = four.x, weight[i + 1] = four.y, weight[i + 2] = four.z, weight[i + 3] = four.w;
  }
  wait_for_front();
  Piece kept[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (from[i] == nullptr) continue;
    kept[i] = Piece(from[i]);
    if (args.add == nullptr) continue;
    const Piece more(add[i]);
#pragma unroll
    for (int e = 0; e < kElements; ++e) kept[i].of[e] = narrow<Element>(widen(kept[i].of[e]) + widen(more.of[e]));
    kept[i].store(from[i]);
  }
  float squares[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    squares[i] = 0.f;
#pragma unroll
    for (int e = 0; e < kElements; ++e) squares[i] = fmaf(widen(kept[i].of[e]), widen(kept[i].of[e]), squares[i]);
  }
#pragma unroll
  for (int apart = kWarp / 2; apart > 0; apart /= 2) {
    if (apart >= lanes) continue;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) squares[i] += __shfl_xor_sync(kFullWarp, squares[i], apart);
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (from[i] == nullptr) continue;
    const float inverse = 1.f / sqrtf(squares[i] / static_cast<float>(args.width) + args.eps);
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      kept[i].of[e] = narrow<Element>(widen(kept[i].of[e]) * inverse * weight[e]);
    }
    kept[i].store(to[i]);
  }
}

// Which lanes add up what depends on the width alone, whatever the grid and the vector's place in it.
template <class Config, int kThreads>
__device__ void rms_norm_short(const RmsNormArgs& args) {
  let_next_begin();
  using Element = typename Config::Element;
  const int pieces = args.width / Vector<Element>::kElements;
  const int lanes = pieces <= 1 ? 1 : 1 << (kWarp - __clz(pieces - 1));
  if (gridDim.x * (kThreads / lanes) >= args.vectors) {
    short_vectors<Element, kThreads, 1>(args, lanes);
  } else {
    short_vectors<Element, kThreads, kShortVectors>(args, lanes);
  }
}

}  // namespace amphora
