// The first half of the deltas of a prefill step: scale · x·Aᵀ for the rows of each (expert, slot), in
// f32, stored as moe_prefill_shrunk.cuh says. Numbers beyond the rank are zeros, up to a whole step.
//
// Grid: LoRA tiles. A block takes up to kRows rows of one group, which may be several tiles; the blocks of
// the others end at once. Gate comes first, then up, where they have not one A.
//
// 8 warps share k, 32 of it at a time in turn, each with a ring of its own; their sums are added in the
// order of the warps. So the bits depend on the row and on A alone.
#pragma once

#include "amphora/args.h"
#include "amphora/async.cuh"
#include "amphora/dtype.cuh"
#include "amphora/matrices.cuh"
#include "amphora/overlap.cuh"
#include "kernels/moe_prefill_gather.cuh"
#include "kernels/moe_prefill_plan.cuh"

namespace amphora {

constexpr int kShrinkRows = 32;  // of x

template <int kStages_>
struct ShrinkShape {
  static constexpr int kRows = kShrinkRows;
  static constexpr int kWarps = 8;
  static constexpr int kDepth = 32;    // of k in a stage
  static constexpr int kStages = kStages_;
  static constexpr int kRowBytes = kDepth * 2;
  static constexpr int kHalfStage = 32 * kRowBytes;
  static constexpr int kStageBytes = 2 * kHalfStage;  // 32 rows of A, and of x
  static constexpr int kBytes = kWarps * kStages * kStageBytes;
  static constexpr int kSumPitch = 36;                // floats; lanes of a store meet no bank twice
  static_assert(kWarps * kRows * kSumPitch * 4 <= kBytes, "the sums reuse the rings");

  // Where piece `piece` (16 bytes) of row `row` lies: two rows in 128 bytes, pieces exchanged so that
  // 8 rows of a column of pieces meet no bank twice.
  static __device__ __forceinline__ unsigned at(int row, int piece) {
    return row * kRowBytes + ((piece ^ ((row >> 1) & 3)) << 4);
  }
};

// What a block shrinks: `cuts` of a group, kShrinkRows rows each, the first from row `cut` of it on.
struct ShrinkWork {
  Tile tile;
  DeltaRows adapter;
  int offset;  // of the tile in the group
  int end;     // the group's last position, and one
  int cut;
  int cuts;
  __device__ __forceinline__ bool of_none() const { return adapter.row[0].rank == 0 && adapter.row[1].rank == 0; }
};

// The share of tile `number`.
__device__ __forceinline__ ShrinkWork shrink_work(const MoePrefillShrinkArgs& args, int number) {
  const int lane = threadIdx.x % kWarp;
  // The tile, and those in front of it and behind it, asked for at once: a lane has one of each.
  const int in_front = number - 1 - lane, behind = number + 1 + lane;
  const Tile none{-1, -1, 0, 0};
  const Tile tile = tile_at(args.lora_tiles, 4, number);
  Tile front = in_front >= 0 ? tile_at(args.lora_tiles, 4, in_front) : none;
  const Tile next = behind < args.lora_tile_count ? tile_at(args.lora_tiles, 4, behind) : none;
  ShrinkWork work{tile, {}, 0, 0, 0, 0};
  if (tile.rows == 0) return work;
  work.adapter = delta_rows(args, tile.slot, tile.expert);
  if (work.of_none()) return work;
  const auto ours = [&](const Tile& other) {
    return other.rows > 0 && other.expert == tile.expert && other.slot == tile.slot;
  };
  // How many tiles of the group are in front of this one: all but the last of a group are full.
  const int full_rows = __shfl_sync(kFullWarp, front.rows, 0);
  int before = 0;
  for (;;) {
    const unsigned others = ~__ballot_sync(kFullWarp, ours(front));
    before += others == 0 ? kWarp : __ffs(others) - 1;
    if (others != 0) break;
    const int i = in_front - before;
    front = i >= 0 ? tile_at(args.lora_tiles, 4, i) : none;
  }
  const unsigned others = ~__ballot_sync(kFullWarp, ours(next));
  const int more = others == 0 ? kWarp : __ffs(others) - 1;
  const int far_end = __shfl_sync(kFullWarp, next.first + next.rows, max(more - 1, 0));
  work.end = more > 0 ? far_end : tile.first + tile.rows;
  // A group's rows are cut in kShrinkRows from its start; the block of the tile that holds a cut's first row
  // takes the cut.
  work.offset = before * (before == 0 ? tile.rows : full_rows);
  work.cut = (work.offset + kShrinkRows - 1) / kShrinkRows * kShrinkRows;
  work.cuts = max(0, (work.offset + tile.rows - work.cut + kShrinkRows - 1) / kShrinkRows);
  return work;
}

// `sync` brings the kWarps warps together, which are the first of the block. With kGather the rows are written to
// `gathered` by position as they pass.
template <class Element, class Shape, bool kGather, class Sync>
__device__ __forceinline__ void shrink_tile(const MoePrefillShrinkArgs& args, const ShrinkWork& work, char* dynamic,
                                            Sync sync, void* gathered = nullptr) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int cuts = work.cuts;
  for (int pass = 0; pass < cuts * (work.adapter.shared ? 1 : 2); ++pass) {
    const int part = pass < cuts ? 0 : 1, row = work.cut + (pass - part * cuts) * Shape::kRows;
    LoraRow factors = work.adapter.row[0];
    if (part == 1) factors = work.adapter.row[1];
    const int rank = static_cast<int>(factors.rank);
    const int first = work.tile.first - work.offset + row;
    const int rows = min(Shape::kRows, work.end - first);

    const unsigned ring = shared_address(dynamic) + warp * Shape::kStages * Shape::kStageBytes;
    const char* a = static_cast<const char*>(args.arena) +
                    static_cast<long long>(factors.a) * kArenaUnit;
    // Each lane copies piece `piece` of rows own, own + 8, ..
    const int own = lane / 4, piece = lane % 4;
    const char* x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = min(own + 8 * i, rows - 1);
      const long long at = args.perm == nullptr ? first + n : args.perm[first + n] / args.top_k;
      x[i] = static_cast<const char*>(args.x) + at * args.x_pitch * 2;
    }
    const int chunks = (args.k + Shape::kDepth - 1) / Shape::kDepth;
    const int mine = (chunks - warp + Shape::kWarps - 1) / Shape::kWarps;

