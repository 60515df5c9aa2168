// What a block of a weight stream does, found by every block for itself from the lists of moe_route.
//
// The stream is all weight tiles of the active experts in order, kTileRows rows each. A block takes a
// contiguous run of them, so that its tokens change rarely, and in front of it some tiles of adapters'
// A, whose products other blocks wait for. Runs are balanced by cost: a tile whose expert has more
// tokens than one pass takes costs half as much again for each further pass.
#pragma once

#include "amphora/args.h"
#include "amphora/reduce.cuh"
#include "kernels/lora_expand.cuh"

namespace amphora {

constexpr int kTileRows = 16;     // weight rows of a tile: those of the mma
constexpr int kMaxActive = 256;   // experts with tokens
constexpr int kMaxPairs = 512;    // (token, j) pairs, so LoRA tiles too
constexpr int kMaxOwnTiles = 192; // tiles of A of one block
constexpr int kPassCost = 2;      // of a further pass; the first costs twice that, streaming included

// A tile of A that this block multiplies.
struct ShrinkTile {
  unsigned a;           // first row, in units of kArenaUnit
  short rows;           // 8 or 16
  short slice;
  short rank;           // the rank that its first row is
  short first;          // position of its first token
  short count;          // tokens
  short reserved;
  float scale;
};

struct WorkLists {
  unsigned long long scan[32];
  ShrinkTile own[kMaxOwnTiles];
  int cost[kMaxActive + 1];     // of all tiles of the experts in front
  int run[2];                   // first tile of this block's run, and of the next block's
  short expert[kMaxActive];
  short first[kMaxActive + 1];  // position of the first token of an active expert
  short pair[kMaxPairs];        // by position
  short job_slot[kMaxPairs];    // LoRA tiles: slot, first position, tokens
  short job_first[kMaxPairs];
  short job_rows[kMaxPairs];
};

// The same in every thread.
struct Work {
  int active;       // experts
  int jobs;         // LoRA tiles
  int own;          // tiles of A of this block
  unsigned shrinks; // results of shrinks that all blocks report
  int begin;        // tiles of the run
  int end;
};

// The sum of the values of the threads in front, three counts at once; `total` gets that of all.
template <int kThreads>
__device__ __forceinline__ unsigned long long packed_exclusive_sum(unsigned long long value,
                                                                   unsigned long long* scratch,
                                                                   unsigned long long* total) {
  constexpr int kWarps = kThreads / kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  unsigned long long inclusive = value;
#pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) {
    const unsigned long long before = __shfl_up_sync(kFullWarp, inclusive, lanes);
    if (lane >= lanes) inclusive += before;
  }
  if (lane == kWarp - 1) scratch[warp] = inclusive;
  __syncthreads();
  unsigned long long front = 0, all = 0;
#pragma unroll
  for (int other = 0; other < kWarps; ++other) {
    if (other < warp) front += scratch[other];
    all += scratch[other];
  }
  *total = all;
  return front + inclusive - value;
}

// Tiles of A of one slice.
__device__ __forceinline__ int shrink_tiles(unsigned rank) {
  return (static_cast<int>(rank) + kTileRows - 1) / kTileRows;
}

// Whether two slices have one A, and so one shrunk row: a fused factor.
__device__ __forceinline__ bool same_factor(const LoraRow& a, const LoraRow& b) {
  return a.rank != 0 && a.a == b.a && a.rank == b.rank && a.scale == b.scale;
}

