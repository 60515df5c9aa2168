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

// Calls `visit` for tiles, a lane of the warp with each, in their order: with the tile, its number, and whether a cut
// begins in it.
template <class Visit>
__device__ __forceinline__ void for_cuts(const MoePrefillArgs& args, Visit visit) {
  constexpr int kAtOnce = 4;
  const int lane = threadIdx.x % kWarp;
  int expert = -1, slot = -1, group = 0;  // of the tile in front, and where its group begins
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
      visit(tile, start + i * kWarp + lane, tile.rows > 0 && cut < offset + tile.rows);
      expert = __shfl_sync(kFullWarp, tile.expert, kWarp - 1);
      slot = __shfl_sync(kFullWarp, tile.slot, kWarp - 1);
      group = __shfl_sync(kFullWarp, begin, kWarp - 1);
    }
    if (__shfl_sync(kFullWarp, tiles[kAtOnce - 1].rows, kWarp - 1) == 0) break;  // the others are surplus
  }
}

// Lists the block's share of the tiles in which a cut begins, and finds the works of the first to be made. For a warp,
// which has time. `places`: room for a number of each expert, of which the host sees to it that there is enough.
//
// Cuts are dealt in turns, in the order in which gate_up makes experts, from the end: so the last, for which is waited
// longest, go to blocks that have most to do in gate_up, and those of the turns behind go to the others first. A block
// makes its own in that order.
template <class Shape>
__device__ __forceinline__ void list_cuts(const MoePrefillArgs& args, const ExpertTables& tables, int* places,
                                          int* cuts, char* works) {
  const int lane = threadIdx.x % kWarp, block = blockIdx.x, blocks = gridDim.x;
  for (int e = lane; e < tables.experts; e += kWarp) places[e] = 0;
  __syncwarp();
  for_cuts(args, [&](const Tile& tile, int, bool begins) {
    if (begins) atomicAdd(places + tile.expert, 1);
  });
  __syncwarp();
  // Numbers of cuts become those in front.
  const Ready ready{args.ready, args.experts};
  int all = 0;
  for (int start = 0; start < tables.experts; start += kWarp) {
    const int i = start + lane, e = i < tables.experts ? tables.order[i] : 0;
    const int own = i < tables.experts ? places[e] : 0;
    const int sum = warp_inclusive_sum(own, lane);
    if (i < tables.experts) {
      places[e] = all + sum - own;
      if (block == 0) atomicAdd(ready.shrunk(e), Ready::kAllShrunk - own);
    }
    all += __shfl_sync(kFullWarp, sum, kWarp - 1);
  }
  __syncwarp();
  constexpr int kMost = Shape::kWorkUnits;
  const int works_of_all = Walk<Shape::kMaxTokens>::count(tables, prefill_units<true>(args), kMost);
  const int late = works_of_all % (blocks / Shape::kCluster) * Shape::kCluster;  // those in front have most
  int count = 0;
  for_cuts(args, [&](const Tile& tile, int number, bool begins) {
    const unsigned like = __match_any_sync(kFullWarp, begins ? tile.expert : -1);
    bool mine = false;
    int turn = 0;
    if (begins) {
      const int in_front = places[tile.expert] + __popc(like & ((1u << lane) - 1));
      const int behind = all - 1 - in_front;
      turn = behind / blocks;
      mine = (behind + (turn == 0 ? 0 : late)) % blocks == block;
    }
    __syncwarp();
    if (begins && lane == __ffs(like) - 1) places[tile.expert] += __popc(like);
    __syncwarp();
    // The host sees to it that there are no more.
    if (mine && turn < Shape::kMostCuts) cuts[1 + turn] = number;
    count += __popc(__ballot_sync(kFullWarp, mine));
  });
  count = min(count, Shape::kMostCuts);
  if (lane == 0) cuts[0] = count;
  __syncwarp();
  static_assert(sizeof(ShrinkWork) <= 80, "places of works");
  const MoePrefillShrinkArgs shrink = shrink_of_act(args);
  for (int i = 0; i < min(count, Shape::kCutWorks); ++i) {
    const ShrinkWork work = shrink_work(shrink, cuts[count - i]);
    if (lane == 0) *reinterpret_cast<ShrinkWork*>(works + i * 80) = work;
  }
  __syncwarp();
  named_barrier_arrive(kListed, kWarp + kShrinkThreads);
}

// Makes them, for the threads that multiply.
template <class Element, class Shape>
__device__ __forceinline__ void shrink_act(const MoePrefillArgs& down, const ExpertTables& tables, const int* cuts,
                                           const char* works, char* ring) {
  // In the ring of tokens, with as many stages as it has room for.
  constexpr int kStage = ShrinkAlone::kWarps * ShrinkAlone::kStageBytes;
  using Shrink = ShrinkShape<Shape::kTokenStages * Shape::kTokenBytes / kStage>;
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
      work = shrink_work(args, cuts[count - i]);
    }
    const int expert = work.tile.expert;
    if (work.cuts > 0) {  // else the slot has nothing there
      const unsigned tiles = cut_of<Shape::kMaxTokens>(tables.position[expert + 1] - tables.position[expert]).tiles;
      if (threadIdx.x == 0) {
        while (load_acquire(ready.of(expert)) < prefill_units<true>(down) * tiles) {
        }
      }
      together();
      shrink_tile<Element, Shrink, false>(args, work, ring, together);
    }
    // All have stored their numbers: they have come together since.
    if (threadIdx.x == 0) add_release(ready.shrunk(expert), 1);
  }
  async_proxy_fence();  // tokens come here next
  together();
}

}  // namespace amphora
