// Paged attention for many rows on Hopper: tiles of query rows against tiles of positions, by products of
// warpgroups.
//
// Grid: tiles of rows · KV heads · groups of query heads, the latter two fastest. A block takes 64 · kGroups
// (row, query head) pairs of one sequence and one KV head, rows first, as attention_flash.cuh does, the last
// rows of a sequence first: they see most. Each of its warpgroups keeps the running softmax of 64 pairs; the
// last copies keys and values into a ring. Sixteen positions are multiplied while the next are weighed, and
// while one warpgroup weighs, others multiply. Positions are always cut at multiples of 64, and a tile that a
// row does not see leaves it as it was, so a row's bits depend on itself alone.
//
//   attention_group_64, _128   heads of up to so many elements, in multiples of 8
#pragma once

#include "amphora/args.h"
#include "amphora/overlap.cuh"
#include "kernels/attention_group_bring.cuh"
#include "kernels/attention_group_multiply.cuh"

namespace amphora {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <class Element, class Shape>
__device__ __forceinline__ void attention_group_block(const AttentionArgs& args) {
  extern __shared__ __align__(128) unsigned char dynamic[];
  __shared__ Barrier barriers[4 * Shape::kStages];
  __shared__ AttentionRows rows;
  let_next_begin();
  const AttentionRing<Shape> ring{(shared_address(dynamic) + 1023) & ~1023u, barriers};
  if (threadIdx.x == kWarp) ring.init();
  if (threadIdx.x < kWarp) rows.find<Shape::kPairs>(args);  // the plan alone
  __syncthreads();
  if (rows.rows == 0) {
    wait_for_front();
    return;
  }
  const int group = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (group == Shape::kGroups) {
    give_registers<Shape::kBringRegisters>();
    AttentionBring<Element, Shape>{args, rows, ring}.run();
  } else {
    take_registers<Shape::kGroupRegisters>();
    AttentionMultiply<Element, Shape>{args, rows, ring, group}.run();
  }
}

#endif

// The shapes that were fastest on an H200.
using AttentionShape64 = AttentionShape<64, 2, 4, 2, 32, 104>;
using AttentionShape128 = AttentionShape<128, 3, 3, 1, 40, 152>;
static_assert(AttentionShape64::kPairs == 128 && AttentionShape64::kBytes == 80 << 10, "as the host's");
static_assert(AttentionShape128::kPairs == 192 && AttentionShape128::kBytes == 144 << 10, "as the host's");

template <class Config, class Shape, int kThreads>
__device__ __forceinline__ void attention_group(const AttentionArgs& args) {
  static_assert(kThreads == Shape::kThreads, "threads");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  attention_group_block<typename Config::Element, Shape>(args);
#else
  __trap();  // there are no such products here: nothing launches it
#endif
}

template <class Config, int kThreads>
__device__ void attention_group_64(const AttentionArgs& args) {
  attention_group<Config, AttentionShape64, kThreads>(args);
}
template <class Config, int kThreads>
__device__ void attention_group_128(const AttentionArgs& args) {
  attention_group<Config, AttentionShape128, kThreads>(args);
}

}  // namespace amphora
