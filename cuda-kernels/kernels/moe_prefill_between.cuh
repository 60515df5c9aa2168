// Down's shrink in a launch that makes both products: each block takes cuts in turn and makes them between its last
// work of gate_up and its first of down, where its ring of tokens is free. Meanwhile weights of down are on their way.
//
// A cut waits for gate_up's units of its expert, from whatever block, and for nothing of down; so all come to an end.
// Then nobody reads the expert's shrunk rows of gate_up any more, whose place those of down take.
#pragma once

#include "kernels/moe_prefill_block.cuh"
#include "kernels/moe_prefill_ready.cuh"
#include "kernels/moe_prefill_shrink.cuh"

namespace amphora {

// Named barriers, behind those of the threads that bring and of the groups that store: the cuts are listed; and those
// that shrink are together.
constexpr int kListed = 6, kShrinking = 7;
constexpr int kShrinkThreads = ShrinkAlone::kWarps * kWarp;

__device__ __forceinline__ MoePrefillShrinkArgs shrink_of_act(const MoePrefillArgs& down) {
  MoePrefillShrinkArgs args{};
  args.x = down.x;
  args.lora_tiles = down.lora_tiles;
  args.arena = down.arena;
  args.rows = down.rows;
  args.shrunk = const_cast<void*>(down.shrunk);  // which gate_up has read
  args.x_pitch = down.x_pitch;
  args.lora_tile_count = down.lora_tile_count;
  args.table_rows = down.table_rows;
  args.tables[0] = down.tables[0];
  args.tables[1] = down.tables[1];
  args.k = down.inner;
  return args;
}

// Lists the block's tiles: of those in which a cut begins, every gridDim.x-th; and finds the first ones' works. For a
// warp, which has time.
template <class Shape>
__device__ __forceinline__ void list_cuts(const MoePrefillArgs& args, int* cuts, char* works) {
  constexpr int kAtOnce = 4;
  const int lane = threadIdx.x % kWarp, block = blockIdx.x, blocks = gridDim.x;
  int expert = -1, slot = -1, group = 0;  // of the tile in front, and where its group begins
  int found = 0;
  for (int start = 0; start < args.lora_tile_count; start += kAtOnce * kWarp) {
    Tile tiles[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = start + i * kWarp + lane;
      tiles[i] = at < args.lora_tile_count ? tile_at(args.lora_tiles, 4, at) : Tile{-1, -1, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const Tile& tile = tiles[i];
      const int expert_before = __shfl_up_sync(kFullWarp, tile.expert, 1);
      const int slot_before = __shfl_up_sync(kFullWarp, tile.slot, 1);
      const bool head = tile.expert != (lane == 0 ? expert : expert_before) ||
                        tile.slot != (lane == 0 ? slot : slot_before);
      const unsigned heads = __ballot_sync(kFullWarp, head) & (0xffffffffu >> (kWarp - 1 - lane));
      const int first = __shfl_sync(kFullWarp, tile.first, heads == 0 ? 0 : kWarp - 1 - __clz(heads));
      const int begin = heads == 0 ? group : first, offset = tile.first - begin;
      const int cut = (offset + kShrinkRows - 1) / kShrinkRows * kShrinkRows;
      const bool begins = tile.rows > 0 && cut < offset + tile.rows;
      const unsigned all = __ballot_sync(kFullWarp, begins);
      const int index = found + __popc(all & ((1u << lane) - 1));
      // The host sees to it that there are no more.
      if (begins && index % blocks == block && index / blocks < Shape::kMostCuts) {
        cuts[1 + index / blocks] = start + i * kWarp + lane;
      }
      found += __popc(all);
      expert = __shfl_sync(kFullWarp, tile.expert, kWarp - 1);
      slot = __shfl_sync(kFullWarp, tile.slot, kWarp - 1);
      group = __shfl_sync(kFullWarp, begin, kWarp - 1);
    }
    if (__shfl_sync(kFullWarp, tiles[kAtOnce - 1].rows, kWarp - 1) == 0) break;  // the others are surplus
  }
  const int count = found > block ? (found - 1 - block) / blocks + 1 : 0;
  if (lane == 0) cuts[0] = count;
  __syncwarp();
  static_assert(sizeof(ShrinkWork) <= 80, "places of works");
  const MoePrefillShrinkArgs shrink = shrink_of_act(args);
  for (int i = 0; i < min(count, Shape::kCutWorks); ++i) {
    const ShrinkWork work = shrink_work(shrink, cuts[1 + i]);
    if (lane == 0) *reinterpret_cast<ShrinkWork*>(works + i * 80) = work;
  }
  __syncwarp();
  named_barrier_arrive(kListed, kWarp + kShrinkThreads);
}

// Makes them, for the threads that multiply.
template <class Element, class Shape>
__device__ __forceinline__ void shrink_act(const MoePrefillArgs& down, const ExpertTables& tables, const int* cuts,
                                           const char* works, char* ring) {
  using Shrink = ShrinkShape<4>;
  static_assert(Shrink::kBytes <= Shape::kTokenStages * Shape::kTokenBytes, "shrinks are made in the ring of tokens");
  static_assert(kShrinkThreads == 128 * Shape::kGroups, "threads");
  const auto together = [] { named_barrier(kShrinking, kShrinkThreads); };
  const MoePrefillShrinkArgs args = shrink_of_act(down);
  const Ready ready{down.ready, down.experts};
  named_barrier(kListed, kWarp + kShrinkThreads);
  const int count = cuts[0];
  for (int i = 0; i < count; ++i) {
    ShrinkWork work;
    if (i < Shape::kCutWorks) {
      work = *reinterpret_cast<const ShrinkWork*>(works + i * 80);
    } else {
      work = shrink_work(args, cuts[1 + i]);
    }
    if (work.cuts == 0) continue;  // the slot has nothing there
    const int expert = work.tile.expert;
    const unsigned tiles = cut_of<Shape::kMaxTokens>(tables.position[expert + 1] - tables.position[expert]).tiles;
    if (threadIdx.x == 0) {
      while (load_acquire(ready.of(expert)) < prefill_units<true>(down) * tiles) {
      }
    }
    together();
    shrink_tile<Element, Shrink, false>(args, work, ring, together);
  }
  __threadfence();
  async_proxy_fence();  // tokens come here next
  together();
  if (threadIdx.x == 0) add_release(ready.shrunk(), 1);
}

}  // namespace amphora