// `kWidth`: the width of the product's input. Every thread calls; ends in a barrier.
template <int kThreads, int kWidth, int kSlices, bool kLora, int kPassRows>
__device__ Work plan_work(WorkLists& lists, const MoeStreamArgs& args) {
  static_assert(kTileRows * kWidth * 2 % kArenaUnit == 0, "a tile of A begins on a unit");
  constexpr int kJobs = (kMaxPairs + kMaxPairs / 16 + kThreads - 1) / kThreads;  // of a thread
  const int tid = threadIdx.x;
  const int4* tiles = reinterpret_cast<const int4*>(args.tiles);
  const int4* lora_tiles = reinterpret_cast<const int4*>(args.lora_tiles);
  const int4 none = make_int4(0, -1, 0, 0);
  const int4 tile = tid < args.tile_count ? __ldcg(tiles + tid) : none;
  const int front = tid > 0 && tid < args.tile_count ? __ldcg(args.tiles + 4 * (tid - 1)) : -1;
  const int behind = tid + 1 < args.tile_count ? __ldcg(args.tiles + 4 * (tid + 1) + 3) : 0;
  int4 job[kJobs];
  if (kLora) {
#pragma unroll
    for (int k = 0; k < kJobs; ++k) {
      const int i = tid + k * kThreads;
      job[k] = i < args.lora_tile_count ? __ldcg(lora_tiles + i) : none;
    }
  }
  for (int i = tid; i < args.pairs; i += kThreads) lists.pair[i] = static_cast<short>(__ldcg(args.perm + i));

  const bool starts = tile.w > 0 && (tid == 0 || front != tile.x);
  unsigned long long counts = starts;  // 12 bits of experts, 24 of tiles of A, 24 of their results
  LoraRow row[kJobs][kSlices];
  int count[kJobs][kSlices];
  if (kLora) {
#pragma unroll
    for (int k = 0; k < kJobs; ++k)
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        row[k][slice] = LoraRow{0, 0, 0, 0.f};
        if (job[k].w > 0) row[k][slice] = lora_row(args.lora, job[k].y, slice, job[k].x);
      }
#pragma unroll
    for (int k = 0; k < kJobs; ++k) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const bool shared = slice > 0 && same_factor(row[k][0], row[k][slice]);
        count[k][slice] = shared ? 0 : shrink_tiles(row[k][slice].rank);
        const unsigned long long passes = (job[k].w + kPassRows - 1) / kPassRows;
        counts += static_cast<unsigned long long>(count[k][slice]) << 12 |
                  count[k][slice] * passes << 36;
      }
    }
  }
  unsigned long long total;
  const unsigned long long before = packed_exclusive_sum<kThreads>(counts, lists.scan, &total);
  Work work;
  work.active = static_cast<int>(total & 0xfff);
  work.shrinks = static_cast<unsigned>(total >> 36);
  work.jobs = 0;
  const int all_tiles = static_cast<int>(total >> 12 & 0xffffff);
  const int blocks = gridDim.x, block = blockIdx.x;
  if (starts) {
    lists.expert[before & 0xfff] = static_cast<short>(tile.x);
    lists.first[before & 0xfff] = static_cast<short>(tile.z);
  }
  if (tile.w > 0 && behind == 0) lists.first[work.active] = static_cast<short>(tile.z + tile.w);

  // Tiles of A go to the blocks in twos, which share their tokens.
  const int rounds = all_tiles / (2 * blocks), rest = all_tiles % (2 * blocks);
  const auto owned_before = [&](int b) { return 2 * b * rounds + min(rest, 2 * b); };
  work.own = owned_before(block + 1) - owned_before(block);
  if (kLora) {
    int number = static_cast<int>(before >> 12 & 0xffffff);
#pragma unroll
    for (int k = 0; k < kJobs; ++k) {
      const int i = tid + k * kThreads;
      const bool real = job[k].w > 0;
      if (real && i < kMaxPairs) {
        lists.job_slot[i] = static_cast<short>(job[k].y);
        lists.job_first[i] = static_cast<short>(job[k].z);
        lists.job_rows[i] = static_cast<short>(job[k].w);
      }
      work.jobs += __syncthreads_count(real);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        for (int t = 0; t < count[k][slice]; ++t, ++number) {
          const int turn = number / 2;
          if (turn % blocks != block) continue;
          const int rank = t * kTileRows;
          lists.own[turn / blocks * 2 + number % 2] = ShrinkTile{
              row[k][slice].a + static_cast<unsigned>(t * (kTileRows * kWidth * 2 / kArenaUnit)),
              static_cast<short>(min(kTileRows, static_cast<int>(row[k][slice].rank) - rank)),
              static_cast<short>(slice), static_cast<short>(rank), static_cast<short>(job[k].z),
              static_cast<short>(job[k].w), 0, row[k][slice].scale};
        }
      }
    }
  }
  __syncthreads();

  const int of_expert = args.n / kTileRows;
  const auto tile_cost = [&](int i) {
    const int passes = (lists.first[i + 1] - lists.first[i] + kPassRows - 1) / kPassRows;
    return kPassCost * (passes + 1);
  };
  const int own_cost = tid < work.active ? tile_cost(tid) * of_expert : 0;
  unsigned long long base_cost;
  const int cost_before = static_cast<int>(packed_exclusive_sum<kThreads>(
      static_cast<unsigned long long>(own_cost), lists.scan + 16, &base_cost));
  // Where block b begins. With little to do, tiles of A are left out of the balance, in which a block
  // could otherwise begin behind the next.
  const long long base = static_cast<long long>(base_cost);
  const bool balance = base >= 4 * kPassCost * static_cast<long long>(blocks);
  const auto target = [&](int b) -> int {
    const long long shrink_cost = balance ? 2 * kPassCost : 0;
    return static_cast<int>((base + all_tiles * shrink_cost) * b / blocks -
                            owned_before(b) * shrink_cost);
  };
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int at = target(block + side);
    if (tid == 0 && at >= base) lists.run[side] = work.active * of_expert;
    if (tid < work.active && at >= cost_before && at < cost_before + own_cost) {
      const int cost = own_cost / of_expert;
      lists.run[side] = tid * of_expert + (at - cost_before + cost - 1) / cost;
    }
  }
  __syncthreads();
  work.begin = lists.run[0];
  work.end = lists.run[1];
  return work;
}

}  // namespace amphora
