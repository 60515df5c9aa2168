// Rotary positions in place: pair (a, b) at frequency i becomes (a·cos − b·sin, b·cos + a·sin), then
// q alone is multiplied by its position's scale. One block a token; a thread takes whole pairs, and
// the elements that do not turn.
#pragma once

#include "amphora/args.h"
#include "amphora/dtype.cuh"
#include "amphora/overlap.cuh"

namespace amphora {

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
  rope_heads<Element, kThreads>(static_cast<Element*>(args.q) + row * args.q_pitch, args.heads, scale,
                                angles, args);
  rope_heads<Element, kThreads>(static_cast<Element*>(args.k) + row * args.k_pitch, args.kv_heads, 1.f,
                                angles, args);
}

}  // namespace amphora
