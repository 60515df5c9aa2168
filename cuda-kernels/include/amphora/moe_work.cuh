// What a block of a weight stream does, found by every block for itself from the lists of moe_route.
//
// The stream is all weight tiles of the active experts in order, kTileRows rows each. A block takes a
// contiguous run of them, so that its tokens change rarely, and in front of it some tiles of adapters'
// A, whose products other blocks wait for. An expert with more tokens than a pass takes has its tiles
// multiplied again for each further pass, as many tiles at a time as rings hold, so that none is read twice (but for
// an expert's last tiles, where streams are several);
// every other time the passes go backwards and begin with the tokens that the last ended with. Runs are
// balanced by the number of passes over tiles: a further one waits for its tokens instead of a tile. Where a
// warp can be spared, the last part of the stream is in no run: see moe_rest.cuh.
//
// This runs in front of everything else, so it is short: three barriers where no expert needs a second
// pass, no wide divisions, little code.
#pragma once

#include "amphora/args.h"
#include "amphora/reduce.cuh"
#include "kernels/lora_expand.cuh"

namespace amphora {

constexpr int kTileRows = 16;      // weight rows of a tile, those of the mma; most tokens of a LoRA tile
constexpr int kMaxActive = 256;    // experts with tokens
constexpr int kMaxPairs = 512;     // (token, j) pairs, so LoRA tiles too
constexpr int kMaxOwnTiles = 192;  // tiles of A of one block
constexpr int kMaxItems = 384;     // items of one block
constexpr int kNoTile = -0x7fffffff - 1;   // as an expert and a tile in one word
constexpr int kRestPart = 5;       // a fifth of the stream is left

// A tile of A that this block multiplies.
struct ShrinkTile {
  unsigned a;          // first row, in units of kArenaUnit
  short rank;          // the rank that its first row is
  unsigned char rows;  // 8 or 16
  unsigned char slice;
  float scale;
};

// One tile for one pass.
struct WorkItem {
  short expert;  // -1: a tile of A
  short tile;    // of the expert; or of `own`
  short first;   // position of the first token
  short count;   // tokens
};

struct WorkLists {
  WorkItem item[kMaxItems];
  ShrinkTile own[kMaxOwnTiles];
  unsigned scan[2][32];
  int run[2][2];                // first and last end of this block's run: active expert, tile
  short expert[kMaxActive];
  short first[kMaxActive + 1];  // position of the first token of an active expert
  short pair[kMaxPairs];        // by position
  short job_slot[kMaxPairs];    // LoRA tiles: slot, first position, tokens
  short job_first[kMaxPairs];
  short job_rows[kMaxPairs];
};

// The same in every thread.
struct Work {
  int items;
  int jobs;          // LoRA tiles
  unsigned shrinks;  // tiles of A of all blocks
  int active;        // experts with tokens
  int shared_out;    // passes over weight tiles that belong to blocks, the first of the stream
};

// The sum of the values of the threads in front; `total` gets that of all. One barrier.
template <int kThreads>
__device__ __forceinline__ unsigned block_sum_in_front(unsigned value, unsigned* scratch,
                                                       unsigned* total) {
  constexpr int kWarps = kThreads / kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const unsigned inclusive = warp_inclusive_sum(value, lane);
  if (lane == kWarp - 1) scratch[warp] = inclusive;
  __syncthreads();
  const unsigned of_warp = lane < kWarps ? scratch[lane] : 0;
  *total = __reduce_add_sync(kFullWarp, of_warp);
  return __reduce_add_sync(kFullWarp, lane < warp ? of_warp : 0) + inclusive - value;
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
// `kRest`: a part of the stream is left.
// `kChunkTiles`: tiles that rings hold, of which passes are made one after the other.
template <int kThreads, int kWidth, int kSlices, bool kLora, int kPassRows, bool kRest, int kChunkTiles>
__device__ __forceinline__ Work plan_work(WorkLists& lists, const MoeStreamArgs& args) {
  static_assert(kTileRows * kWidth * 2 % kArenaUnit == 0, "a tile of A begins on a unit");
  const int tid = threadIdx.x, blocks = gridDim.x, block = blockIdx.x;
  const int4* tiles = reinterpret_cast<const int4*>(args.tiles);
  const int4 none = make_int4(0, -1, 0, 0);
  const int4 tile = tid < args.tile_count ? __ldcg(tiles + tid) : none;
  const int front = tid > 0 && tid < args.tile_count ? __ldcg(args.tiles + 4 * (tid - 1)) : -1;
  const int behind = tid + 1 < args.tile_count ? __ldcg(args.tiles + 4 * (tid + 1) + 3) : 0;
  // All on the way before the first is used.
  const int4* jobs = reinterpret_cast<const int4*>(args.lora_tiles);
  int4 job = kLora && tid < args.lora_tile_count ? __ldcg(jobs + tid) : none;
  for (int i = tid; i < args.pairs; i += kThreads) {
    lists.pair[i] = static_cast<short>(__ldcg(args.perm + i));
  }
  const bool starts = tile.w > 0 && front != tile.x;
  const bool further = tile.w > kPassRows || (tile.w > 0 && !starts);  // an expert needs a second pass

  // LoRA tiles, as many at a time as there are threads; the first time experts are counted with them.
  Work work{0, 0, 0, 0, 0};
  int active = 0, all_tiles = 0, own_tiles = 0;
#pragma unroll 1
  for (int round = 0; round == 0 || (kLora && round * kThreads < args.lora_tile_count); ++round) {
    const int i = round * kThreads + tid;
    int counts[kSlices];
    LoraRow rows[kSlices];
    if (kLora) {
      if (round > 0) job = i < args.lora_tile_count ? __ldcg(jobs + i) : none;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        rows[slice] = LoraRow{0, 0, 0, 0.f};
        if (job.w > 0) rows[slice] = lora_row(args.lora, job.y, slice, job.x);
      }
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const bool shared = slice > 0 && same_factor(rows[0], rows[slice]);
        counts[slice] = shared ? 0 : shrink_tiles(rows[slice].rank);
      }
    }
    unsigned value = round == 0 && starts;  // 9 bits of experts, 14 of tiles of A, above them LoRA tiles
    if (kLora) {
      value += static_cast<unsigned>(counts[0] + (kSlices > 1 ? counts[kSlices - 1] : 0)) << 9;
      value += job.w > 0 ? 1u << 23 : 0u;
    }
    unsigned total;
    const unsigned before = block_sum_in_front<kThreads>(value, lists.scan[round % 2], &total);
    if (round == 0) {
      active = total & 0x1ff;
      if (starts) {
        lists.expert[before & 0x1ff] = static_cast<short>(tile.x);
        lists.first[before & 0x1ff] = static_cast<short>(tile.z);
      }
      if (tile.w > 0 && behind == 0) lists.first[active] = static_cast<short>(tile.z + tile.w);
    }
    if (kLora) {
      if (job.w > 0 && i < kMaxPairs) {
        lists.job_slot[i] = static_cast<short>(job.y);
        lists.job_first[i] = static_cast<short>(job.z);
        lists.job_rows[i] = static_cast<short>(job.w);
      }
      // Tiles of A go to the blocks in twos, which share their tokens.
      int number = all_tiles + static_cast<int>(before >> 9 & 0x3fff);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll 1
        for (int t = 0; t < counts[slice]; ++t, ++number) {
          // Of less than 2^14: the error of the quotient is less than half of what one more would add.
          const int turn = number / 2;
          const int turns = static_cast<int>(__fdividef(turn + 0.5f, static_cast<float>(blocks)));
          if (turn - turns * blocks != block) continue;
          const int at = turns * 2 + number % 2, rank = t * kTileRows;
          const int left = static_cast<int>(rows[slice].rank) - rank;
          lists.own[at] = ShrinkTile{
              rows[slice].a + static_cast<unsigned>(t * (kTileRows * kWidth * 2 / kArenaUnit)),
              static_cast<short>(rank), static_cast<unsigned char>(min(kTileRows, left)),
              static_cast<unsigned char>(slice), rows[slice].scale};
          lists.item[at] = WorkItem{-1, static_cast<short>(at), static_cast<short>(job.z),
                                    static_cast<short>(job.w)};
        }
      }
      all_tiles += static_cast<int>(total >> 9 & 0x3fff);
      work.jobs += static_cast<int>(total >> 23);
    }
  }
  work.shrinks = static_cast<unsigned>(all_tiles);
  const int rounds = all_tiles / (2 * blocks), over = all_tiles % (2 * blocks);
  const auto owned_before = [&](int b) { return 2 * b * rounds + min(over, 2 * b); };
  own_tiles = kLora ? owned_before(block + 1) - owned_before(block) : 0;

  // Where blocks begin, in costs. With little to do, tiles of A are left out of the balance, in which a
  // block could otherwise begin behind the next.
  const int of_expert = args.n / kTileRows;
  // Eight rows are a pass of calls with at most eight tokens.
  constexpr bool kFurther = kPassRows > 8;
  const bool passes = __syncthreads_or(kFurther && further) && kFurther;
  int own_cost = of_expert;
  unsigned cost_before = tid * own_cost, base = active * own_cost;
  if (kFurther && passes) {
    own_cost = 0;
    if (tid < active) {
      const int tokens = lists.first[tid + 1] - lists.first[tid];
      own_cost = (tokens + kPassRows - 1) / kPassRows * of_expert;
    }
    cost_before = block_sum_in_front<kThreads>(own_cost, lists.scan[0], &base);
  }
  const int all_cost = static_cast<int>(base), shared_out = kRest ? all_cost - all_cost / kRestPart : all_cost;
  const int shrink_cost = kLora && shared_out >= 2 * blocks ? 1 : 0;
  const int whole = shared_out + all_tiles * shrink_cost, share = whole / blocks, odd = whole - share * blocks;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int at = share * (block + side) + min(odd, block + side) - owned_before(block + side) * shrink_cost;
    if (tid == 0 && at >= all_cost) {
      lists.run[side][0] = active;
      lists.run[side][1] = 0;
    }
    const int in_expert = at - static_cast<int>(cost_before);
    if (tid < active && in_expert >= 0 && in_expert < own_cost) {
      const int cost = own_cost / of_expert, begin = (in_expert + cost - 1) / cost;
      lists.run[side][0] = begin == of_expert ? tid + 1 : tid;
      lists.run[side][1] = begin == of_expert ? 0 : begin;
    }
  }
  __syncthreads();
  const int first_expert = lists.run[0][0], last_expert = lists.run[1][0];
  int begun = own_tiles;  // items in front of the expert at hand
