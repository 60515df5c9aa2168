// Rotary positions in place: pair (a, b) at frequency i becomes (a·cos − b·sin, b·cos + a·sin), then
// q alone is multiplied by its position's scale. Where there is a cache, the turned k and v go to the row's
// place in it; padding rows have none.
// Grid: (rows, shares). Blocks of a row share its heads, those of q first. Where pairs are half a head
// apart, all elements turn, and heads are whole 16-byte pieces, a thread turns two pieces against each
// other; else a thread takes whole pairs, and the elements that do not turn.
#pragma once

#include "amphora/args.h"
#include "amphora/dtype.cuh"
#include "amphora/octet.cuh"
#include "amphora/overlap.cuh"
#include "amphora/rotary.cuh"

namespace amphora {

// Turns a piece of a head's half and that of the other half in place, and copies both to `copy`, unless that is null.
template <class Element>
__device__ __forceinline__ void turn_piece(const RopeAngles<Element>& angles, Element* from, int half, float scale,
                                           Element* copy) {
  Vector<Element> first(from), second(from + half);
  angles.turn(first, second, scale);
  first.store(from);
  second.store(from + half);
  if (copy == nullptr) return;
  first.store(copy);
  second.store(copy + half);
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

// A row's values to their place in the cache.
template <class Element, int kThreads>
__device__ void store_values(const RopeArgs& args, long long row, long long place) {
  copy_row<Element, kThreads>(static_cast<const Element*>(args.v) + row * args.v_pitch,
                              static_cast<Element*>(args.v_cache) + place * args.v_width, args.v_width);
}

template <class Config, int kThreads>
__device__ void rope(const RopeArgs& args) {
  let_next_begin();
  using Element = typename Config::Element;
  const long long row = blockIdx.x;
  // Positions are of the plan, angles and scales are tables: there already.
  const int position = args.position[row];
  const float* angles = args.table + static_cast<long long>(position) * args.rotary;
  const float scale = args.q_scale != nullptr ? args.q_scale[position] : 1.f;
  const long long place = args.kv_index != nullptr ? args.kv_index[row] : -1;
  Element* q = static_cast<Element*>(args.q) + row * args.q_pitch;
  Element* k = static_cast<Element*>(args.k) + row * args.k_pitch;
  const long long k_width = static_cast<long long>(args.kv_heads) * args.dim;
  Element* k_cache = place < 0 ? nullptr : static_cast<Element*>(args.k_cache) + place * k_width;
  constexpr int kElements = Vector<Element>::kElements;
  const int half = args.rotary / 2;
  const int pieces = half / kElements, stride = gridDim.y * kThreads;
  if (!args.interleaved && args.rotary == args.dim && half > 0 && half % kElements == 0 && whole(q) && whole(k) &&
      whole(k_cache) && stride % pieces == 0) {
    // One piece of every head that this thread turns.
    const int first = blockIdx.y * kThreads + threadIdx.x, all = (args.heads + args.kv_heads) * pieces;
    const int at = first % pieces * kElements;
    const RopeAngles<Element> piece(angles, at, half);
    wait_for_front();
    for (int i = first; i < all; i += stride) {
      const int head = i / pieces, of_k = head - args.heads;
      if (of_k < 0) {
        turn_piece<Element>(piece, q + static_cast<long long>(head) * args.dim + at, half, scale, nullptr);
      } else {
        const long long to = static_cast<long long>(of_k) * args.dim + at;
        turn_piece<Element>(piece, k + to, half, 1.f, place < 0 ? nullptr : k_cache + to);
      }
    }
    // The row's last block has the fewest heads to turn.
    if (place >= 0 && blockIdx.y == gridDim.y - 1) store_values<Element, kThreads>(args, row, place);
    return;
  }
  wait_for_front();
  if (blockIdx.y > 0) return;
  rope_heads<Element, kThreads>(q, args.heads, scale, angles, args);
  rope_heads<Element, kThreads>(k, args.kv_heads, 1.f, angles, args);
  if (place < 0) return;
  __syncthreads();  // all of k is turned
  copy_row<Element, kThreads>(k, k_cache, static_cast<int>(k_width));
  store_values<Element, kThreads>(args, row, place);
}

}  // namespace amphora
