// out = Σ softmax(scale · q·k_j)·v_j over the positions a row sees, with an optional sink logit that
// has no value. One block a (row, head): each warp takes every kWarps-th position with its own running
// softmax (Milakov and Gimelshein 2018), lanes over the head's elements; parts of its positions meet in their order, and
// the warps at the end in a fixed order. Heads of up to Config::kMaxHead elements.
#pragma once

#include "amphora/args.h"
#include "amphora/dtype.cuh"
#include "amphora/overlap.cuh"
#include "amphora/reduce.cuh"

namespace amphora {

// The sequence that owns `row`, which is below q_start[sequences]. Padding sequences start there.
__device__ __forceinline__ int sequence_of(const int* q_start, int sequences, int row) {
  int low = 0, high = sequences;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (q_start[middle] <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

// The first position that `position` sees.
__device__ __forceinline__ int first_seen(const AttentionArgs& args, int position) {
  switch (args.mask) {
    case kWindow:
      return position >= args.mask_width ? position - args.mask_width + 1 : 0;
    case kChunk:
      return position / args.mask_width * args.mask_width;
    default:
      return 0;
  }
}

template <class Config, int kThreads>
__device__ void paged_attention(const AttentionArgs& args) {
  let_next_begin();
  wait_for_front();
  using Element = typename Config::Element;
  constexpr int kWarps = kThreads / kWarp;
  constexpr int kPerLane = Config::kMaxHead / kWarp;
  __shared__ float peak_of[kWarps], mass_of[kWarps], sum_of[kWarps][Config::kMaxHead];

  const int row = blockIdx.x, head = blockIdx.y;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (row >= args.q_start[args.sequences]) return;  // padding
  const int sequence = sequence_of(args.q_start, args.sequences, row);
  const int start = args.q_start[sequence], rows = args.q_start[sequence + 1] - start;
  const int position = args.context[sequence] - rows + (row - start);
  const int kv_head = head / (args.heads / args.kv_heads);
  const int* blocks = args.block_table + static_cast<long long>(sequence) * args.table_width;

  const Element* q = static_cast<const Element*>(args.q) + row * args.q_pitch +
                     static_cast<long long>(head) * args.k_dim;
  float query[kPerLane], sum[kPerLane] = {};
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int at = lane + i * kWarp;
    query[i] = at < args.k_dim ? widen(q[at]) : 0.f;
  }

  // In parts of kPart of the warp's positions, so that errors of sums grow with the number of parts and not of positions.
  constexpr int kPart = 256;
  float peak = -infinity(), mass = 0.f;
  for (int first = first_seen(args, position) + warp; first <= position; first += kPart * kWarps) {
    const int end = min(position + 1, first + kPart * kWarps);
    float part_peak = -infinity(), part_mass = 0.f, part_sum[kPerLane] = {};
    for (int j = first; j < end; j += kWarps) {
      const long long place =
          static_cast<long long>(blocks[j / args.block_size]) * args.block_size + j % args.block_size;
      const Element* k =
          static_cast<const Element*>(args.k_cache) + (place * args.kv_heads + kv_head) * args.k_dim;
      const Element* v =
          static_cast<const Element*>(args.v_cache) + (place * args.kv_heads + kv_head) * args.v_dim;
      float dot = 0.f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int at = lane + i * kWarp;
        if (at < args.k_dim) dot = fmaf(query[i], widen(k[at]), dot);
      }
      const float logit = warp_reduce(dot, Sum{}) * args.scale;
      const float higher = fmaxf(part_peak, logit);
      const float keep = expf(part_peak - higher), share = expf(logit - higher);
      part_peak = higher;
      part_mass = part_mass * keep + share;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int at = lane + i * kWarp;
        if (at < args.v_dim) part_sum[i] = fmaf(share, widen(v[at]), part_sum[i] * keep);
      }
    }
    const float higher = fmaxf(peak, part_peak);
    const float keep = expf(peak - higher), share = expf(part_peak - higher);
    peak = higher;
    mass = mass * keep + part_mass * share;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sum[i] = fmaf(part_sum[i], share, sum[i] * keep);
  }

  if (lane == 0) {
    peak_of[warp] = peak;
    mass_of[warp] = mass;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sum_of[warp][lane + i * kWarp] = sum[i];
  __syncthreads();

  // A warp that saw no position has peak -inf and mass 0; the first always sees one.
  float top = args.sinks != nullptr ? args.sinks[head] : -infinity();
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, peak_of[w]);
  float total = args.sinks != nullptr ? expf(args.sinks[head] - top) : 0.f;
  for (int w = 0; w < kWarps; ++w) total += mass_of[w] * expf(peak_of[w] - top);
  Element* out = static_cast<Element*>(args.out) + row * args.out_pitch +
                 static_cast<long long>(head) * args.v_dim;
  for (int at = threadIdx.x; at < args.v_dim; at += kThreads) {
    float value = 0.f;
    for (int w = 0; w < kWarps; ++w) value += sum_of[w][at] * expf(peak_of[w] - top);
    out[at] = narrow<Element>(value / total);
  }
}

}  // namespace amphora
