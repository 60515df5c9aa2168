// The rows of x in the order of positions, for tensor maps to find: gathered[p] = x[perm[p] / top_k].
//
// Grid: blocks that take rows in turn, kSplit warps a row.
#pragma once

#include "amphora/args.h"
#include "amphora/overlap.cuh"
#include "amphora/reduce.cuh"

namespace amphora {

// Share `share` of `split` of a row, for a warp.
__device__ __forceinline__ void gather_row(const MoePrefillGatherArgs& args, int p, int share, int split) {
  constexpr int kEach = 4;
  const int lane = threadIdx.x % kWarp, pieces = args.hidden / 8;
  const int pair = args.perm[p];
  if (pair < 0) return;  // of a padded token: nobody's
  const uint4* from = reinterpret_cast<const uint4*>(
      static_cast<const char*>(args.x) + pair / args.top_k * args.x_pitch * 2);
  uint4* to = static_cast<uint4*>(args.out) + static_cast<long long>(p) * pieces;
  for (int start = lane + share * kEach * kWarp; start < pieces; start += kEach * kWarp * split) {
    uint4 piece[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (start + i * kWarp < pieces) piece[i] = from[start + i * kWarp];
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (start + i * kWarp < pieces) to[start + i * kWarp] = piece[i];
    }
  }
}

template <class Config, int kThreads>
__device__ void moe_prefill_gather(const MoePrefillGatherArgs& args) {
  // The kernel behind reads the lists of the routing at once, and so begins when that has ended.
  wait_for_front();
  let_next_begin();
  constexpr int kWarps = kThreads / kWarp, kSplit = 2;
  for (int w = blockIdx.x * kWarps + threadIdx.x / kWarp; w < args.pairs * kSplit; w += gridDim.x * kWarps) {
    gather_row(args, w / kSplit, w % kSplit, kSplit);
  }
}

}  // namespace amphora
