// The shrink of a dense projection (dense_shrink.cuh) for many rows: shrunk[row, slice] = scale · x·Aᵀ.
//
// Grid: (tiles of segments / tiles of a block, slices, parts of the rank). Neighbouring tiles of one slot
// are one run of up to 48 rows, against 32 rows of A: an octet of A that a lane holds meets three products
// of 16 rows. The warps share k in fixed parts, whose sums meet in the order of the warps, so a row's bits
// depend on its own row of x and its own A alone, and are those of the other kernel. Operands come
// straight from memory in fragment order, through a ring of registers; both sides permute k alike, so that
// every load has 16 bytes. Rows of x and A lie on 16 bytes.
#pragma once

#include "amphora/args.h"
#include "amphora/dense.cuh"
#include "amphora/overlap.cuh"
#include "amphora/reduce.cuh"
#include "amphora/tile.cuh"

namespace amphora {

template <class Element, int kThreads>
struct ShrinkMany {
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int kRows = 16, kHalves = 3;  // rows of a product, and products of a lane's A
  static constexpr int kGroups = 4, kCols = kGroups * 8;
  static constexpr int kStages = 3;
  static constexpr int kOctets = 4;              // of a granule: a load of a warp has one of each of 8 rows
  static constexpr int kShared = kWarps * kRows * kCols;

  const DenseShrinkArgs& args;
  float* const shared;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = lane / 4, quad = lane % 4;
  const int width = args.k / kOctet;  // octets of a row
  int begin, end;                     // granules of this warp

  __device__ __forceinline__ ShrinkMany(const DenseShrinkArgs& args, float* shared) : args(args), shared(shared) {
    const int granules = (width + kOctets - 1) / kOctets;
    begin = granules * warp / kWarps;
    end = granules * (warp + 1) / kWarps;
  }

  // Rows begin `row` octets from the front, which 31 bits count: 16 bytes each.
  __device__ __forceinline__ uint4 load(const uint4* from, int row, int granule, bool there) const {
    const int octet = granule * kOctets + quad;
    return there && granule < end && octet < width ? load_fresh(from + (row + octet)) : make_uint4(0, 0, 0, 0);
  }

  // Rows [start, start + 48) of a tile against rows [first, first + 32) of its A.
  __device__ __forceinline__ void run(const Tile& tile, const LoraRow& lora, int start, int first) const {
    const int rank = static_cast<int>(lora.rank);
    const uint4* a = reinterpret_cast<const uint4*>(lora_block<Element>(args.lora, lora.a));
    const uint4* x = static_cast<const uint4*>(args.x);
    const int pitch = static_cast<int>(args.x_pitch / kOctet), first_a = (first + group) * width;
    int row[2 * kHalves];
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {
      const int at = start + i * 8 + group;
      row[i] = at < tile.rows ? args.perm[tile.first + at] * pitch : -1;
    }
    uint4 factor[kStages][kGroups], rows[kStages][2 * kHalves];
    const auto load_a = [&](int stage, int granule) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        // Classes are multiples of 8: a group of rows is all there or not at all.
        factor[stage][j] = load(a, first_a + j * 8 * width, granule, first + j * 8 < rank);
      }
    };
    const auto load_x = [&](int stage, int granule) {
#pragma unroll
      for (int i = 0; i < 2 * kHalves; ++i) rows[stage][i] = load(x, row[i], granule, row[i] >= 0);
    };
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) load_a(stage, begin + stage);
    wait_for_front();
    let_next_begin();
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) load_x(stage, begin + stage);
    float acc[kHalves][kGroups][4] = {};
    for (int at = begin; at < end; at += kStages) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const uint4 &upper = rows[stage][half * 2], &lower = rows[stage][half * 2 + 1];
#pragma unroll
          for (int j = 0; j < kGroups; ++j) {
            const uint4& b = factor[stage][j];
            mma_k16<Element>(acc[half][j], upper.x, lower.x, upper.y, lower.y, b.x, b.y);
            mma_k16<Element>(acc[half][j], upper.z, lower.z, upper.w, lower.w, b.z, b.w);
          }
        }
        load_a(stage, at + stage + kStages);
        load_x(stage, at + stage + kStages);
      }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int top = start + half * kRows;
      if (top >= tile.rows) break;
      __syncthreads();  // the sums before have been read
      float* own = shared + warp * kRows * kCols + group * kCols + quad * 2;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        *reinterpret_cast<float2*>(own + j * 8) = make_float2(acc[half][j][0], acc[half][j][1]);
        *reinterpret_cast<float2*>(own + j * 8 + 8 * kCols) = make_float2(acc[half][j][2], acc[half][j][3]);
      }
      __syncthreads();
      meet(tile, lora, top, first);
    }
  }

  // Adds what the warps have left of 16 rows.
  __device__ __forceinline__ void meet(const Tile& tile, const LoraRow& lora, int top, int first) const {
    const int rank = static_cast<int>(lora.rank);
    for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) {
      const int r = i / kCols, col = i % kCols;
      if (top + r >= tile.rows || first + col >= rank) continue;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared[w * kRows * kCols + i];
      const long long row = args.perm[tile.first + top + r];
      const Element rounded = narrow<Element>(sum * lora.scale);
      Element* out = shrunk_at<Element>(args.lora, row, blockIdx.y) + first + col;
      out[0] = rounded;
      out[rank] = narrow<Element>(sum * lora.scale - widen(rounded));
    }
  }
};

template <class Config, int kThreads>
__device__ void dense_shrink_many(const DenseShrinkArgs& args) {
  using Many = ShrinkMany<typename Config::Element, kThreads>;
  __shared__ float shared[Many::kShared];
  const Many many(args, shared);
  const int last = min(args.tile_count, static_cast<int>(blockIdx.x + 1) * args.block_tiles);
  for (int index = blockIdx.x * args.block_tiles; index < last;) {
    Tile tile = tile_at(args.tiles, 3, index++);
    for (; index < last; ++index) {
      const Tile next = tile_at(args.tiles, 3, index);
      if (next.rows == 0 || next.slot != tile.slot) break;
      tile.rows += next.rows;
    }
    if (tile.rows == 0) break;  // none behind has any
    const LoraRow lora = lora_row(args.lora, tile.slot, blockIdx.y, 0);
    const int rank = static_cast<int>(lora.rank);
    for (int first = blockIdx.z * Many::kCols; first < rank; first += gridDim.z * Many::kCols) {
      for (int start = 0; start < tile.rows; start += Many::kHalves * Many::kRows) many.run(tile, lora, start, first);
    }
  }
  wait_for_front();
  let_next_begin();
}

}  // namespace amphora
