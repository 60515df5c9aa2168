// Rotary positions in place (rope.cuh) for many rows: pairs half a head apart, all elements of a head turn, and
// rows and halves of heads are whole 16-byte pieces. Turned k and v also go to the row's place in the cache.
// Grid: (rows / rows of a block); `row_threads` of a block's threads have a row. A thread turns two pieces
// against each other, the same two of several heads, so that it loads their angles once.
#pragma once

#include "amphora/args.h"
#include "amphora/dtype.cuh"
#include "amphora/octet.cuh"
#include "amphora/overlap.cuh"
#include "amphora/rotary.cuh"

namespace amphora {

template <class Config, int kThreads>
__device__ void rope_many(const RopeArgs& args) {
  using Element = typename Config::Element;
  constexpr int kHeads = 3;  // heads of a thread whose pieces are on the way at a time
  constexpr int kElements = Vector<Element>::kElements;
  let_next_begin();
  const int rows = kThreads / args.row_threads;
  const long long row = static_cast<long long>(blockIdx.x) * rows + threadIdx.x / args.row_threads;
  if (row >= args.tokens) {
    wait_for_front();
    return;
  }
  // Positions are of the plan, angles and scales are tables: there already.
  const int position = args.position[row];
  const int half = args.rotary / 2, pieces = half / kElements, stride = args.row_threads;
  const int first = threadIdx.x % stride;
  const int at = first % pieces * kElements, heads = stride / pieces, all = args.heads + args.kv_heads;
  const float* angles = args.table + static_cast<long long>(position) * args.rotary;
  const RopeAngles<Element> piece(reinterpret_cast<const float4*>(angles), at, half);
  const float scale = args.q_scale != nullptr ? args.q_scale[position] : 1.f;
  const long long place = args.kv_index != nullptr ? args.kv_index[row] : -1;
  // Heads of k are numbered behind those of q.
  Element* q = static_cast<Element*>(args.q) + row * args.q_pitch + at;
  Element* k = static_cast<Element*>(args.k) + row * args.k_pitch + at - args.heads * args.dim;
  Element* k_cache = static_cast<Element*>(args.k_cache) + place * args.kv_heads * args.dim + at - args.heads * args.dim;
  wait_for_front();
  for (int head = first / pieces; head < all; head += kHeads * heads) {
    Vector<Element> low[kHeads], high[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int of = head + i * heads;
      if (of >= all) continue;
      const Element* from = (of < args.heads ? q : k) + of * args.dim;
      low[i] = Vector<Element>(from);
      high[i] = Vector<Element>(from + half);
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int of = head + i * heads;
      if (of >= all) continue;
      const bool of_q = of < args.heads;
      piece.turn(low[i], high[i], of_q ? scale : 1.f);
      Element* to = (of_q ? q : k) + of * args.dim;
      low[i].store(to);
      high[i].store(to + half);
      if (of_q || place < 0) continue;
      low[i].store(k_cache + of * args.dim);
      high[i].store(k_cache + of * args.dim + half);
    }
  }
  if (place < 0) return;
  // The threads with the fewest heads to turn begin.
  const Element* v = static_cast<const Element*>(args.v) + row * args.v_pitch;
  Element* v_cache = static_cast<Element*>(args.v_cache) + place * args.v_width;
  for (int i = (stride - 1 - first) * kElements; i < args.v_width; i += stride * kElements) {
    Vector<Element>(v + i).store(v_cache + i);
  }
}

}  // namespace amphora