    for (int step = 0; step * kDeltaRank < rank; ++step) {
      // Rows of A; those beyond the rank are zeros.
      const char* factor[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = step * kDeltaRank + own + 8 * i;
        factor[i] = at < rank ? a + static_cast<long long>(at) * args.k * 2 : nullptr;
      }
      const auto load = [&](int index) {
        if (index < mine) {
          const int k0 = (warp + index * Shape::kWarps) * Shape::kDepth + piece * 8;
          const bool there = k0 < args.k;
          const int from = there ? k0 * 2 : 0;
          // Eight rows further the exchange of pieces is the same.
          const unsigned to = ring + index % Shape::kStages * Shape::kStageBytes + Shape::at(own, piece);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const bool in_rank = factor[i] != nullptr;
            copy16(to + i * 8 * Shape::kRowBytes, (in_rank ? factor[i] : a) + from, in_rank && there);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            copy16(to + Shape::kHalfStage + i * 8 * Shape::kRowBytes, x[i] + from,
                   there && own + 8 * i < rows);
          }
        }
        copies_commit();
      };
      const bool gathers = kGather && step == 0 && (part == 0 || work.adapter.row[0].rank == 0);
      float acc[2][4][4] = {};
#pragma unroll
      for (int i = 0; i < Shape::kStages - 1; ++i) load(i);
      for (int index = 0; index < mine; ++index) {
        copies_wait<Shape::kStages - 2>();
        __syncwarp();  // the copies of all lanes have landed, and all have read the stage before
        load(index + Shape::kStages - 1);
        const unsigned from = ring + index % Shape::kStages * Shape::kStageBytes;
        if constexpr (kGather) {
          // Each lane what it has copied.
          const int k0 = (warp + index * Shape::kWarps) * Shape::kDepth + piece * 8;
          if (gathers && k0 < args.k) {
            char* to = static_cast<char*>(gathered) + (static_cast<long long>(first + own) * args.k + k0) * 2;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if (own + 8 * i >= rows) break;
              const uint4 value =
                  load_shared16(from + Shape::kHalfStage + Shape::at(own, piece) + i * 8 * Shape::kRowBytes);
              *reinterpret_cast<uint4*>(to + static_cast<long long>(i) * 16 * args.k) = value;
            }
          }
        }
#pragma unroll
        for (int kk = 0; kk < Shape::kDepth / 16; ++kk) {
          unsigned left[2][4], right[2][4];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            load_matrices(left[h], from + Shape::at(h * 16 + lane % 16, kk * 2 + lane / 16));
            load_matrices(right[h], from + Shape::kHalfStage +
                                        Shape::at(h * 16 + lane / 16 * 8 + lane % 8,
                                                  kk * 2 + lane / 8 % 2));
          }
#pragma unroll
          for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int q = 0; q < 4; ++q) {
              warp_product<Element>(acc[h][q], left[h], right[q / 2][q % 2 * 2],
                                    right[q / 2][q % 2 * 2 + 1]);
            }
          }
        }
      }
      copies_wait<0>();
      sync();  // all rings are read
      float* sums = reinterpret_cast<float*>(dynamic);
      const int g = lane / 4, t = lane % 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int n = q * 8 + 2 * t + c % 2, r = h * 16 + g + c / 2 * 8;
            sums[(warp * Shape::kRows + n) * Shape::kSumPitch + r] = acc[h][q][c];
          }
        }
      }
      sync();
      const int n = threadIdx.x / 8, r = threadIdx.x % 8 * 4;
      float value[4] = {};
