// A block of the warpgroup form of attention: its shape, its rows, and the ring through which keys and values
// come.
#pragma once

#include "amphora/args.h"
#include "amphora/async.cuh"
#include "amphora/attention.cuh"
#include "amphora/group_attention.cuh"

namespace amphora {

template <int kDim_, int kGroups_, int kStages_, int kBlocks_, int kBringRegisters_, int kGroupRegisters_>
struct AttentionShape {
  static constexpr int kDim = kDim_;        // elements of a head
  static constexpr int kGroups = kGroups_;  // warpgroups that multiply
  static constexpr int kStages = kStages_;  // tiles of keys and values on their way
  static constexpr int kBlocks = kBlocks_;  // of a processor
  static constexpr int kBringRegisters = kBringRegisters_;  // of a thread that copies
  static constexpr int kGroupRegisters = kGroupRegisters_;  // of one that multiplies
  static constexpr int kTile = 64;          // positions of a tile
  static constexpr int kBring = 128;        // threads that copy
  static constexpr int kThreads = 128 * kGroups + kBring;
  static constexpr int kPairs = kGroupRows * kGroups;
  // Shared memory, from a multiple of 1024 on: keys and values of each stage, then the queries. Elements from
  // 64 on lie behind the first 64 of all rows.
  static constexpr int kTileBytes = kTile * kDim * 2;
  static constexpr int kQueries = 2 * kStages * kTileBytes;
  static constexpr int kBytes = kQueries + kPairs * kDim * 2;
  static_assert(kDim == 64 || kDim == 128, "whole rows of 128 bytes");
  static_assert(kPairs <= 256, "a pair's row is found by a product");
};

// The rows of a block. They lie in shared memory, so that no thread keeps them while it multiplies.
struct AttentionRows {
  int kv_head, first_head, heads;  // query heads of the block
  int share;                       // 1 / heads in 65536ths, rounded up
  int row, rows, position;         // its first row, its rows (0: none), and the position of the first
  const int* blocks;
  int first_seen, end_seen;        // of all its rows

  // Which of the rows a pair is of; `pair` is below 256, so that `share` is near enough.
  __device__ __forceinline__ int row_of(int pair) const { return pair * share >> 16; }

  // For one whole warp.
  template <int kPairs>
  __device__ __forceinline__ void find(const AttentionArgs& args) {
    const int group = args.heads / args.kv_heads, parts = (group + kPairs - 1) / kPairs;
    const int across = args.kv_heads * parts, head = blockIdx.x % across, wanted = blockIdx.x / across;
    const int front = head / parts * group + head % parts * kPairs;
    const int of_block = min(kPairs, (head / parts + 1) * group - front);
    const int rows_of_tile = kPairs / of_block, lane = threadIdx.x % kWarp;
    if (lane == 0) rows = 0;
    __syncwarp();
    int in_front = 0;
    for (int first = 0; first < args.sequences; first += kWarp) {
      const int sequence = first + lane;
      const bool there = sequence < args.sequences;
      const int start = there ? args.q_start[sequence] : 0;
      const int of = there ? args.q_start[sequence + 1] - start : 0;
      const int context = there ? args.context[sequence] : 0;
      const int tiles = (of + rows_of_tile - 1) / rows_of_tile;
      const int end = in_front + warp_inclusive_sum(tiles, lane);  // of the sequence's tiles
      if (wanted >= end - tiles && wanted < end) {
        const int skip = (end - 1 - wanted) * rows_of_tile;
        kv_head = head / parts;
        first_head = front;
        heads = of_block;
        share = (65535 + of_block) / of_block;
        row = start + skip;
        rows = min(rows_of_tile, of - skip);
        position = context - of + skip;
        blocks = args.block_table + static_cast<long long>(sequence) * args.table_width;
        first_seen = first_position_seen(args, position);
        end_seen = position + rows;
      }
      in_front = __shfl_sync(kFullWarp, end, kWarp - 1);
      if (wanted < in_front) return;
    }
  }
};

// Where in the ring a warp is.
template <class Shape>
struct AttentionTurn {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void step() {
    if (++stage == Shape::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The ring: each stage has the keys of a tile and its values, which come and go by themselves.
template <class Shape>
struct AttentionRing {
  unsigned base;
  Barrier* barriers;  // full keys, full values, empty keys, empty values: [4, kStages]

  __device__ __forceinline__ Barrier* full_keys(int stage) const { return barriers + stage; }
  __device__ __forceinline__ Barrier* full_values(int stage) const { return barriers + Shape::kStages + stage; }
  __device__ __forceinline__ Barrier* empty_keys(int stage) const { return barriers + 2 * Shape::kStages + stage; }
  __device__ __forceinline__ Barrier* empty_values(int stage) const { return barriers + 3 * Shape::kStages + stage; }
  __device__ __forceinline__ unsigned keys(int stage) const { return base + stage * (2 * Shape::kTileBytes); }
  __device__ __forceinline__ unsigned values(int stage) const { return keys(stage) + Shape::kTileBytes; }
  __device__ __forceinline__ unsigned queries(int group) const {
    return base + Shape::kQueries + group * (kGroupRows * Shape::kDim * 2);
  }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < 2 * Shape::kStages; ++i) {
      barrier_init(barriers + i, Shape::kBring);
      barrier_init(barriers + 2 * Shape::kStages + i, 4 * Shape::kGroups);  // warps
    }
    barrier_init_done();
  }
  // A warp of those that multiply has done with keys or values.
  static __device__ __forceinline__ void release(Barrier* empty) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) barrier_arrive(empty);
  }
};

}  // namespace amphora