#pragma unroll 1
  for (int e = first_expert; e <= last_expert && e < active; ++e) {
    const int from = e == first_expert ? lists.run[0][1] : 0;
    const int to = e == last_expert ? lists.run[1][1] : of_expert;
    const int first = lists.first[e], tokens = lists.first[e + 1] - first;
    const int count = kFurther ? (tokens + kPassRows - 1) / kPassRows : 1;
#pragma unroll 1
    for (int i = tid; i < (to - from) * count; i += kThreads) {
      int at = i, pass = 0;
      if (kFurther && count > 1) {
        const int chunk = i / (kChunkTiles * count) * kChunkTiles, within = i - chunk * count;
        const int size = min(kChunkTiles, to - from - chunk);
        pass = within / size;
        at = chunk + within - pass * size;
        if (chunk / kChunkTiles % 2 != 0) pass = count - 1 - pass;
      }
      const int rows = min(kPassRows, tokens - pass * kPassRows);
      if (begun + i < kMaxItems) {
        lists.item[begun + i] =
            WorkItem{lists.expert[e], static_cast<short>(from + at),
                     static_cast<short>(first + pass * kPassRows), static_cast<short>(rows)};
      }
    }
    begun += (to - from) * count;
  }
  work.items = begun;
  work.active = active;
  work.shared_out = shared_out;
  __syncthreads();
  return work;
}

}  // namespace amphora
