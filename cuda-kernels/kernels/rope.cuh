// Rotary positions in place: pair (a, b) at frequency i becomes (a·cos − b·sin, b·cos + a·sin), then
// q alone is multiplied by its position's scale.
// Grid: (rows, shares). Blocks of a row share its heads, those of q first. Where pairs are half a head
// apart, all elements turn, and heads are whole 16-byte pieces, a thread turns two pieces against each
// other; else a thread takes whole pairs, and the elements that do not turn.
#pragma once

#include "amphora/args.h"
#include "amphora/dtype.cuh"
#include "amphora/octet.cuh"
#include "amphora/overlap.cuh"

namespace amphora {

// Piece `piece` of a head's first half against that of its second.
template <class Element>
__device__ __forceinline__ void rope_pieces(Element* head, int piece, int half, float scale,
                                            const float* angles) {
  constexpr int kElements = Vector<Element>::kElements;
  const int at = piece * kElements;
  Vector<Element> first(head + at), second(head + half + at);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const float cosine = angles[at + i], sine = angles[half + at + i];
    const float a = widen(first.of[i]), b = widen(second.of[i]);
    first.of[i] = narrow<Element>((a * cosine - b * sine) * scale);
    second.of[i] = narrow<Element>((b * cosine + a * sine) * scale);
  }
  first.store(head + at);
  second.store(head + half + at);
}

template <class Element, int kThreads>
__device__ void rope_heads(Element* data, int heads, float scale, const float* angles,
                           const RopeArgs& args) {
  const int half = args.rotary / 2, still = args.dim - args.rotary;
  for (int i = threadIdx.x; i < heads * half; i += kThreads) {
    Element* head = data + static_cast<long long>(i / half) * args.dim;
    const int frequency = i % half;
    const int first = args.interleaved ? 2 * frequency : frequency;
    const int second = args.interleaved ? first + 1 : first + half;
    const float cosine = angles[frequency], sine = angles[half + frequency];
    const float a = widen(head[first]), b = widen(head[second]);
    head[first] = narrow<Element>((a * cosine - b * sine) * scale);
    head[second] = narrow<Element>((b * cosine + a * sine) * scale);
  }
  if (scale == 1.f) return;
  for (int i = threadIdx.x; i < heads * still; i += kThreads) {
    Element* value = data + static_cast<long long>(i / still) * args.dim + args.rotary + i % still;
    *value = narrow<Element>(widen(*value) * scale);
  }
}

template <class Config, int kThreads>
__device__ void rope(const RopeArgs& args) {
  let_next_begin();
  wait_for_front();
  using Element = typename Config::Element;
  const long long row = blockIdx.x;
  const int position = args.position[row];
  const float* angles = args.table + static_cast<long long>(position) * args.rotary;
  const float scale = args.q_scale != nullptr ? args.q_scale[position] : 1.f;
  Element* q = static_cast<Element*>(args.q) + row * args.q_pitch;
  Element* k = static_cast<Element*>(args.k) + row * args.k_pitch;
  constexpr int kElements = Vector<Element>::kElements;
  const int half = args.rotary / 2;
  if (!args.interleaved && args.rotary == args.dim && half % kElements == 0 && whole(q) && whole(k)) {
    const int pieces = half / kElements, all = (args.heads + args.kv_heads) * pieces;
    for (int i = blockIdx.y * kThreads + threadIdx.x; i < all; i += gridDim.y * kThreads) {
      const int head = i / pieces, of_k = head - args.heads;
      Element* data = of_k < 0 ? q + static_cast<long long>(head) * args.dim : k + static_cast<long long>(of_k) * args.dim;
      rope_pieces(data, i % pieces, half, of_k < 0 ? scale : 1.f, angles);
    }
    return;
  }
  if (blockIdx.y > 0) return;
  rope_heads<Element, kThreads>(q, args.heads, scale, angles, args);
  rope_heads<Element, kThreads>(k, args.kv_heads, 1.f, angles, args);
}

}  // namespace amphora