#pragma unroll
      for (int w = 0; w < Shape::kWarps; ++w) {
        const float4 one =
            *reinterpret_cast<const float4*>(sums + (w * Shape::kRows + n) * Shape::kSumPitch + r);
        value[0] += one.x;
        value[1] += one.y;
        value[2] += one.z;
        value[3] += one.w;
      }
      if (n < rows) {
        char* row = static_cast<char*>(args.shrunk) + static_cast<long long>(first + n) * kShrunkRow;
#pragma unroll
        for (int i = 0; i < 4; ++i) value[i] *= factors.scale;
        Shrunk::store(row + (part * kDeltaSteps + step) * kShrunkStep, r, value);
      }
      sync();  // the sums have been read
    }
  }
}

// Of kernels that shrink alone.
using ShrinkAlone = ShrinkShape<3>;
static_assert(ShrinkAlone::kBytes == 98304, "the host asks for as much shared memory");

template <class Config, int kThreads>
__device__ void moe_prefill_shrink(const MoePrefillShrinkArgs& args) {
  static_assert(kThreads == ShrinkAlone::kWarps * kWarp, "threads");
  extern __shared__ __align__(128) char dynamic[];
  // The kernel behind may read the lists of the routing at once, so it begins when that has ended.
  if (args.needs == kNeedsAll) wait_for_front();
  let_next_begin();
  const ShrinkWork work = shrink_work(args, blockIdx.x);
  if (args.needs == kNeedsX) wait_for_front();
  shrink_tile<typename Config::Element, ShrinkAlone, false>(args, work, dynamic, [] { __syncthreads(); });
  // What is behind counts on all in front.
  if (args.needs == kNeedsNothing) wait_for_front();
}

// Gathers the rows that no shrink passes: of a tile without factors, for its block; and of no tile, for each warp of
// the grid some. Tiles lie in the order of positions, and behind them those of no rows.
template <int kThreads>
__device__ __forceinline__ void gather_others(const MoePrefillGatherShrinkArgs& args, const ShrinkWork& work) {
  constexpr int kWarps = kThreads / kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (work.of_none()) {
    for (int n = warp; n < work.tile.rows; n += kWarps) gather_row(args.gather, work.tile.first + n, 0, 1);
  }
  const int pairs = args.gather.pairs, tiles = args.shrink.lora_tile_count;
  const int warps = gridDim.x * kWarps, each = (pairs + warps - 1) / warps;
  int row = (blockIdx.x * kWarps + warp) * each;
  const int end = min(row + each, pairs);
  if (row >= end) return;
  const auto tile = [&](int i) { return tile_at(args.shrink.lora_tiles, 4, i); };
  // The first tile that ends behind the row is in low .. high.
  int low = 0, high = tiles;
  while (low < high) {
    const int stride = (high - low + kWarp - 1) / kWarp, i = low + lane * stride;
    bool behind = true;
    if (i < high) {
      const Tile one = tile(i);
      behind = one.rows == 0 || one.first + one.rows > row;
    }
    const unsigned all = __ballot_sync(kFullWarp, behind);
    const int in_front = all == 0 ? kWarp : __ffs(all) - 1;
    high = min(high, low + in_front * stride);
    if (in_front > 0) low += (in_front - 1) * stride + 1;
  }
  for (int i = low; row < end; ++i) {
    const Tile next = i < tiles ? tile(i) : Tile{-1, -1, 0, 0};
    const int begin = next.rows == 0 ? end : min(next.first, end);
    for (; row < begin; ++row) gather_row(args.gather, row, 0, 1);
    row = max(row, next.first + next.rows);
  }
}

// The gather too: rows are written as they are shrunk, and the others behind.
template <class Config, int kThreads>
__device__ void moe_prefill_gather_shrink(const MoePrefillGatherShrinkArgs& args) {
  static_assert(kThreads == ShrinkAlone::kWarps * kWarp, "threads");
  extern __shared__ __align__(128) char dynamic[];
  wait_for_front();
  let_next_begin();
  const ShrinkWork work = shrink_work(args.shrink, blockIdx.x);
  shrink_tile<typename Config::Element, ShrinkAlone, true>(args.shrink, work, dynamic, [] { __syncthreads(); },
                                                           args.gather.out);
  gather_others<kThreads>(args, work);
}

}  // namespace amphora
