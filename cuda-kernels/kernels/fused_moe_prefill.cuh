// Both expert products of a prefill step on Hopper: warpgroup products, the weights through tensor
// maps, then the deltas onto their sums, over the columns of their slots.
//
//   moe_prefill_gate_up        act[p] = activation(gate_up_e · gathered[p] + b + delta), rounded   p: position
//   moe_prefill_down           y[pair] = down_e · act[p] + b' + delta, f32
//   moe_prefill, .._lora       both
//
// Each in three shapes, by the tokens that an expert has. Without adapters one launch makes both products: a block goes on
// from its last work of gate_up to its first of down, whose weights are on their way then, and waits for what others store
// of an expert, not for all (moe_prefill_ready.cuh). Adapters' shrink of act lies between: blocks make it there
// (moe_prefill_between.cuh); but in the shape for few tokens, where there would be little room for it, each product is a
// launch of its own.
//
// What an entry calls is put into it: the assembler makes warpgroup products one after the other where they cross a call.
//
// Rows of the product are outputs (weights), columns are tokens: an expert's tokens rarely fill a tile
// of 128, but cost only sixteens here. Blocks stay and take works in turn (moe_prefill_plan.cuh).
//
// The lists of the routing are read before the kernel in front has ended: the gather of the tokens lets this
// one begin when routing has, and what is between begins no earlier. Weights are constant. All else waits.
//
// A block is four warps that bring operands and kGroups warpgroups that multiply, kBlocks times 64 rows
// each (moe_prefill_block.cuh).
//
// With and without adapters the same instructions make the base, and what a delta adds beyond its slot's columns is
// zeros: a row without one has the bits of the base. (Factors are finite, or adapters are refused.)
#pragma once

#include "amphora/args.h"
#include "amphora/overlap.cuh"
#include "kernels/moe_prefill_between.cuh"
#include "kernels/moe_prefill_bring.cuh"
#include "kernels/moe_prefill_multiply.cuh"

