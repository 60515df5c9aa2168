// The first half of a dense projection's deltas, on tensor cores: shrunk[row, slice] = scale · x·Aᵀ for
// every row with an adapter that touches the slice, summed in f32 and kept as two elements each.
//
// Grid: (tiles of segments, slices, parts of the rank). A block takes rows of one adapter, 16 at a time,
// and every gridDim.z-th 8 or 32 rows of A; its warps share k in fixed parts, whose sums meet in the
// order of the warps, so a row's bits depend on its own row of x and its own A alone. Operands come
// straight from memory in fragment order: both sides permute k alike, so that every load has 16 bytes.
//
// The plan, the table and the first of A are read while the kernel in front ends. The next may begin at
// once, to bring weights, and then waits for this one (`early`); or it is let begin when x is complete, and
// then reads x without waiting itself.
#pragma once

#include "amphora/args.h"
#include "amphora/dense.cuh"
#include "amphora/overlap.cuh"
#include "amphora/reduce.cuh"
#include "amphora/tile.cuh"

namespace amphora {

constexpr int kShrinkRows = 16;    // rows of an mma
constexpr int kShrinkGranule = 32; // elements of k that one load of a warp covers in 8 rows

// kGroups · 8 rows of A from `first_rank` on.
template <class Element, int kThreads, int kGroups>
__device__ __forceinline__ void shrink_rows(const DenseShrinkArgs& args, const Tile& tile,
                                            const LoraRow& lora, int first_rank, float* shared) {
  constexpr int kWarps = kThreads / kWarp;
  constexpr int kAhead = kGroups == 1 ? 6 : 2;    // granules of A in registers
  constexpr int kInner = kGroups == 1 ? 3 : 2;    // granules of x in registers
  constexpr int kCols = kGroups * 8;
  static_assert(kAhead % kInner == 0, "whole rounds");
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = lane / 4, quad = lane % 4;
  const int slice = blockIdx.y;
  const int rank = static_cast<int>(lora.rank);
  const bool aligned = (args.aligned & kAlignedOperands) != 0;
  const int granules = (args.k + kShrinkGranule - 1) / kShrinkGranule;
  const int begin = granules * warp / kWarps, end = granules * (warp + 1) / kWarps;
  const Element* a = lora_block<Element>(args.lora, lora.a) + static_cast<long long>(first_rank + group) * args.k;

  const auto load_a = [&](uint4 (&to)[kAhead][kGroups], int at) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        // Classes are multiples of 8: a group of rows is all there or not at all.
        const bool there = at + i < end && first_rank + j * 8 < rank;
        to[i][j] = there ? load_octet(a + static_cast<long long>(j) * 8 * args.k,
                                      (at + i) * kShrinkGranule + quad * kOctet, args.k, aligned)
                         : make_uint4(0, 0, 0, 0);
      }
    }
  };

  for (int start = 0; start < tile.rows; start += kShrinkRows) {
    uint4 factor[kAhead][kGroups];
    load_a(factor, begin);
    const Element* x = static_cast<const Element*>(args.x);
    const bool low = start + group < tile.rows, high = start + group + 8 < tile.rows;
    const long long row_low = low ? args.perm[tile.first + start + group] : 0;
    const long long row_high = high ? args.perm[tile.first + start + group + 8] : 0;
    wait_for_front();
    let_next_begin();
    float acc[kGroups][4] = {};
    for (int at = begin; at < end; at += kAhead) {
      if (at != begin) load_a(factor, at);
#pragma unroll
      for (int round = 0; round < kAhead; round += kInner) {
        uint4 upper[kInner], lower[kInner];
#pragma unroll
        for (int i = 0; i < kInner; ++i) {
          const int element = (at + round + i) * kShrinkGranule + quad * kOctet;
          const bool there = at + round + i < end;
          upper[i] = there && low ? load_octet(x + row_low * args.x_pitch, element, args.k, aligned)
                                  : make_uint4(0, 0, 0, 0);
          lower[i] = there && high ? load_octet(x + row_high * args.x_pitch, element, args.k, aligned)
                                   : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < kInner; ++i) {
#pragma unroll
          for (int j = 0; j < kGroups; ++j) {
            const uint4& b = factor[round + i][j];
            mma_k16<Element>(acc[j], upper[i].x, lower[i].x, upper[i].y, lower[i].y, b.x, b.y);
            mma_k16<Element>(acc[j], upper[i].z, lower[i].z, upper[i].w, lower[i].w, b.z, b.w);
          }
        }
      }
    }

    __syncthreads();  // the sums of the rows before have been read
    float* own = shared + warp * kShrinkRows * kCols;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const int col = j * 8 + quad * 2;
      own[group * kCols + col] = acc[j][0];
      own[group * kCols + col + 1] = acc[j][1];
      own[(group + 8) * kCols + col] = acc[j][2];
      own[(group + 8) * kCols + col + 1] = acc[j][3];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kShrinkRows * kCols; i += kThreads) {
      const int r = i / kCols, col = i % kCols;
      if (start + r >= tile.rows || first_rank + col >= rank) continue;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared[w * kShrinkRows * kCols + i];
      const long long row = args.perm[tile.first + start + r];
      const Element rounded = narrow<Element>(sum * lora.scale);
      Element* out = shrunk_at<Element>(args.lora, row, slice) + first_rank + col;
      out[0] = rounded;
      out[rank] = narrow<Element>(sum * lora.scale - widen(rounded));
    }
  }
}

template <class Config, int kThreads>
__device__ void dense_shrink(const DenseShrinkArgs& args) {
  using Element = typename Config::Element;
  __shared__ float shared[kThreads / kWarp * kShrinkRows * 32];
  if (args.early) let_next_begin();
  const Tile tile = tile_at(args.tiles, 3, blockIdx.x);
  LoraRow lora{0, 0, 0, 0.f};
  if (tile.rows > 0) lora = lora_row(args.lora, tile.slot, blockIdx.y, 0);
  const int rank = static_cast<int>(lora.rank), step = args.rank_rows * gridDim.z;
  for (int first = blockIdx.z * args.rank_rows; first < rank; first += step) {
    if (args.rank_rows == 8) {
      shrink_rows<Element, kThreads, 1>(args, tile, lora, first, shared);
    } else {
      shrink_rows<Element, kThreads, 4>(args, tile, lora, first, shared);
    }
  }
  wait_for_front();
  let_next_begin();
}

}  // namespace amphora
