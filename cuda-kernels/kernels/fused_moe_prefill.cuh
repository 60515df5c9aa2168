// Both expert products of a prefill step on Hopper: warpgroup products, the weights through tensor
// maps, the tokens gathered, the deltas as more k in the same accumulators.
//
//   moe_prefill_gate_up   act[p] = activation(gate_up_e · x[t] + b + delta), rounded   p: position
//   moe_prefill_down      y[pair] = down_e · act[p] + b' + delta, f32
//
// Rows of the product are outputs (weights), columns are tokens: an expert's tokens rarely fill a tile
// of 128, but cost only sixteens here. Blocks stay and walk over their work (moe_prefill_plan.cuh).
//
// A block is four warps that bring operands and kGroups warpgroups that multiply, kBlocks times 64 rows
// each (moe_prefill_block.cuh).
//
// With and without adapters the same instructions run: a row without one has the bits of the base.
#pragma once

#include "amphora/args.h"
#include "amphora/overlap.cuh"
#include "kernels/moe_prefill_bring.cuh"
#include "kernels/moe_prefill_multiply.cuh"

namespace amphora {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <class Element, class Shape, bool kGateUp>
__device__ __forceinline__ void prefill_block(const MoePrefillArgs& args) {
  using Shared = typename PrefillBlock<Shape, kGateUp>::Shared;
  extern __shared__ __align__(128) char dynamic[];
  const unsigned start = shared_address(dynamic);
  const unsigned base = (start + 1023) & ~1023u;
  const Shared shared{base, dynamic + (base - start)};
  if (threadIdx.x == 0) PrefillBlock<Shape, kGateUp>::init(shared);
  let_next_begin();
  wait_for_front();
  const ExpertTables tables = shared.tables(args.experts);
  build_tables<Shape::kMaxTokens, Shape::kThreads>(args, PrefillBlock<Shape, kGateUp>::grains(args), tables);
  const int group = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (group == Shape::kGroups) {
    const int thread = threadIdx.x % 128;
    PrefillBring<Shape, kGateUp> bring{args, shared, thread, {}, {}};
    if (__shfl_sync(kFullWarp, thread, 0) < Shape::kBring) {
      bring.run(tables);
    } else {
      bring.run_weights(tables);
    }
  } else {
    PrefillMultiply<Element, Shape, kGateUp>{args, shared, group, {}, {}}.run();
  }
}

#endif

// The shape that was fastest on an H200.
using PrefillTile = PrefillShape<2, 1, 240, 6, 4>;
static_assert(PrefillTile::kTables == 227264, "the host asks for as much shared memory");

template <class Config, bool kGateUp, int kThreads>
__device__ __forceinline__ void prefill(const MoePrefillArgs& args) {
  static_assert(kThreads == PrefillTile::kThreads, "threads");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  prefill_block<typename Config::Element, PrefillTile, kGateUp>(args);
#else
  __trap();  // there are no such products here: nothing launches it
#endif
}

template <class Config, int kThreads>
__device__ void moe_prefill_gate_up(const MoePrefillArgs& args) {
  prefill<Config, true, kThreads>(args);
}
template <class Config, int kThreads>
__device__ void moe_prefill_down(const MoePrefillArgs& args) {
  prefill<Config, false, kThreads>(args);
}

}  // namespace amphora