namespace amphora {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Of a thread of those that bring, and of the two warpgroups that multiply: together what a block has.
constexpr int kBringRegisters = 80, kMultiplyRegisters = 208;

// What a block begins with: barriers, and the tables of the experts.
template <class Block, class Shape>
__device__ __forceinline__ ExpertTables prefill_begin(const MoePrefillArgs& args, const typename Block::Shared& shared) {
  if (threadIdx.x == 0) {
    prefetch_map(&args.map);
    prefetch_map(&args.tokens);
    Block::init(shared);
  }
  let_next_begin();
  // Nobody arrives at another block's barriers before they are made.
  if constexpr (Shape::kCluster > 1) cluster_barrier();
  const ExpertTables tables = shared.tables(args.experts);
  build_tables<Shape::kMaxTokens, Shape::kThreads>(args, tables);
  return tables;
}

// A block's shared memory is there for as long as others write it.
template <class Shape>
__device__ __forceinline__ void prefill_end() {
  if constexpr (Shape::kCluster > 1) {
    __syncwarp();
    cluster_barrier();
  }
}

template <class Shared>
__device__ __forceinline__ Shared prefill_shared() {
  extern __shared__ __align__(128) char dynamic[];
  const unsigned start = shared_address(dynamic);
  const unsigned base = (start + 1023) & ~1023u;
  return Shared{base, dynamic + (base - start)};
}

// One product.
template <class Element, class Shape, bool kGateUp>
__device__ __forceinline__ void prefill_block(const MoePrefillArgs& args) {
  constexpr PrefillForm kForm = PrefillForm::kOne;
  using Block = PrefillBlock<Shape, kGateUp, kForm>;
  const auto shared = prefill_shared<typename Block::Shared>();
  const ExpertTables tables = prefill_begin<Block, Shape>(args, shared);
  const int group = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (group == Shape::kGroups) {
    give_registers<kBringRegisters>();
    const int thread = threadIdx.x % 128;
    PrefillBring<Shape, kGateUp, kForm> bring{args, shared, thread, static_cast<int>(blockIdx.x) % Shape::kCluster, {}, {}};
    if (__shfl_sync(kFullWarp, thread, 0) < Shape::kBring) {
      bring.run(tables, [] {});
      bring.end();
    } else {
      bring.run_weights(tables);
    }
  } else {
    take_registers<kMultiplyRegisters>();
    PrefillMultiply<Element, Shape, kGateUp, kForm>{args, shared, group, {}, {}, -1}.run();
  }
  prefill_end<Shape>();
}

// Both.
template <class Element, class Shape, PrefillForm kForm>
__device__ __forceinline__ void prefill_both(const MoePrefillBothArgs& args) {
  using GateUp = PrefillBlock<Shape, true, kForm>;
  using Down = PrefillBlock<Shape, false, kForm>;
  constexpr bool kDeltas = GateUp::kDeltas;
  const auto shared = prefill_shared<typename GateUp::Shared>();
  const typename Down::Shared down_shared{shared.base, shared.bytes};
  const ExpertTables tables = prefill_begin<GateUp, Shape>(args.gate_up, shared);
  const int group = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (group == Shape::kGroups) {
    if constexpr (kDeltas) give_registers<kBringRegisters>();
    const int thread = threadIdx.x % 128, rank = static_cast<int>(blockIdx.x) % Shape::kCluster;
    PrefillBring<Shape, true, kForm> first{args.gate_up, shared, thread, rank, {}, {}};
    PrefillBring<Shape, false, kForm> second{args.down, down_shared, thread, rank, {}, {}};
    if (__shfl_sync(kFullWarp, thread, 0) < Shape::kBring) {
      if constexpr (kDeltas) {
        // Down's second index of pairs is not in use yet: not even where a block has no work of gate_up and other warps
        // are at down's first work, which none leaves before the warp that lists has come to it.
        if (first.lists()) list_cuts<Shape>(args.down, tables, shared.index(1), shared.cuts(), shared.cut_works());
      }
      first.run(tables, [] {});
      if constexpr (kDeltas) {
        if (first.counts()) first.count_rest(tables);
        first.let_shrink();
      }
      second.follow(first);
      second.run(tables, [&] {
        if constexpr (!kDeltas) first.count_rest(tables);
      });
      second.end();
      if (second.leads() || second.counts()) Ready{args.down.ready, args.down.experts}.template leave<kDeltas>(2);
    } else {
      first.run_weights(tables);
      second.follow(first);
      second.run_weights(tables);
    }
  } else {
    if constexpr (kDeltas) take_registers<kMultiplyRegisters>();
    PrefillMultiply<Element, Shape, true, kForm> first{args.gate_up, shared, group, {}, {}, -1};
    PrefillMultiply<Element, Shape, false, kForm> second{args.down, down_shared, group, {}, {}, -1};
    first.run();
    if constexpr (kDeltas) {
      shrink_act<Element, Shape>(args.down, tables, shared.cuts(), shared.cut_works(), shared.bytes + Shape::kTokens);
      first.release_tokens(first.tokens.stage);
      first.tokens.step();
    }
    second.follow(first);
    second.run();
  }
  prefill_end<Shape>();
}

#endif

// The shapes that were fastest on an H200: for many tokens an expert, where what passes from the cache to
// multiprocessors is the limit; and for some and for few, where what comes from memory is, and much of it has
// to be under way. A row without an adapter has the same bits in all.
using PrefillMany = PrefillShape<2, 1, 2, 256, 5, 4>;
static_assert(PrefillMany::kTables == 225456, "the host asks for as much shared memory");
using PrefillSome = PrefillShape<2, 1, 2, 128, 7, 6>;
static_assert(PrefillSome::kTables == 218464, "the host asks for as much shared memory");
using PrefillFew = PrefillShape<2, 1, 1, 64, 9, 8>;
static_assert(PrefillFew::kTables == 217104, "the host asks for as much shared memory");

template <class Config, class Shape, bool kGateUp, int kThreads>
__device__ __forceinline__ void prefill(const MoePrefillArgs& args) {
  static_assert(kThreads == Shape::kThreads, "threads");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  prefill_block<typename Config::Element, Shape, kGateUp>(args);
#else
  __trap();  // there are no such products here: nothing launches it
#endif
}

template <class Config, int kThreads>
__device__ __forceinline__ void moe_prefill_gate_up(const MoePrefillArgs& args) {
  prefill<Config, PrefillMany, true, kThreads>(args);
}
template <class Config, int kThreads>
__device__ __forceinline__ void moe_prefill_down(const MoePrefillArgs& args) {
  prefill<Config, PrefillMany, false, kThreads>(args);
}
template <class Config, int kThreads>
__device__ __forceinline__ void moe_prefill_some_gate_up(const MoePrefillArgs& args) {
  prefill<Config, PrefillSome, true, kThreads>(args);
}
template <class Config, int kThreads>
__device__ __forceinline__ void moe_prefill_some_down(const MoePrefillArgs& args) {
  prefill<Config, PrefillSome, false, kThreads>(args);
}
template <class Config, int kThreads>
__device__ __forceinline__ void moe_prefill_few_gate_up(const MoePrefillArgs& args) {
  prefill<Config, PrefillFew, true, kThreads>(args);
}
template <class Config, int kThreads>
__device__ __forceinline__ void moe_prefill_few_down(const MoePrefillArgs& args) {
  prefill<Config, PrefillFew, false, kThreads>(args);
}

template <class Config, class Shape, PrefillForm kForm, int kThreads>
__device__ __forceinline__ void prefill_of_both(const MoePrefillBothArgs& args) {
  static_assert(kThreads == Shape::kThreads, "threads");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  prefill_both<typename Config::Element, Shape, kForm>(args);
#else
  __trap();  // as above
#endif
}

template <class Config, int kThreads>
__device__ __forceinline__ void moe_prefill(const MoePrefillBothArgs& args) {
  prefill_of_both<Config, PrefillMany, PrefillForm::kBoth, kThreads>(args);
}
template <class Config, int kThreads>
__device__ __forceinline__ void moe_prefill_some(const MoePrefillBothArgs& args) {
  prefill_of_both<Config, PrefillSome, PrefillForm::kBoth, kThreads>(args);
}
template <class Config, int kThreads>
__device__ __forceinline__ void moe_prefill_few(const MoePrefillBothArgs& args) {
  prefill_of_both<Config, PrefillFew, PrefillForm::kBoth, kThreads>(args);
}

// The same with adapters.
template <class Config, int kThreads>
__device__ __forceinline__ void moe_prefill_lora(const MoePrefillBothArgs& args) {
  prefill_of_both<Config, PrefillMany, PrefillForm::kBothDeltas, kThreads>(args);
}
template <class Config, int kThreads>
__device__ __forceinline__ void moe_prefill_some_lora(const MoePrefillBothArgs& args) {
  prefill_of_both<Config, PrefillSome, PrefillForm::kBothDeltas, kThreads>(args);
}

}  // namespace amphora
